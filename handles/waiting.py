"""Registry of the threads that wait inside aiodist. So no thread must read the frames of a waiting thread."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import get_ident
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Wait(NamedTuple):
    """One thread's wait."""

    ready: Callable[[], object]
    """Function that returns a true value when the thread can continue."""
    limited: bool
    """True if the thread also continues after some time."""


_waits: Final[dict[int, _Wait]] = {}
"""Innermost wait of each waiting thread, by the thread's number."""
library_checks: Final[list[Callable[[int], bool]]] = []
"""Further functions that return True if the thread of a given number is idle. `aiodist.testing` adds a function."""


class Waiting:
    """A block in which the calling thread waits until `ready()` is true, or for a limited time if `limited`."""

    __slots__ = ("_before", "_me", "_now")

    def __init__(self, ready: Callable[[], object], *, limited: bool = False) -> None:
        self._now = _Wait(ready, limited)
        self._me = get_ident()

    def __enter__(self) -> None:
        self._before = _waits.get(self._me)
        _waits[self._me] = self._now

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del _waits[self._me]
        else:  # the outer wait continues after the inner one
            _waits[self._me] = self._before


def result_of(future: Future[T]) -> T:
    """Return the result of `future`, blocking this thread until the result is there."""
    with Waiting(future.done):
        return future.result()


def is_waiting(thread_id: int, *, limited: bool = False) -> bool:
    """Return True if a thread waits for another thread.

    True for `limited` also counts waits that end after some time.
    """
    wait = _waits.get(thread_id)
    if wait is None:
        return any(check(thread_id) for check in library_checks)
    return not wait.ready() and (limited or not wait.limited)


class JobQueue(Generic[T]):
    """Jobs for one thread or several, in order.

    A thread leaves the table of waiting threads before it takes a job. So at each moment the job is in the queue, or
    its thread does not count as idle. The garbage collector may call `put`.
    """

    __slots__ = ("_jobs", "_tokens")

    def __init__(self) -> None:
        self._jobs: deque[T] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        """One token for each job. Threads wait for a token."""

    def put(self, job: T) -> None:
        """Add a job (any thread)."""
        self._jobs.append(job)
        self._tokens.put(None)

    def get(self, timeout: float | None = None) -> T:
        """Return the next job, blocking until there is one, or raise queue.Empty after `timeout` seconds.

        The thread counts as idle meanwhile, also with a `timeout`. So a caller may only use the timeout to check if
        more jobs can come.
        """
        with Waiting(self._jobs.__len__):
            self._tokens.get(timeout=timeout)
        return self._jobs.popleft()

    def get_nowait(self) -> T:
        """Return the next job, or raise queue.Empty if there is none."""
        self._tokens.get_nowait()
        return self._jobs.popleft()

    def empty(self) -> bool:
        """Return True if there is no job."""
        return not self._jobs


os.register_at_fork(after_in_child=_waits.clear)
