"""Forks: no other thread makes native calls meanwhile, and the child detaches its copy of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import selectors
import warnings
from pathlib import Path
from threading import get_ident
from typing import Final

from aiodist.handles.polling import transport_lock

_NATIVE_SECONDS: Final = 1.0
"""Longest wait of a fork for native calls of other threads, in seconds.

Most native calls take less than a millisecond. A call that waits for a stopped rank may never end.
"""
_held: list[bool] = []
"""True for each fork in progress that holds the transport lock."""


def _before() -> None:
    """Let no other thread make native calls: a library's lock that is held there is never released in the child."""
    mine = transport_lock.holder == get_ident()
    held = not mine and transport_lock.acquire(timeout=_NATIVE_SECONDS)
    _held.append(held)
    if not (held or mine):
        why = f"a native call has not ended within {_NATIVE_SECONDS:g} s"
        text = f"os.fork: {why}, and locks of its library may stay locked in the child: fork when no operation runs"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _after_in_parent() -> None:
    if _held.pop():
        transport_lock.release()


def _after_in_child() -> None:
    _held.clear()
    if transport_lock.holder != get_ident():
        transport_lock.holder = 0
        transport_lock.reinit()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


def part(loop: asyncio.AbstractEventLoop) -> bool:
    """Replace the epoll of `loop` in a forked child, and return True. Return False if the loop has no epoll.

    A forked child shares its parent's epoll. If the child used that epoll, the parent would miss events, and the
    parent's libuv could abort. The new epoll has the same files, since libuv aborts if the loop changes a file that its
    epoll lacks. The child waits for no event of these files, since an event that the child read would be lost to the
    parent.
    """
    fd = _epoll_of(loop)
    if fd is None:
        return False
    known: list[str] = []
    with contextlib.suppress(OSError):  # without /proc
        known = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii").splitlines()
    own = select.epoll()
    for line in known:
        if line.startswith("tfd:"):
            with contextlib.suppress(OSError):  # closed, or replaced by /dev/null in the child
                own.register(int(line.split()[1]), 0)
    os.dup2(own.fileno(), fd, inheritable=False)
    own.close()
    return True


def _epoll_of(loop: asyncio.AbstractEventLoop) -> int | None:
    """Return the file descriptor of the loop's epoll, or None if the loop is closed or its epoll is unknown."""
    if loop.is_closed():
        return None
    if (backend := getattr(loop, "_get_backend_id", None)) is not None:  # uvloop
        fd: int = backend()
        return fd
    selector: object = getattr(loop, "_selector", None)
    epoll = getattr(selectors, "EpollSelector", None)
    return selector.fileno() if epoll is not None and isinstance(selector, epoll) else None
