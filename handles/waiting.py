"""Threads record the queue at which they wait, so that other threads need not read their frames.

The locals of a frame are for its own thread. Until Python 3.13 to ask for those of another one copies all of them:
where that ends an object whose destructor lets other threads run, the frame may be gone meanwhile, and the process
crashes.
"""

from __future__ import annotations

import os
from collections import deque
from queue import SimpleQueue
from threading import get_ident
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_queues: Final[dict[int, JobQueue[Any]]] = {}
"""Queue at which each thread waits, by the thread's number."""


class JobQueue(Generic[T]):
    """Jobs for one thread or several, in order.

    A thread takes a job after it has left the table of waiting threads, so at each moment the job is in the queue, or
    its thread does not count as idle. `put` may be called by the garbage collector.
    """

    __slots__ = ("_jobs", "_tokens")

    def __init__(self) -> None:
        self._jobs: deque[T] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        """One token for each job, at which threads wait."""

    def put(self, job: T) -> None:
        """Add a job; from any thread."""
        self._jobs.append(job)
        self._tokens.put(None)

    def get(self, timeout: float | None = None) -> T:
        """Return the next job, and block until there is one; raise queue.Empty after `timeout` seconds.

        A `timeout` is for callers that then only look whether a job may come: the thread counts as idle.
        """
        me = get_ident()
        _queues[me] = self
        try:
            self._tokens.get(timeout=timeout)
        finally:
            del _queues[me]
        return self._jobs.popleft()

    def get_nowait(self) -> T:
        """Return the next job; raise queue.Empty if there is none."""
        self._tokens.get_nowait()
        return self._jobs.popleft()

    def empty(self) -> bool:
        """Return True if there is no job."""
        return not self._jobs


def waits_for_work(thread_id: int) -> bool:
    """Return True if that thread waits at a queue, and the queue is empty."""
    queue = _queues.get(thread_id)
    return queue is not None and queue.empty()


os.register_at_fork(after_in_child=_queues.clear)
