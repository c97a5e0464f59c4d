"""The launcher's end: one connection a rank, over which its output comes and signals go."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, replace

from aiodist.errors import LaunchError
from aiodist.launch import wire
from aiodist.launch.output import Streams, read_input
from aiodist.launch.verdict import Ending
from aiodist.launch.wire import Kind, Start
from aiodist.machine import process_table

_HELLO_TIMEOUT = 10.0
_LONGEST_HELLO = 4096
_GONE_SECONDS = 1.0


@dataclass(frozen=True)
class Finished:
    """Nothing more comes from this rank."""

    rank: int


class Ranks:
    """Lets the guards in, has them start their ranks, and hands on what they say.

    `starts` has what each rank runs, and may grow. Output goes to `streams`, one chunk after the other: to wait there
    makes the rank wait. `notify` hears `Ending` and then `Finished` of each rank, also of one whose
    guard was killed (the kernel kills the rank then). Guards connect to `address`, at the address `host` of this host.
    """

    def __init__(
        self,
        token: str,
        starts: list[Start],
        streams: Streams,
        notify: Callable[[Ending | Finished], None],
        host: str,
    ) -> None:
        self._token = token
        self._starts = starts
        self._streams = streams
        self._notify = notify
        self._host = host
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._pids: dict[int, int] = {}
        self._told: list[int] = []
        self._ended: set[int] = set()
        self._done: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> Ranks:
        self._server = await asyncio.start_server(lambda *link: self._spawn(self._meet(*link)), self._host, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._server is not None:
            self._server.close()
        self.release()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def came(self) -> frozenset[int]:
        """The ranks whose guards have connected."""
        return frozenset(self._writers)

    def signal(self, signum: int) -> None:
        """Send a signal to every rank, those too that come later; SIGKILL reaches what a rank started as well."""
        self._told.append(signum)
        for writer in self._writers.values():
            writer.write(wire.pack(Kind.SIGNAL, bytes([signum])))

    def kill(self, rank: int) -> None:
        """Kill one rank, and what it started, now or as soon as its guard comes."""
        self._starts[rank] = replace(self._starts[rank], argv=["true"])
        if (writer := self._writers.get(rank)) is not None:
            writer.write(wire.pack(Kind.SIGNAL, bytes([signal.SIGKILL])))

    def release(self) -> None:
        """Let all guards go: they kill what is left of their ranks, and end."""
        for writer in self._writers.values():
            writer.close()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _feed(self, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.pack(Kind.INPUT, await read_input()))

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            rank = await self._greet(reader)
        except (LaunchError, OSError, TimeoutError, ValueError, TypeError, asyncio.IncompleteReadError):
            writer.close()  # a stranger: nobody of this job
            return
        wire.keep_alive(writer.get_extra_info("socket"))
        self._writers[rank] = writer
        writer.write(wire.pack(Kind.START, asdict(self._starts[rank])))
        for signum in self._told:
            writer.write(wire.pack(Kind.SIGNAL, bytes([signum])))
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, LaunchError):
            await self._listen(rank, reader)
        if rank not in self._done:
            await self._lost(rank)
            await self._streams.finish(rank)
            self._notify(Finished(rank))

    async def _greet(self, reader: asyncio.StreamReader) -> int:
        async with asyncio.timeout(_HELLO_TIMEOUT):
            kind, length = wire.header(await reader.readexactly(wire.HEADER.size))
            if kind is not Kind.HELLO or length > _LONGEST_HELLO:
                raise LaunchError("expected a guard's hello")
            rank, size, token = json.loads(await reader.readexactly(length))
        known = hmac.compare_digest(str(token).encode(), self._token.encode())
        if not known or not 0 <= rank < len(self._starts) or rank in self._writers:
            raise LaunchError(f"rank {rank} of {size} is not awaited here")
        return int(rank)

    async def _listen(self, rank: int, reader: asyncio.StreamReader) -> None:
        while True:
            kind, length = wire.header(await reader.readexactly(wire.HEADER.size))
            payload = await reader.readexactly(length)
            match kind:
                case Kind.OUT | Kind.ERR:
                    await self._streams.write(rank, kind, payload)
                case Kind.WANT:
                    self._spawn(self._feed(self._writers[rank]))
                case Kind.STARTED:
                    pid, table = json.loads(payload)
                    if table == process_table():
                        self._pids[rank] = pid
                case Kind.EXIT:
                    self._ended.add(rank)
                    self._notify(Ending(rank, *json.loads(payload)))
                case Kind.DONE:
                    self._pids.pop(rank, None)
                    self._done.add(rank)
                    await self._streams.finish(rank)
                    self._notify(Finished(rank))
                case _:
                    raise LaunchError(f"the guard of rank {rank} sent {kind!r}")

    async def _lost(self, rank: int) -> None:
        """The guard was killed before it said DONE, the rank with it; what the rank started must go too."""
        if rank not in self._ended:
            self._ended.add(rank)
            self._notify(Ending(rank, -signal.SIGKILL, told=True))
        if rank in self._pids:
            group = self._pids.pop(rank)
            # What is killed takes a moment to be gone; where nobody collects it, it never seems to be.
            with contextlib.suppress(ProcessLookupError, PermissionError, TimeoutError):
                async with asyncio.timeout(_GONE_SECONDS):
                    while True:
                        os.killpg(group, signal.SIGKILL)
                        await asyncio.sleep(0.01)
