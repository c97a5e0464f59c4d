"""`run(job)`: opens the control hub, starts the ranks, hands their output on, and ends everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aiodist.control.exits import name_ranks
from aiodist.control.hub import Hub
from aiodist.errors import LaunchError
from aiodist.launch import commands, discover, processes
from aiodist.launch.commands import Job, Mpi, Place
from aiodist.launch.output import Console, Lines, Logs
from aiodist.launch.ranks import Done, Ended, Ranks
from aiodist.launch.verdict import Ending, Left, Report, Verdict, describe
from aiodist.launch.wire import Kind, Start

__all__ = ["run"]

START_TIMEOUT = 60.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED = (signal.SIGUSR1, signal.SIGUSR2)
_AFTER_KILL = 1.5  # seconds for what was killed to be gone and its last output to be printed
_TIMED_OUT = 124  # as timeout(1) has it


@dataclass(frozen=True)
class _Signal:
    """The launcher received a signal."""

    signum: int


@dataclass(frozen=True)
class _MpirunEnded:
    """The mpirun ended, with its ranks or before them."""

    code: int


_Event = Ended | Done | _Signal | _MpirunEnded


async def run(job: Job, environ: Mapping[str, str] = os.environ) -> int:
    """Run the job to its end and return its exit code; no process of it is left then.

    While it runs, SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 go to the ranks. Who failed, and how, is
    printed on standard error. Raises `ConfigError` or `BackendUnavailable` where the job makes no sense here, and
    `LaunchError` where it cannot be started.
    """
    exports = commands.exported(job.exports, environ)
    mpi = await asyncio.to_thread(discover.find_mpi, job.mpi, environ.get("PATH", os.defpath))
    token = secrets.token_hex(16)
    output = _Output(job)
    events: asyncio.Queue[_Event] = asyncio.Queue()
    start = Start([sys.executable, *job.command], exports)
    async with AsyncExitStack() as stack:
        stack.callback(output.close)
        hub = await stack.enter_async_context(Hub(job.ranks, token=token))
        ranks = Ranks(job.ranks, token, start, sink=output.write, notify=events.put_nowait)
        stack.enter_context(_signals(events.put_nowait))
        started: list[Process] = []
        stack.push_async_callback(processes.finish, started, 1.0)
        await stack.enter_async_context(ranks)
        place = Place(ranks.address, hub.address, token)
        await stack.enter_async_context(_started(job, mpi, place, environ, started, output, events))
        return await _Supervisor(job, hub, ranks, output, events).watch()
    raise AssertionError("unreachable: no context above swallows exceptions")


class _Output:
    """Where the output of all ranks, and the launcher's own words, go."""

    def __init__(self, job: Job) -> None:
        self.console = Console()
        self._logs = Logs(job.log_dir, job.ranks)
        self._lines = {
            (rank, kind): Lines(f"[{rank}] ".encode() if job.prefix else b"")
            for rank in range(job.ranks)
            for kind in (Kind.OUT, Kind.ERR)
        }

    async def write(self, rank: int, kind: Kind, data: bytes) -> None:
        self._logs.write(rank, kind, data)
        await self.console.write(kind, self._lines[rank, kind].feed(data, asyncio.get_running_loop().time()))

    async def flush(self, rank: int) -> None:
        for kind in (Kind.OUT, Kind.ERR):
            await self.console.write(kind, self._lines[rank, kind].flush())

    async def say(self, *lines: str) -> None:
        await self.console.write(Kind.ERR, "".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        self._logs.close()
