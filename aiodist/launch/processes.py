"""The processes on this host: a guard for each rank, or one mpirun that starts them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from aiodist.errors import LaunchError

__all__ = ["finish", "start", "start_mpirun"]

_PR_SET_PDEATHSIG = 1


async def start(command: Sequence[str], environ: Mapping[str, str], *, stdin: bool) -> Process:
    """Start a guard in a session of its own, so that Ctrl-C reaches it through us alone; `stdin`: it has ours."""
    return await _start(command, environ, stdin=None if stdin else DEVNULL, output=None)


async def start_mpirun(command: Sequence[str], environ: Mapping[str, str]) -> Process:
    """Start an mpirun, which gives our standard input to rank 0, and which the kernel kills when we die."""
    return await _start(command, environ, stdin=None, output=PIPE, before=_die_with_parent())


async def _start(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    stdin: int | None,
    output: int | None,
    before: Callable[[], None] | None = None,
) -> Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command, env=environ, stdin=stdin, stdout=output, stderr=output, start_new_session=True, preexec_fn=before
        )
    except OSError as error:
        raise LaunchError(f"cannot start {Path(command[0]).name}: {error}") from error


def _die_with_parent() -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: the child must not import or allocate much

    def before() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return before


async def finish(processes: Sequence[Process], patience: float) -> None:
    """Wait until all have ended; after `patience` seconds end them, and their sessions, by force."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if await _ended(processes, patience):
            return
        for process in processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signum)
    await _ended(processes, patience)


async def _ended(processes: Sequence[Process], patience: float) -> bool:
    waits = [asyncio.ensure_future(process.wait()) for process in processes]
    if not waits:
        return True
    _, left = await asyncio.wait(waits, timeout=patience)
    for wait in left:
        wait.cancel()
    return not left
