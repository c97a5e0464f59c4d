"""The end of a parameter server on one rank: this rank waits for its requests, then for all ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from aiodist.communicator import Communicator, parts_of
from aiodist.errors import AiodistError, CommunicatorClosed, CommunicatorError, OperationTimeout, PeerLost
from aiodist.handles.polling import transport_lock

if TYPE_CHECKING:
    from aiodist.ps.session import ParameterServerSession

Rebind = Callable[[Communicator], Awaitable[None]]

_DRAIN_SECONDS = 1e-3
_PING_SECONDS = 10.0
"""Time between two pings of all servers, in seconds."""
_ANSWER_SECONDS = 60.0
"""Longest time to the answer of a ping, in seconds. A live rank answers immediately, even if its loop is busy."""
_NO_LIMIT = inf  # a rank that leaves waits for the others, however long they work


class Leaving:
    """The leave of one rank over one communicator, and the pings before (loop's thread)."""

    def __init__(self, session: ParameterServerSession) -> None:
        self._session = session
        self._context = session.context
        self._client = session.client
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
                    await self._session.run("ping", partial(self._ask_all, "ping"), _ANSWER_SECONDS, now=True)
                except AiodistError as error:
                    self._session.abort_everywhere(error)
                    return

    async def leave_last(self, rebind: Rebind | None) -> None:
        """Leave, over the last communicator if the ranks of an elastic world regroup meanwhile."""
        session = self._session
        while True:
            try:
                return await session.leaving.leave()
            except (PeerLost, CommunicatorError) as error:
                if rebind is None or not self._superseded(error):
                    raise
            await self._regroup(rebind)

    async def _regroup(self, rebind: Rebind) -> None:
        session = self._session
        while True:
            coll = await session.parent.shrink()  # the error of a failed shrink ends the session
            try:
                return await rebind(coll)
            except (PeerLost, CommunicatorError) as error:
                if session.parent is not coll or not self._superseded(error):
                    raise

    def _superseded(self, error: AiodistError) -> bool:
        """Return True if the ranks of the elastic world regroup, which may be the cause of `error`."""
        parts = parts_of(self._session.parent)
        if parts.registry.elastic is None or isinstance(parts.dispatcher.lifetime.refusal, CommunicatorClosed):
            return False
        return parts.dispatcher.lifetime.refusal is not None or (isinstance(error, PeerLost) and error.lost >= 0)

    async def leave(self) -> None:
        """Leave the clocks of all servers, wait for this rank's requests, and then for all ranks."""
        session = self._session
        if session.refusal is not None:
            raise session.refusal
        await session.run("leave", partial(self._ask_all, "leave"), _NO_LIMIT)
        while self._client.busy:  # noqa: ASYNC110  - any thread may receive the end of a request
            await asyncio.sleep(_DRAIN_SECONDS)
        if (error := self._client.pushes.late_error()) is not None:
            raise error
        await session.run("leave", self._goodbye, _NO_LIMIT)
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
        if self._session.refusal is not None:
            raise self._session.refusal

    def lose(self) -> None:
        """Wait for no last entry, which a lost rank may owe."""
        self._over.set()

    def close(self) -> None:
        """End the pings and the wait for the last entry."""
        self._over.set()
        self._pinging.cancel()
