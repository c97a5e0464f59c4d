"""The processes on this host: for each rank its guard, or the remote shell that starts it; or one mpirun for all."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from aiodist.errors import LaunchError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Command:
    """A process to start: the guard of `rank`, or an mpirun when that is None."""

    argv: Sequence[str]
    environ: Mapping[str, str] = field(repr=False)
    rank: int | None = None
    told: Mapping[str, str] | None = field(default=None, repr=False)
    """The variables that it reads on its standard input, of a shell on another host; None: it has all."""


@dataclass(frozen=True)
class ProcessEnded:
    """A guard or an mpirun ended."""

    rank: int | None
    code: int


class Processes:
    """Runs the commands, each in a session of its own, so that Ctrl-C reaches them through the launcher only.

    The guard of rank 0 has the standard input. `sink` gets the output of an mpirun or a remote shell. A guard
    writes only the error that ends it, to the launcher's own streams. Leaving the context waits `patience` seconds for
    all processes, then kills them. Entering it raises `LaunchError` if one cannot be started.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        *,
        sink: Callable[[bytes], Awaitable[None]],
        notify: Callable[[ProcessEnded], None],
    ) -> None:
        self.patience = 5.0
        self._commands = commands
        self._sink = sink
        self._notify = notify
        self._processes: list[Process] = []
        self._by_rank: dict[int | None, Process] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Processes:
        try:
            for command in self._commands:
                await self.start(command)
        except BaseException:
            self.patience = 0.0
            await self.__aexit__()
            raise
        return self

    async def start(self, command: Command) -> None:
        """Run one command, as those that were given at first; raise `LaunchError` where it cannot be started."""
        mpirun = command.rank is None
        output = PIPE if mpirun or command.told is not None else None
        # The kernel kills an mpirun or a remote shell when we die (a guard sees that by itself, once it is connected).
        # It is looked up before the fork: the child must not import.
        dies_with_us = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                env=command.environ,
                stdin=PIPE if command.told is not None else None if command.rank == 0 else DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=dies_with_us if output is not None else None,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {Path(command.argv[0]).name}: {error}") from error
        if process.stdin is not None and command.told is not None:
            process.stdin.write(
                os.fsencode("".join(f"{name}={value}\n" for name, value in command.told.items()) + "\n")
            )
            process.stdin.close()
        self._processes.append(process)
        self._by_rank[command.rank] = process
        self._tasks.append(asyncio.create_task(self._watch(command.rank, process)))

    def kill(self, rank: int) -> None:
        """Kill what starts the guard of a rank, which has not come."""
        process = self._by_rank.get(rank)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    async def __aexit__(self, *raised: object) -> None:
        try:
            await self._end()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end(self) -> None:
        for signum, patience in ((signal.SIGTERM, self.patience), (signal.SIGKILL, 1.0)):
            if not self._tasks or not (await asyncio.wait(self._tasks, timeout=patience))[1]:
                return
            for process in self._processes:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signum)
        await asyncio.wait(self._tasks, timeout=1.0)

    async def _watch(self, rank: int | None, process: Process) -> None:
        relays = [asyncio.create_task(self._relay(pipe)) for pipe in (process.stdout, process.stderr) if pipe]
        try:
            code = await process.wait()
            if relays:  # what it started may hold its pipes open
                await asyncio.wait(relays, timeout=0.2)
        finally:
            for relay in relays:
                relay.cancel()
        self._notify(ProcessEnded(rank, code))

    async def _relay(self, pipe: asyncio.StreamReader) -> None:
        while data := await pipe.read(1 << 16):
            await self._sink(data)
