"""The deadlines of one loop's handles, on one timer of the loop."""

from __future__ import annotations

import asyncio
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Protocol
from weakref import ref

from aiodist.pauses import deadline_clock

_FINAL = ("close", "aclose")
"""Calls that close a communicator."""
_SLACK_SECONDS = 5e-4  # uvloop rounds to milliseconds and may be early


class Expiring(Protocol):
    """The part of a handle that `Timers` uses."""

    @property
    def op(self) -> str:
        """Name of the call."""

    @property
    def _is_pending(self) -> bool:
        """True until the handle is done."""

    def _tell_late(self) -> None:
        """Wake the waiters, since the deadline has passed."""


class Quiet:
    """A callback on the loop, or an object with such methods, that runs no code of the program."""

    def is_quiet(self, *, closing: bool) -> bool:
        """Return False if this object may still wake the program. True for `closing` ignores deadlines of a close."""
        return True


def is_quiet(callback: object, *, closing: bool = False) -> bool:
    """Return True if a callback of the loop runs no code of the program. `closing` is as in `Quiet.is_quiet`."""
    owner = callback if isinstance(callback, Quiet) else getattr(callback, "__self__", None)
    return isinstance(owner, Quiet) and owner.is_quiet(closing=closing)


def may_pass(handle: Expiring | None, *, closing: bool) -> bool:
    """Return True if the deadline of `handle` may still wake the program."""
    return handle is not None and handle._is_pending and not (closing and handle.op in _FINAL)


class Timers(Quiet):
    """Reports deadlines to handles.

    Most operations finish long before the deadline. A timer of the loop for each operation would stay until then,
    perhaps for half an hour. So the deadlines are in a heap with one timer. Finished operations are removed when the
    heap has doubled.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, ref[Expiring]]] = []
        self._count = count()
        self._limit = 64
        self._due = inf
        self._timer: asyncio.TimerHandle | None = None

    def add(self, handle: Expiring, expires: float, seconds: float) -> None:
        """Call `handle._tell_late` at `expires` of the deadline clock, `seconds` after the issue (loop's thread)."""
        if len(self._heap) >= self._limit:
            self._clear()
        heappush(self._heap, (expires, next(self._count), ref(handle)))
        if expires < self._due:
            self._set(expires)

    def __len__(self) -> int:
        return len(self._heap)

    def is_quiet(self, *, closing: bool) -> bool:
        """See `Quiet`."""
        return not any(may_pass(handle(), closing=closing) for *_, handle in self._heap)

    def _clear(self) -> None:
        self._heap = [entry for entry in self._heap if (handle := entry[2]()) is not None and handle._is_pending]
        heapify(self._heap)
        self._limit = max(64, 2 * len(self._heap))

    def _set(self, expires: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = expires
        left = deadline_clock.pause_until(expires - deadline_clock.now())
        self._timer = self._loop.call_later(left + _SLACK_SECONDS, self._fire)

    def _fire(self) -> None:
        now = deadline_clock.now()
        self._timer, self._due = None, inf
        while self._heap and self._heap[0][0] <= now:
            handle = heappop(self._heap)[2]()
            if handle is not None:
                handle._tell_late()
        if self._heap:
            self._set(self._heap[0][0])
