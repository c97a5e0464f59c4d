"""Several pushes make a step: one of each worker, or the first n."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

from aiodist.ps.consistency.events import Action, Push
from aiodist.ps.consistency.machine import Machine
from aiodist.ps.consistency.stale import Described, Scale, Stale, at_least, checked_scale, one_of


@dataclass(frozen=True, repr=False)
class Synchronous(Described):
    """Step k takes the k-th push of each worker that is still there, and of those that left what they had pushed.

    Who rests at a barrier is not there: a step lacks what it does not push. After the barrier all are in step again.
    "mean" divides by the number of pushes in the step, "sum" does not. A worker may push ahead of the others: that is
    held. Raises ValueError for another reduction.
    """

    accepts: ClassVar[bool] = True
    holds: ClassVar[bool] = True

    reduction: Literal["mean", "sum"]

    def __post_init__(self) -> None:
        one_of("reduction", self.reduction, ("mean", "sum"))

    def machine(self, workers: Sequence[int]) -> Stepwise:
        """Return a machine at version 0. Raises ValueError for no workers, and for one that is there twice."""
        return Stepwise(workers, Stale(), mean=self.reduction == "mean")


class Stepwise(Machine):
    """Holds pushes until each worker that is present has one."""

    __slots__ = ("_missing",)

    def __init__(self, workers: Sequence[int], stale: Stale, *, mean: bool) -> None:
        """`mean` divides each step by the number of its parts."""
        super().__init__(workers, stale, mean=mean, full=len(workers))
        self._missing = len(workers)  # how many that are present have none

    def _take(self, event: Push, actions: list[Action]) -> None:
        line = self._held[event.worker]
        line.append(event)
        self._missing -= len(line) == 1
        self._step(actions)

    def _without(self, worker: int, actions: list[Action]) -> None:
        self._missing -= not self._held[worker]
        self._step(actions)

    def _back_on_the_clock(self, workers: set[int]) -> None:
        super()._back_on_the_clock(workers)
        self._missing += sum(not self._held[worker] for worker in workers)

    def _step(self, actions: list[Action]) -> None:
        while not self._missing:
            pushes = [line.popleft() for line in self._held.values() if line]
            if not pushes:
                return  # nobody is present, nothing is held
            self._missing = sum(not self._held[worker] for worker in self._present)
            self._apply(pushes, actions)


@dataclass(frozen=True, repr=False)
class Quorum(Described):
    """The first n pushes make a step, from any workers; when fewer than n workers are there, as many as those.

    Who has left is not there, nor who rests at a barrier.
    `stale` says what is done with a push whose base is not the current version. "accept": it counts like any other.
    "drop": it is thrown away; with more workers than n that is synchronous training with backup workers. "scale": it
    counts, multiplied by `scale(staleness)`, 1 / (1 + staleness) where none is given. "mean" divides by the number of
    pushes in the step, "sum" does not. Raises ValueError for anything else.

    With "drop" a read waits for the step of its client's own push. Otherwise it does not: workers that each wait at
    another tensor for a step that lacks one push would wait for one another.

    After Chen, Pan, Monga, Bengio and Jozefowicz, "Revisiting distributed synchronous SGD" (arXiv:1604.00981, 2016).
    """

    accepts: ClassVar[bool] = True
    holds: ClassVar[bool] = True

    n: int
    reduction: Literal["mean", "sum"]
    stale: Literal["accept", "drop", "scale"] = "accept"
    scale: Scale | None = None

    def __post_init__(self) -> None:
        at_least("n", self.n, 1)
        one_of("reduction", self.reduction, ("mean", "sum"))
        one_of("stale", self.stale, ("accept", "drop", "scale"))
        checked_scale(self.stale, self.scale)

    def machine(self, workers: Sequence[int]) -> FirstOf:
        """Return a machine at version 0. Raises ValueError for fewer than n workers, and for one there twice."""
        if len(workers) < self.n:
            raise ValueError(f"a quorum of {self.n} of workers {list(workers)}: expected at least {self.n} workers")
        drop_above = 0 if self.stale == "drop" else inf
        return FirstOf(self.n, workers, Stale(drop_above, checked_scale(self.stale, self.scale)), self.reduction)


class FirstOf(Machine):
    """Holds pushes until there are enough."""

    __slots__ = ("_count", "_n", "sees_own")

    def __init__(self, n: int, workers: Sequence[int], stale: Stale, reduction: str) -> None:
        """`n` pushes make a step, fewer where fewer are left."""
        super().__init__(workers, stale, mean=reduction == "mean", full=n)
        # Pushes that count though they are stale may wait for a worker that waits at another tensor for ours.
        self.sees_own = stale.drop_above == 0
        self._n = n
        self._count = 0

    def _take(self, event: Push, actions: list[Action]) -> None:
        self._held[event.worker].append(event)
        self._count += 1
        self._step(actions)

    def _without(self, worker: int, actions: list[Action]) -> None:
        self._step(actions)

    def _step(self, actions: list[Action]) -> None:
        # More than n lie here only when somebody has just left. All of them count: to hold some for the next step
        # would make those stale.
        if self._count and self._count >= min(self._n, len(self._present)):
            pushes = [push for line in self._held.values() for push in line]
            for line in self._held.values():
                line.clear()
            self._count = 0
            self._apply(pushes, actions)
