"""Finds the late ranks of open requests: for reports, for errors at deadlines, and after lost messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import count
from math import inf
from typing import Any, Protocol

from aiodist.communicator.inquiry import Wait
from aiodist.communicator.watchdog import Watchdog
from aiodist.handles import Handle
from aiodist.handles.kernel import Program
from aiodist.ps.client import Client
from aiodist.ps.context import Context
from aiodist.ps.server import Server

_LOOK_SECONDS = 1.0
"""Time between two checks of the oldest open request, in seconds."""
_PING_LOOKS = 10
"""Number of checks between two pings."""
_ANSWER_SECONDS = 60.0
"""Longest time to the answer of a ping, in seconds. A live rank answers immediately, even if its loop is busy."""
_SHOWN = 16
"""Number of waits given to the watchdog, the longest ones."""


class Run(Protocol):
    """Runs programs."""

    def __call__(
        self, op: str, make: Callable[[], Program[Any]], timeout: float | None, *, now: bool = False
    ) -> Handle[Any]:
        """See `ParameterServerSession.run`."""


class ServerWatch:
    """Watches the open requests of one rank (loop's thread).

    The watchdog of the communicator reports long waits. While the oldest request of the client stays open, this rank
    asks the late ranks for their states, over the control channel, and pings all servers, over the transport. While a
    request on this server waits for the order of another server, this rank pings that server. An answer comes after all
    data messages before the ping, and a rank without an answer ends the parameter server on all ranks, since a
    connection may lose messages without a report.
    """

    def __init__(
        self,
        context: Context,
        client: Client,
        server: Server,
        watchdog: Watchdog,
        world_ranks: Sequence[int],
        run: Run,
        failed: Callable[[BaseException], None],
    ) -> None:
        """`world_ranks` are the world ranks of all ranks. `failed` takes the error of a ping or of the watch itself."""
        self._context = context
        self._client = client
        self._server = server
        self._watchdog = watchdog
        self._inquiry = watchdog.watch.inquiry
        self._world_ranks = world_ranks
        self._run = run
        self._failed = failed
        self._since = inf
        """Time of the first question about the oldest request, or inf before one."""
        self._began: dict[object, float] = {}
        """Time of the first check of each wait, by the number of the call or by the key of the server's wait."""
        watchdog.watch.on_look.append(self._look)
        self._task = asyncio.ensure_future(self._run_watch())

    async def _run_watch(self) -> None:
        try:
            await self._watch()
        except Exception as error:  # noqa: BLE001  - without the watch a lost frame could be a wait without end
            self._failed(error)

    async def _watch(self) -> None:
        oldest, looks = None, 0
        awaited: Collection[int] = ()
        for tick in count(1):
            await asyncio.sleep(_LOOK_SECONDS)
            self._watchdog.watch.keep_watch()
            before, oldest = oldest, self._client.oldest()
            looks = looks + 1 if oldest is not None and oldest == before else 0
            pings = set(self._context.servers) if looks and looks % _PING_LOOKS == 0 else set()
            if tick % _PING_LOOKS == 0:
                before_awaited, awaited = awaited, self._server.late().keys()
                pings |= {rank for rank in awaited if rank in before_awaited}  # not what waits just now
            if looks == 0:
                self._since = inf
            elif looks & (looks - 1) == 0 or looks % _PING_LOOKS == 0:
                self._since = min(self._since, self._inquiry.now())
                others = [rank for rank in self._client.late() if rank != self._context.rank]
                self._inquiry.ask([self._world_ranks[rank] for rank in others], self._context.name)
            pings.discard(self._context.rank)
            if pings:
                await self._run("ping", partial(self._client.pinging, pings), _ANSWER_SECONDS, now=True)

    def _look(self) -> None:
        """Let the watchdog report the calls of this rank, and the requests that wait on its server."""
        now, before = self._inquiry.now(), self._began
        calls: list[tuple[object, object, set[int]]] = []
        calls += [(call, call.seq, ranks) for call, ranks in self._client.waits().items()]
        waits = calls + self._server.waits()
        self._began = {key: before.get(key, now) for _, key, _ in waits}
        old = sorted([each for each in waits if each[1] in before], key=lambda each: self._began[each[1]])
        self._watchdog.requests = [(self._wait(what, ranks), self._began[key]) for what, key, ranks in old[:_SHOWN]]

    def _wait(self, what: object, ranks: set[int]) -> Wait:
        whom = sorted(self._world_ranks[rank] for rank in ranks if rank != self._context.rank)
        return Wait(f"{what} on {self._context.name!r}", 0.0, whom, is_served=True)

    def late(self) -> dict[int, str]:
        """Return the servers that have not answered, each with an open request and the state of the rank if known."""
        late = self._client.late()
        for rank, request in late.items():
            if request == "ping":
                request = late[rank] = self._server.late().get(rank, request)
            if (state := self._inquiry.text(self._world_ranks[rank], self._since)) is not None:
                late[rank] = f"{request}; {state}"
        return late

    def close(self) -> None:
        """End the watch."""
        self._task.cancel()
        self._watchdog.requests = []
        if self._look in self._watchdog.watch.on_look:
            self._watchdog.watch.on_look.remove(self._look)
