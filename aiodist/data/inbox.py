"""A queue from the loop to the threads of one pass."""

from __future__ import annotations

import asyncio
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

__all__ = ["WorkQueue"]

T = TypeVar("T")

_LOOK_SECONDS = 0.5  # how soon a thread with nothing to do notices that its loop was closed around it


class WorkQueue(Generic[T]):
    """Work for threads that wait for it; `put` and `stop` may be called from any thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._stopped = False

    def put(self, work: T) -> None:
        """Leave `work` for the next thread that is free."""
        self._queue.put(work)

    def stop(self, threads: int = 1) -> None:
        """Have each of `threads` get None instead of what is left."""
        self._stopped = True
        for _ in range(threads):
            self._queue.put(None)

    def get(self) -> T | None:
        """Return the next work, blocking until there is some; None when there is none to come."""
        while not self._stopped:
            try:
                work = self._queue.get(timeout=_LOOK_SECONDS)
            except Empty:
                self._stopped = self._loop.is_closed()
            else:
                return None if self._stopped else work
        return None
