"""Each push is a step of its own: at once, or when its worker is no more than so many ahead of the slowest."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import ClassVar, Literal

from aiodist.ps.consistency.events import Action, Push
from aiodist.ps.consistency.machine import Machine
from aiodist.ps.consistency.stale import Described, Scale, Stale, at_least, checked_scale, one_of
from aiodist.ps.consistency.steps import Stepwise


@dataclass(frozen=True, repr=False)
class Asynchronous(Described):
    """Each push makes a version as soon as it comes; nobody waits for anybody.

    What is more than `max_staleness` versions old is dropped, or multiplied by `scale(staleness)`, 1 / (1 + staleness)
    where none is given. With None nothing is dropped, and "scale" scales them all. A worker's own pushes make versions
    too: it grows stale when it pushes without reading. Raises ValueError for anything else.
    """

    accepts: ClassVar[bool] = False
    holds: ClassVar[bool] = False

    max_staleness: int | None = None
    stale: Literal["drop", "scale"] = "drop"
    scale: Scale | None = None

    def __post_init__(self) -> None:
        one_of("stale", self.stale, ("drop", "scale"))
        if self.max_staleness is not None:
            at_least("max_staleness", self.max_staleness, 0)
        checked_scale(self.stale, self.scale)

    def machine(self, workers: Sequence[int]) -> Asynchronously:
        """Return a machine at version 0. Raises ValueError for no workers, and for one that is there twice."""
        limit = self.max_staleness
        if self.stale == "scale":
            stale = Stale(scale=checked_scale(self.stale, self.scale), scale_above=-1 if limit is None else limit)
        else:
            stale = Stale(drop_above=inf if limit is None else limit)
        return Asynchronously(workers, stale)


class Asynchronously(Machine):
    """Holds nothing but reads of versions to come."""

    __slots__ = ()

    def _take(self, event: Push, actions: list[Action]) -> None:
        self._apply((event,), actions)

    def _without(self, worker: int, actions: list[Action]) -> None:
        pass


@dataclass(frozen=True, repr=False)
class Bounded(Described):
    """Each push makes a version, but one that brings its worker more than `staleness` ahead of the slowest is held.

    A worker's clock is the number of its pushes that were applied. The slowest is sought among those that are still
    there. What is held is applied as soon as the clock allows, in order of arrival. With a staleness of 0 all move at
    once: a step takes one push of each. After a barrier all clocks are equal. "scale" multiplies each push by
    `scale(versions between read and step)`, 1 / (1 + these) where none is given; none are dropped, since who is always
    dropped would stop all clocks. Raises ValueError for anything else.

    After Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server" (NIPS 2013).
    """

    accepts: ClassVar[bool] = False
    holds: ClassVar[bool] = True

    staleness: int
    stale: Literal["accept", "scale"] = "accept"
    scale: Scale | None = None

    def __post_init__(self) -> None:
        at_least("staleness", self.staleness, 0)
        one_of("stale", self.stale, ("accept", "scale"))
        checked_scale(self.stale, self.scale)

    def machine(self, workers: Sequence[int]) -> Machine:
        """Return a machine at version 0. Raises ValueError for no workers, and for one that is there twice."""
        stale = Stale(scale=checked_scale(self.stale, self.scale))
        if self.staleness == 0:
            return Stepwise(workers, stale, mean=False)
        return Boundedly(self.staleness, workers, stale)


class Boundedly(Machine):
    """Holds the pushes of those who are too far ahead; a staleness of at least 1 never holds the slowest."""

    __slots__ = ("_ahead", "_arrivals", "_at", "_clocks", "_count", "_slowest")

    def __init__(self, ahead: int, workers: Sequence[int], stale: Stale) -> None:
        """`ahead` is how far, in pushes, a worker may be ahead of the slowest."""
        super().__init__(workers, stale)
        self._ahead = ahead
        self._clocks = dict.fromkeys(workers, 0)
        self._at = Counter({0: len(workers)})  # how many that are present stand at each clock
        self._slowest: float = 0  # inf: nobody is present
        self._arrivals: dict[int, deque[int]] = {worker: deque() for worker in workers}  # beside those that are held
        self._count = 0

    def _take(self, event: Push, actions: list[Action]) -> None:
        worker = event.worker
        if not self._allowed(worker):  # nor is what it holds already
            self._count += 1
            self._arrivals[worker].append(self._count)
            self._held[worker].append(event)
        elif self._tick(event, actions):
            self._go_on(actions)

    def _without(self, worker: int, actions: list[Action]) -> None:
        if self._off(self._clocks[worker]):
            self._go_on(actions)

    def _back_on_the_clock(self, workers: set[int]) -> None:
        start = self._slowest if self._present else max(self._clocks.values())
        super()._back_on_the_clock(workers)
        for worker in workers:
            if not self._held[worker]:  # else it is still as far ahead as when these came
                self._clocks[worker] = int(start)
            self._at[self._clocks[worker]] += 1
        self._slowest = min(self._at)

    def _allowed(self, worker: int) -> bool:
        return self._clocks[worker] < self._slowest + self._ahead

    def _tick(self, event: Push, actions: list[Action]) -> bool:
        """Apply a push; return whether the slowest got on."""
        worker = event.worker
        clock = self._clocks[worker]
        self._clocks[worker] = clock + 1
        moved = False
        if worker in self._present:
            self._at[clock + 1] += 1
            moved = self._off(clock)
        self._apply((event,), actions)
        return moved

    def _off(self, clock: int) -> bool:
        """Take one who is present from there; return whether the slowest got on."""
        self._at[clock] -= 1
        if self._at[clock]:
            return False
        del self._at[clock]
        if clock != self._slowest:
            return False
        self._slowest = min(self._at, default=inf)
        return True

    def _go_on(self, actions: list[Action]) -> None:
        """Apply what is held and allowed by now, oldest first; the slowest has just got on."""
        ready = self._ready()
        while ready:
            worker = heappop(ready)[1]
            self._arrivals[worker].popleft()
            if self._tick(self._held[worker].popleft(), actions):
                ready = self._ready()
            elif self._held[worker] and self._allowed(worker):
                heappush(ready, (self._arrivals[worker][0], worker))

    def _ready(self) -> list[tuple[int, int]]:
        ready = [(line[0], worker) for worker, line in self._arrivals.items() if line and self._allowed(worker)]
        heapify(ready)
        return ready
