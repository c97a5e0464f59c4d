"""Keeps a forked child from holding its parent's control sockets open.

A loader worker that `fork` made has a copy of every socket. Were it to keep them, the hub would see no end of file
when the parent is killed, and the port of a dead rank 0 would stay taken. So the child puts /dev/null in the place
of each: the number stays taken, and whatever still refers to it, a garbage collector included, does no harm.
"""

from __future__ import annotations

import functools
import os

__all__ = ["forget", "guard"]

_guarded: set[int] = set()


def guard(fd: int) -> None:
    """Have forked children let go of `fd`, until `forget`."""
    _install()
    _guarded.add(fd)


def forget(fd: int) -> None:
    """Leave `fd` alone from now on; to be called before it is closed, since its number may be used again."""
    _guarded.discard(fd)


@functools.cache
def _install() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in _guarded:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _guarded.clear()
