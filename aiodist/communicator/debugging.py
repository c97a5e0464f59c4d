"""`Communicator.breakpoint`: a debugger stops one rank, and holds the job meanwhile."""

from __future__ import annotations

import ctypes
import os
import pdb
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from aiodist.communicator.base import parts_of
from aiodist.communicator.holds import Holds
from aiodist.communicator.objects import Objects
from aiodist.env import Environment, Starter
from aiodist.errors import AiodistError, ConfigError
from aiodist.terminal import borrowed, path_of

_SKIPPED = ("aiodist", "aiodist.*", "asyncio", "asyncio.*")
"""Modules that a step never enters."""


async def debug(comm: Objects, rank: int, frame: FrameType) -> None:
    """Stop `rank` in a debugger at `frame`, which has the line of the call. The other ranks of `comm` wait for pdb."""
    holds = parts_of(comm).dispatcher.watch.holds
    refused = (await comm.allgather_object(_refusal(rank) if comm.rank == rank else ""))[rank]
    if refused:
        raise ConfigError(refused)
    attached = _is_attached()
    quits = comm.rank == rank and not attached and _Prompt(holds, _terminal() or "").stop_at(frame)
    if await comm.broadcast_object(quits, root=rank):
        with suppress(AiodistError):
            await comm.allgather_object(None)  # all ranks know that the job ends
        raise SystemExit(1)
    if comm.rank == rank and attached:
        holds.set(True)  # to the end, since no call tells when the debugger lets the rank continue
        sys.modules["pydevd"].settrace(stop_at_frame=frame, trace_only_current_thread=True, patch_multiprocessing=False)


def _is_attached() -> bool:
    """Return True if a debugger is attached to this process."""
    debugpy = sys.modules.get("debugpy")
    return debugpy is not None and bool(debugpy.is_client_connected())


def _terminal() -> str | None:
    """Return the path of the job's terminal, "" for the standard input of this process, or None without a terminal."""
    environment = Environment.read()
    if path := path_of(environment.terminal):
        return path
    return "" if environment.starter is Starter.ALONE or os.isatty(0) else None


def _refusal(rank: int) -> str:
    """Return the reason why no debugger can stop this rank, or ""."""
    if _is_attached() or _terminal() is not None:
        return ""
    return (
        f"breakpoint(rank={rank}): pdb needs a terminal, and the rank has none. Run the job with `aiodist run` in the "
        f"foreground of a terminal of this rank's host, or attach a debugger: `aiodist run --debug {rank} ...`"
    )


class _Prompt(pdb.Pdb):
    """pdb at the terminal of the job. The job is held at each prompt."""

    def __init__(self, holds: Holds, path: str) -> None:
        super().__init__(skip=_SKIPPED, nosigint=True)
        self._holds = holds
        self._path = path

    def stop_at(self, frame: FrameType) -> bool:
        """Show a prompt at `frame`, whose line has begun. Return True if the user quits the job."""
        stack = [frame]
        while (caller := stack[-1].f_back) is not None:
            stack.append(caller)
        self.reset()
        self.botframe = stack[-1]
        try:
            self.interaction(frame, None)
        except SystemExit:
            return True
        if sys.version_info < (3, 13):  # keep variables that were set at the prompt, as after a trace function
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), 0)
        if self.stopframe is None:  # a step: the rest of the line is not the program's
            self.set_next(frame)
        if self.stopframe is not self.botframe or self.breaks:
            for each in stack:
                each.f_trace = self.trace_dispatch
            sys.settrace(self.trace_dispatch)
        return False

    def interaction(self, *args: Any) -> None:  # noqa: ANN401  - differs by the version of Python
        """Show a prompt. Raise `SystemExit` if the user quits."""
        with ExitStack() as stack:
            self._holds.set(True)
            stack.callback(self._holds.set, False)
            stack.enter_context(_interrupts(raises=bool(self._path)))
            if self._path:
                stack.callback(self._use_standard_streams)
                stack.enter_context(borrowed(self._path))
            self._use_standard_streams()
            super().interaction(*args)
        if self.quitting:
            raise SystemExit(1)

    def _use_standard_streams(self) -> None:
        self.stdin, self.stdout = sys.stdin, sys.stdout


class _Interrupted(BaseException):
    """Ctrl-C at the terminal of a job, which ends the job. pdb catches `KeyboardInterrupt`."""


@contextmanager
def _interrupts(*, raises: bool) -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt at the prompt, in place of the loop's handler.

    pdb catches it. True for `raises` raises it from the block too, since the launcher ends the job.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupted(*_: object) -> None:
        raise _Interrupted if raises else KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    except _Interrupted:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
