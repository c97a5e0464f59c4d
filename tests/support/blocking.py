"""Waiting that keeps a loop from running, and rounds in which other threads can do something."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from aiodist.testing.seams.progress import progress_thread

__all__ = ["blocked_until", "noted_pauses", "rounds"]

_PAUSE = threading.Event()  # never set: other threads get the interpreter meanwhile


def blocked_until(true: Callable[[], object], seconds: float = 20) -> bool:
    """Block this thread and its loop until `true()`, or for `seconds`; return whether `true()`."""
    limit = time.monotonic() + seconds
    while not true() and time.monotonic() < limit:
        _PAUSE.wait(5e-4)
    return bool(true())


async def rounds(count: int = 30) -> None:
    """Let the loop and other threads run `count` times, which is enough for a mistake to show."""
    for _ in range(count):
        await asyncio.to_thread(lambda: None)


def noted_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of the seconds that the progress thread sleeps between two looks from now on."""
    asked: list[float] = []
    pause = progress_thread.pause

    def noting(seconds: float | None, left_to_us: bool) -> None:
        asked.append(float("inf") if seconds is None else seconds)
        pause(seconds, left_to_us)

    monkeypatch.setattr(progress_thread, "pause", noting)
    return asked
