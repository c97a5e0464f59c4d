"""The end of a parameter server on one rank: this rank waits for its requests, then for all ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Protocol

from aiodist.errors import AiodistError, OperationTimeout, PeerLost
from aiodist.handles import Handle
from aiodist.handles.kernel import Program
from aiodist.handles.polling import transport_lock
from aiodist.ps.client import Client
from aiodist.ps.context import Context

_DRAIN_SECONDS = 1e-3
_PING_SECONDS = 10.0
"""Time between two pings of all servers, in seconds."""
_ANSWER_SECONDS = 60.0
"""Longest time to the answer of a ping, in seconds. A live rank answers immediately, even if its loop is busy."""
_NO_LIMIT = inf  # a rank that leaves waits for the others, however long they work


class Run(Protocol):
    """Runs programs."""

    def __call__(
        self, op: str, make: Callable[[], Program[Any]], timeout: float | None, *, now: bool = False
    ) -> Handle[Any]:
        """See `ParameterServerSession.run`."""


class Leaving:
    """The leave of one rank over one communicator, and the pings before (loop's thread)."""

    def __init__(self, context: Context, client: Client, run: Run, failed: Callable[[BaseException], None]) -> None:
        """`failed` takes the error of a ping, which ends the parameter server on all ranks."""
        self._context = context
        self._client = client
        self._run = run
        self._failed = failed
        self._over = asyncio.Event()
        """Set when this rank receives nothing more."""
        self._pinging = asyncio.ensure_future(self._ping())

    async def _ping(self) -> None:
        """Ping all servers while requests are open. Abort on all ranks if a server does not answer.

        A connection may lose messages without a report, and a rank that leaves waits without a deadline.
        """
        while True:
            await asyncio.sleep(_PING_SECONDS)
            if self._client.busy:
                try:
                    await self._run("ping", partial(self._ask_all, "ping"), _ANSWER_SECONDS, now=True)
                except AiodistError as error:
                    self._failed(error)
                    return

    async def leave(self) -> None:
        """Leave the clocks of all servers, wait for this rank's requests, and then for all ranks."""
        await self._run("leave", partial(self._ask_all, "leave"), _NO_LIMIT)
        while self._client.busy:  # noqa: ASYNC110  - any thread may receive the end of a request
            await asyncio.sleep(_DRAIN_SECONDS)
        if (error := self._client.pushes.late_error()) is not None:
            raise error
        await self._run("leave", self._goodbye, _NO_LIMIT)
        if not self._context.gone:  # else the transport is aborted
            await self._last_entry()

    async def _ask_all(self, op: str) -> None:
        for rank in self._context.living():
            await self._asked(rank, op)

    async def _goodbye(self) -> None:
        """Wait for all ranks at the first server, or at the next one after its loss."""
        context = self._context
        while (living := context.living()) and not (await self._asked(living[0], "bye")):
            pass
        if not living:
            return
        others = [rank for rank in range(context.size) if rank != living[0] and rank not in context.gone]
        if others and context.rank == others[0]:
            context.coalescer.put_last(living[0])

    async def _asked(self, rank: int, op: str) -> bool:
        """Ask a server. Return False if it is lost."""
        try:
            await self._client.call(rank, op)
        except PeerLost:
            return False
        return True

    async def _last_entry(self) -> None:
        """Wait until no rank sends anything more."""
        context = self._context
        with transport_lock:
            context.coalescer.when_last(partial(context.progress.post, self._over.set))
        try:
            await asyncio.wait_for(self._over.wait(), _ANSWER_SECONDS)
        except TimeoutError:
            first = context.living()[0]
            rank = first if first != context.rank else next(r for r in range(context.size) if r != first)
            text = f"leave: rank {rank} has not sent its last message for {_ANSWER_SECONDS:g} s"
            raise OperationTimeout(text, late={rank: ""}) from None

    def lose(self) -> None:
        """Wait for no last entry, which a lost rank may owe."""
        self._over.set()

    def close(self) -> None:
        """End the pings and the wait for the last entry."""
        self._over.set()
        self._pinging.cancel()
