"""Keeps a forked child from holding its parent's control sockets open.

A loader worker that `fork` made has a copy of every socket. Were it to keep them, the hub would see no end of file
when the parent is killed, and the port of a dead rank 0 would stay taken. So the child puts /dev/null in the place
of each: the number stays taken, and anything that still refers to it, a garbage collector included, does no harm.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
from collections.abc import Iterator

_guarded: set[int] = set()
_polling: list[int] = []


class Owner:
    """The process that made this object: what belongs to it is nothing to a forked child."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def is_here(self) -> bool:
        """Whether the caller runs in that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise `RuntimeError` in a forked child."""
        if not self.is_here():
            raise RuntimeError(f"the control channel belongs to process {self._pid}: a forked child has none")


def guard(fd: int) -> None:
    """Have forked children let go of `fd`, until `forget`."""
    _install()
    _guarded.add(fd)


def forget(fd: int) -> None:
    """Leave `fd` alone from now on; to be called before it is closed, since its number may be used again."""
    _guarded.discard(fd)


@contextlib.contextmanager
def guard_polling(fd: int | None) -> Iterator[None]:
    """Inside, have forked children poll with an epoll of their own at the number `fd`; None: there is none.

    An epoll is shared with the parent. A child that ends its copy of the parent's event loop takes out of it what
    wakes the parent, which then sleeps for ever.
    """
    if fd is None:
        yield
        return
    _install()
    _polling.append(fd)
    try:
        yield
    finally:
        _polling.remove(fd)


@functools.cache
def _install() -> None:
    os.register_at_fork(after_in_child=_release)


def _release() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in _guarded:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _guarded.clear()
    for fd in _polling:
        own = select.epoll()
        os.dup2(own.fileno(), fd, inheritable=False)
        own.close()
