"""The terminal of a job, which the launcher lends to one rank at a time, for the prompt of a debugger.

A rank has a session of its own, so it opens the launcher's terminal by the launcher's descriptor. A lock of the
terminal shows that a rank uses it.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiodist.machine import process_table


@contextmanager
def lent() -> Iterator[str]:
    """Lend the terminal of this process to ranks in this block, as text for `path_of`.

    The text is "" if standard input is no terminal, or if this process is in the background of the terminal. The end
    restores the settings of the terminal, since a rank that is killed at a prompt leaves it without echo.
    """
    if not _is_in_foreground():
        yield ""
        return
    settings = termios.tcgetattr(0)
    try:
        yield f"{process_table()} /proc/{os.getpid()}/fd/0"
    finally:
        with suppress(OSError, termios.error):  # the terminal is gone
            if _is_in_foreground() and termios.tcgetattr(0) != settings:
                termios.tcsetattr(0, termios.TCSANOW, settings)


def _is_in_foreground() -> bool:
    with suppress(OSError):
        return os.tcgetpgrp(0) == os.getpgrp()
    return False


def path_of(lent: str) -> str:
    """Return the path of the terminal `lent` by the launcher, or "" if this process cannot open it."""
    table, _, path = lent.rpartition(" ")
    if path and table == process_table():
        with suppress(OSError):
            os.close(_open(path))
            return path
    return ""


def is_lent() -> bool:
    """Return True while a rank uses the terminal of this process."""
    if not os.isatty(0):
        return False
    with suppress(OSError):  # the terminal of another user, as after su, is lent to no rank
        fd = _open("/proc/self/fd/0")
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


@contextmanager
def borrowed(path: str) -> Iterator[None]:
    """Let standard input, output and errors be the terminal in this block, after the other ranks that use it."""
    fd = _open(path)
    kept, streams = [os.dup(standard) for standard in range(3)], (sys.stdin, sys.stdout)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        sys.stdout.flush()
        for standard in range(3):
            os.dup2(fd, standard)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        yield
        sys.stdout.flush()
    finally:
        sys.stdin, sys.stdout = streams
        for standard, before in enumerate(kept):
            os.dup2(before, standard)
            os.close(before)
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child of this process may have the descriptor too
        os.close(fd)


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
