"""The leave of one rank: the rank waits for its requests, then for all ranks."""

from __future__ import annotations

import asyncio
from functools import partial
from math import inf

from aiodist.errors import OperationTimeout
from aiodist.handles.polling import transport_lock
from aiodist.ps.client import Client
from aiodist.ps.context import Context
from aiodist.ps.watching import Run

_DRAIN_SECONDS = 1e-3
_LAST_SECONDS = 60.0
"""Longest time from the goodbye of all ranks to the last entry, in seconds."""
_NO_LIMIT = inf  # a rank that leaves waits for the others, however long they work


class Leaving:
    """The leave of one rank over one communicator (loop's thread)."""

    def __init__(self, context: Context, client: Client, run: Run) -> None:
        self._context = context
        self._client = client
        self._run = run
        self._over = asyncio.Event()
        """Set when this rank receives nothing more."""

    async def leave(self) -> None:
        """Leave the clocks of all servers, wait for this rank's requests, and then for all ranks."""
        await self._run("leave", partial(self._client.asking_all, "leave"), _NO_LIMIT)
        while self._client.busy:  # noqa: ASYNC110  - any thread may receive the end of a request
            await asyncio.sleep(_DRAIN_SECONDS)
        if (error := self._client.pushes.late_error()) is not None:
            raise error
        await self._run("leave", self._goodbye, _NO_LIMIT)
        if not self._context.gone:  # else the transport is aborted
            await self._last_entry()

    async def _goodbye(self) -> None:
        """Wait for all ranks at the first server, or at the next one after its loss."""
        context = self._context
        while (living := context.living()) and not (await self._client.ask_living(living[0], "bye")):
            pass
        if not living:
            return
        others = [rank for rank in range(context.size) if rank != living[0] and rank not in context.gone]
        if others and context.rank == others[0]:
            context.coalescer.put_last(living[0])

    async def _last_entry(self) -> None:
        """Wait until no rank sends anything more."""
        context = self._context
        with transport_lock:
            context.coalescer.when_last(partial(context.progress.post, self._over.set))
        try:
            await asyncio.wait_for(self._over.wait(), _LAST_SECONDS)
        except TimeoutError:
            first = context.living()[0]
            rank = first if first != context.rank else next(r for r in range(context.size) if r != first)
            text = f"leave: rank {rank} has not sent its last message for {_LAST_SECONDS:g} s"
            raise OperationTimeout(text, late={rank: ""}) from None

    def end(self) -> None:
        """Wait for no last entry, since the parameter server is closed, or a lost rank may owe the entry."""
        self._over.set()
