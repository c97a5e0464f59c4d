"""Waiting that keeps a loop from running, and rounds in which other threads can do something."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

__all__ = ["blocked_until", "rounds"]

_PAUSE = threading.Event()  # never set: other threads get the interpreter meanwhile


def blocked_until(true: Callable[[], object], seconds: float = 20) -> bool:
    """Block this thread, and its loop, until it is true, for so many seconds at most; return whether it is."""
    limit = time.monotonic() + seconds
    while not true() and time.monotonic() < limit:
        _PAUSE.wait(5e-4)
    return bool(true())


async def rounds(count: int = 30) -> None:
    """Let the loop and other threads have so many turns: enough for what would go wrong to do so."""
    for _ in range(count):
        await asyncio.to_thread(lambda: None)
