"""The deadlines of one loop's handles, on one timer of the loop."""

from __future__ import annotations

import asyncio
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from time import monotonic
from typing import Protocol
from weakref import ref

_FINAL = ("close", "aclose")
"""Operations of the close of a communicator: past their deadline the program ends with an error."""
_SLACK_SECONDS = 5e-4  # uvloop rounds to milliseconds and may be early


class Expiring(Protocol):
    """The part of a handle that its deadline concerns."""

    @property
    def op(self) -> str:
        """Name of its call."""

    @property
    def _is_pending(self) -> bool:
        """True until it is done."""

    def _tell_late(self) -> None:
        """Wake its waiters, since the deadline passed."""


class Quiet:
    """Has the loop call it, or a method of it, and none of that runs code of the program's."""

    def is_quiet(self, *, closing: bool) -> bool:
        """Return False where it may yet wake the program; with `closing` a deadline of a close is none."""
        return True


def is_quiet(callback: object, *, closing: bool = False) -> bool:
    """Return whether what a loop will call runs nothing of the program's; `closing` as of `Quiet`."""
    owner = callback if isinstance(callback, Quiet) else getattr(callback, "__self__", None)
    return isinstance(owner, Quiet) and owner.is_quiet(closing=closing)


def may_pass(handle: Expiring | None, *, closing: bool) -> bool:
    """Return whether the deadline of `handle` may yet wake the program."""
    return handle is not None and handle._is_pending and not (closing and handle.op in _FINAL)


class Timers(Quiet):
    """Reports deadlines to handles.

    Most operations finish long before their deadline. A timer of the loop for each would stay until then, half an hour
    perhaps. So a heap has the deadlines, and the finished operations are removed whenever the heap has doubled.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._heap: list[tuple[float, int, ref[Expiring]]] = []
        self._count = count()
        self._limit = 64
        self._due = inf
        self._timer: asyncio.TimerHandle | None = None

    def add(self, handle: Expiring, expires: float, seconds: float) -> None:
        """Call `handle._tell_late` at `expires` of `monotonic`, `seconds` after its issue; on the loop's thread."""
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
        self._timer = self._loop.call_later(max(0.0, expires - monotonic()) + _SLACK_SECONDS, self._fire)

    def _fire(self) -> None:
        now = monotonic()
        self._timer, self._due = None, inf
        while self._heap and self._heap[0][0] <= now:
            handle = heappop(self._heap)[2]()
            if handle is not None:
                handle._tell_late()
        if self._heap:
            self._set(self._heap[0][0])
