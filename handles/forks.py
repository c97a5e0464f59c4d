"""A forked child detaches its copy of the event loop, so that the parent's loop continues."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import selectors
from pathlib import Path


def part(loop: asyncio.AbstractEventLoop) -> bool:
    """Give `loop` an epoll of its own in a forked child, and return whether it waits at one.

    An epoll is shared with the parent. What the child took out of it would no longer wake the parent, whose libuv then
    aborts. The files stay known, since libuv aborts if it changes what it waits for of an unknown one, but the child
    waits for nothing of them: what it read of the loop's own wake-ups would be lost to the parent.
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
            with contextlib.suppress(OSError):  # closed, or a file that the child has put /dev/null in the place of
                own.register(int(line.split()[1]), 0)
    os.dup2(own.fileno(), fd, inheritable=False)
    own.close()
    return True


def _epoll_of(loop: asyncio.AbstractEventLoop) -> int | None:
    """Return the file descriptor that the loop waits at, None where it is closed or does not show one."""
    if loop.is_closed():
        return None
    if (backend := getattr(loop, "_get_backend_id", None)) is not None:  # uvloop
        fd: int = backend()
        return fd
    selector: object = getattr(loop, "_selector", None)
    epoll = getattr(selectors, "EpollSelector", None)
    return selector.fileno() if epoll is not None and isinstance(selector, epoll) else None
