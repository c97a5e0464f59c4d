"""The launcher's side of the guards: one connection per rank, for output, input and signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from aiodist.control.link import Link, Listener
from aiodist.control.places import listen
from aiodist.frames import Frame, FrameKind, WireError, frame, pack, unpack
from aiodist.handshake import Hello, Refused
from aiodist.launch.output import Streams, read_input
from aiodist.launch.start import Start
from aiodist.launch.verdict import Ending
from aiodist.machine import process_table

_GONE_SECONDS: Final = 1.0
_TAKEN_BYTES: Final = 1 << 16
"""Output that is written before the launcher asks the guard for more, in bytes."""


@dataclass(frozen=True)
class Finished:
    """No more output comes from this rank."""

    rank: int


class Ranks:
    """Accepts the guards, lets each start its rank, and delivers output, input, signals and exits.

    Guards connect to `address`.
    """

    def __init__(
        self,
        token: str,
        starts: list[Start],
        streams: Streams,
        notify: Callable[[Ending | Finished], None],
        host: str,
    ) -> None:
        """`starts` are the programs of the ranks, and may grow. `host` is the address of this host for guards.

        Output goes to `streams`, one piece after the other: if the reader of the launcher's output waits, the rank
        waits. `notify` gets `Ending` and then `Finished` of each rank, also if its guard was killed, since the kernel
        then kills the rank.
        """
        self._token = token
        self._starts = starts
        self._streams = streams
        self._notify = notify
        self._host = host
        self._links: dict[int, Link] = {}
        """Connections, by rank, also after their end."""
        self._pids: dict[int, int] = {}
        self._signals: list[int] = []
        """Signals that ranks without a guard still get."""
        self._ended: set[int] = set()
        self._done: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None
        self.address = ""

    async def __aenter__(self) -> Ranks:
        sock = await listen(self._host, 0, backlog=max(128, len(self._starts)))
        host, port = sock.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._listener = Listener(sock, self._token, self._admit)
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()
        self.release()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links.values():
            await link.wait_closed(_GONE_SECONDS)

    @property
    def came(self) -> frozenset[int]:
        """The ranks whose guards have connected."""
        return frozenset(self._links)

    def signal(self, signum: int) -> None:
        """Send a signal to every rank, also to later ones. SIGKILL reaches the processes of a rank too."""
        self._signals.append(signum)
        for link in self._links.values():
            link.write(frame(FrameKind.SIGNAL, signum))

    def kill(self, rank: int) -> None:
        """Kill one rank and its processes, now or when its guard connects."""
        self._starts[rank] = replace(self._starts[rank], argv=["true"])
        if (link := self._links.get(rank)) is not None:
            link.write(frame(FrameKind.SIGNAL, signal.SIGKILL))

    def release(self) -> None:
        """End all guards, which first kill the remaining processes of their ranks."""
        for link in self._links.values():
            link.close("the launcher ends")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _admit(self, link: Link, hello: Hello, welcome: Callable[[dict[str, Any]], bytes]) -> None:
        rank = hello.rank
        if not 0 <= rank < len(self._starts) or rank in self._links:
            raise Refused("rank", f"rank {rank} of {hello.size} is not expected here")
        link.trust()
        arrived: asyncio.Queue[Frame | None] = asyncio.Queue()  # `TAKEN` bounds the output in it
        link.on_frame = arrived.put_nowait
        link.on_closed = lambda cause: arrived.put_nowait(None)
        self._links[rank] = link
        link.write(welcome({}))
        link.write(frame(FrameKind.START, body=pack(asdict(self._starts[rank]))))
        for signum in self._signals:
            link.write(frame(FrameKind.SIGNAL, signum))
        self._spawn(self._serve(rank, link, arrived))

    async def _serve(self, rank: int, link: Link, arrived: asyncio.Queue[Frame | None]) -> None:
        taken = 0
        while (received := await arrived.get()) is not None:
            if received.kind in (FrameKind.OUT, FrameKind.ERR):
                await self._streams.write(rank, FrameKind(received.kind), received.body)
                taken += len(received.body)
                if taken >= _TAKEN_BYTES:
                    link.write(frame(FrameKind.TAKEN, taken))
                    taken = 0
                continue
            try:
                await self._take(rank, link, received)
            except WireError as error:
                link.abort(f"it broke the protocol: {error}")
        if rank not in self._done:
            await self._lost(rank)
            await self._streams.finish(rank)
            self._notify(Finished(rank))

    async def _take(self, rank: int, link: Link, received: Frame) -> None:
        match received.kind:
            case FrameKind.WANT:
                self._spawn(self._feed(link))
            case FrameKind.STARTED:
                pid, table = unpack(received.body)
                if table == process_table():
                    self._pids[rank] = pid
            case FrameKind.ENDED:
                self._ended.add(rank)
                self._notify(Ending(rank, *unpack(received.body)))
            case FrameKind.DONE:
                self._pids.pop(rank, None)
                self._done.add(rank)
                await self._streams.finish(rank)
                self._notify(Finished(rank))
            case kind:
                raise WireError(f"a frame of kind {kind} from the guard of rank {rank}")

    async def _feed(self, link: Link) -> None:
        link.write(frame(FrameKind.INPUT, body=await read_input()))

    async def _lost(self, rank: int) -> None:
        """Report the end of a rank whose guard was killed, and kill the processes of that rank."""
        if rank not in self._ended:
            self._ended.add(rank)
            self._notify(Ending(rank, -signal.SIGKILL, told=True))
        if rank in self._pids:
            group = self._pids.pop(rank)
            # A killed process needs a moment to end. If no parent collects it, the process never seems to end.
            with contextlib.suppress(ProcessLookupError, PermissionError, TimeoutError):
                async with asyncio.timeout(_GONE_SECONDS):
                    while True:
                        os.killpg(group, signal.SIGKILL)
                        await asyncio.sleep(0.01)
