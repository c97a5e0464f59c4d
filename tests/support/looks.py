"""How often ranks poll a wait; many polls take longer than the search for a deadlock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from aiodist import Communicator
from aiodist.communicator import parts_of
from tests.support.blocking import blocked_until

__all__ = ["MANY", "Looks"]

MANY = 8
"""A deadlock is found in half as many."""


class Looks:
    """The looks of all ranks, in a file that each of them maps: a rank looks while an operation is pending."""

    def __init__(self, coll: Communicator, folder: Path) -> None:
        """`folder` is the same for all ranks."""
        file = folder / "looks"
        with file.open("ab") as made:
            made.truncate(2 * 8 * coll.size)
        self._counts, self._slow = np.memmap(file, np.int64, "r+", shape=(2, coll.size))
        self._rank = coll.rank
        self._lock = threading.Lock()
        self._looked = asyncio.Event()
        self._calls: dict[int, Callable[[], object]] = {}
        self._on_look = parts_of(coll).dispatcher.watch.on_look

    def __enter__(self) -> Looks:
        self._on_look.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._on_look.remove(self._note)

    def _note(self) -> None:
        self._counts[self._rank] += 1
        self._looked.set()
        self._calls.pop(self.count(), lambda: None)()

    def at(self, count: int, call: Callable[[], object]) -> None:
        """Make the call at that look of this rank."""
        self._calls[count] = call

    def count(self) -> int:
        """Return how often this rank has looked."""
        return int(self._counts[self._rank])

    def block(self, *, slow: bool = False) -> None:
        """Block this thread until some rank has looked many times more; `slow`: at most while another rank is not."""
        before = self._counts.copy()
        with self._lock:
            self._slow[self._rank] += slow
        blocked_until(lambda: (self._counts - before).max() >= MANY or self._slow.all(), 3 if slow else 20)
        assert slow or (self._counts - before).max() >= MANY
        with self._lock:
            self._slow[self._rank] -= slow

    async def wait(self, times: int = 1) -> None:
        """Wait until this rank has polled `times` times more."""
        until = self.count() + times
        async with asyncio.timeout(20):
            while self.count() < until:
                self._looked.clear()
                await self._looked.wait()
