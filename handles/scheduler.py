"""One limit on a loop's bytes in flight, shared by reductions, prefetched batches and copies.

Code that moves bytes requests a permit of a `Lane`, and releases the permit when the bytes have arrived. Lanes are
served by priority, requests of one lane in order. The first request of a lane with nothing in flight is always granted,
so no lane starves. All ranks issue the collectives of one lane in the same order, so collectives cannot wait for one
another in a circle.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Self
from weakref import WeakKeyDictionary

_LIMIT = 256 << 20


class Scheduler:
    """Grants bytes in flight to the lanes of one loop. `Scheduler.current()` returns the scheduler of the loop.

    `in_flight` is the number of granted bytes, which exceeds `limit` only by the first request of each lane.
    """

    # Not an attribute of `Progress`, which may be dropped between two awaits, while a limit must stay.
    _of_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, Scheduler]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.in_flight = 0
        self._limit = _LIMIT
        self._lanes: list[Lane] = []
        """Lanes with waiting requests, by priority (highest first), then in the order of requests."""
        self._granting = False

    @classmethod
    def current(cls) -> Scheduler:
        """Return the scheduler of the running loop, created at first use, or raise `RuntimeError` if no loop runs."""
        loop = asyncio.get_running_loop()
        scheduler = cls._of_loop.get(loop)
        if scheduler is None:
            scheduler = cls._of_loop[loop] = cls()
        return scheduler

    @property
    def limit(self) -> int:
        """Limit of the bytes in flight, by default 268,435,456. The limit may be set at any time."""
        return self._limit

    @limit.setter
    def limit(self, nbytes: int) -> None:
        if nbytes < 1:
            raise ValueError(f"limit={nbytes}: expected a number of bytes, at least 1")
        self._limit = nbytes
        self._grant()

    def lane(self, name: str, priority: int = 0) -> Lane:
        """Return a new lane. Lanes of higher `priority` are served first."""
        return Lane(self, name, priority)

    def _wait(self, lane: Lane) -> None:
        self._lanes.append(lane)
        self._lanes.sort(key=lambda waiting: -waiting.priority)

    def _grant(self) -> None:
        """Grant the requests for which there is room. A granted request may request or release permits meanwhile."""
        if self._granting:
            return
        self._granting = True
        try:
            while (lane := self._next()) is not None:
                permit = lane.waiting.popleft()
                if not lane.waiting:
                    self._lanes.remove(lane)
                permit.grant()
        finally:
            self._granting = False

    def _next(self) -> Lane | None:
        room = self._limit - self.in_flight
        for lane in self._lanes:
            if lane.granted == 0 or lane.waiting[0].nbytes <= room:
                return lane
            room = min(room, 0)  # the room is kept for more urgent lanes
        return None


class Lane:
    """Requests, granted in their order."""

    def __init__(self, scheduler: Scheduler, name: str, priority: int) -> None:
        self.scheduler = scheduler
        self.name = name
        self.priority = priority
        self.granted = 0
        """Number of permits that were granted and not released."""
        self.waiting: deque[Permit] = deque()

    def take(self, nbytes: int) -> Permit | None:
        """Return a permit if `nbytes` may be in flight now and no request waits, else None. The caller releases it."""
        scheduler = self.scheduler
        if scheduler._lanes or (self.granted and scheduler.in_flight + nbytes > scheduler._limit):
            return None
        permit = Permit(self, nbytes)
        permit.count()
        return permit

    def request(self, nbytes: int, start: Callable[[], None]) -> Permit:
        """Call `start` when `nbytes` may be in flight, perhaps now.

        The caller releases the permit after the arrival.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes}: expected a number of bytes, at least 0")
        permit = Permit(self, nbytes, start)
        if not self.waiting:
            self.scheduler._wait(self)
        self.waiting.append(permit)
        self.scheduler._grant()
        return permit

    async def acquire(self, nbytes: int) -> Permit:
        """Return a permit once `nbytes` may be in flight. A cancelled call withdraws the request."""
        granted = asyncio.get_running_loop().create_future()
        permit = self.request(nbytes, lambda: None if granted.done() else granted.set_result(None))
        try:
            await granted
        except BaseException:
            permit.release()
            raise
        return permit

    def __repr__(self) -> str:
        return f"<Lane {self.name!r}: {self.granted} in flight, {len(self.waiting)} waiting>"


class Permit:
    """Permission for some bytes in flight, and a context manager that releases the permission."""

    __slots__ = ("_held", "lane", "nbytes", "start")

    def __init__(self, lane: Lane, nbytes: int, start: Callable[[], None] | None = None) -> None:
        self.lane = lane
        self.nbytes = nbytes
        self.start = start
        self._held = False

    def count(self) -> None:
        """Count the permit's bytes as in flight (for the lane)."""
        self._held = True
        self.lane.granted += 1
        self.lane.scheduler.in_flight += self.nbytes

    def grant(self) -> None:
        """Count the permit, and call `start` (for the scheduler)."""
        self.count()
        try:
            if self.start is not None:
                self.start()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the permit, or withdraw the request. A second call does nothing."""
        scheduler = self.lane.scheduler
        if self._held:
            self._held = False
            self.lane.granted -= 1
            scheduler.in_flight -= self.nbytes
        elif self in self.lane.waiting:
            self.lane.waiting.remove(self)
            if not self.lane.waiting:
                scheduler._lanes.remove(self.lane)
        if scheduler._lanes:
            scheduler._grant()

    def resize(self, nbytes: int) -> None:
        """Hold `nbytes` from now on, since the request was an estimate."""
        if self._held:
            self.lane.scheduler.in_flight += nbytes - self.nbytes
        self.nbytes = nbytes
        self.lane.scheduler._grant()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
