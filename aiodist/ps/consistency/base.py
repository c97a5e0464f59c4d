"""What all machines share: who is there, what came before, how a step is made and reads are served."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

from aiodist.ps.consistency.events import EXACT_STALENESS, Action, Apply, Counts, Drop, Part, Pull, Push, Serve, Waiting
from aiodist.ps.consistency.reads import WaitingReads
from aiodist.ps.consistency.stale import Stale

__all__ = ["BaseMachine"]


class BaseMachine(ABC):
    """A machine that lacks when to make a step, and of which pushes."""

    sees_own = True
    """A read waits for its client's own pushes that are held."""

    __slots__ = ("_full", "_held", "_last", "_mean", "_present", "_reads", "_resting", "_stale", "counts", "version")

    def __init__(self, workers: Sequence[int], stale: Stale, *, mean: bool = False, full: int = 1) -> None:
        """`mean` divides each step by the number of its parts; with fewer than `full` it is incomplete."""
        if not workers or len(set(workers)) != len(workers):
            raise ValueError(f"workers {list(workers)}: expected at least one, each of them once")
        self.version = 0
        self.counts = Counts()
        self._stale = stale
        self._mean = mean
        self._full = full
        self._present = set(workers)
        self._resting: set[int] = set()
        self._last = dict.fromkeys(workers, -1)  # the number of the last push of each
        self._held: dict[int, deque[Push]] = {worker: deque() for worker in sorted(workers)}
        self._reads = WaitingReads()

    def push(self, event: Push) -> list[Action]:
        """Return what follows a push: see `Machine`."""
        worker, number, base = event
        if number <= self._last_of(worker):
            self.counts.repeated += 1
            return []
        staleness = self.version - base
        if not 0 <= staleness <= self.version:
            # Nothing that was served can have said so: the worker speaks of another tensor, or of another run.
            raise ValueError(f"push {number} of worker {worker} is based on version {base}: expected 0..{self.version}")
        actions: list[Action] = []
        if worker in self._resting:
            self.resume((worker,))
        if staleness > self._stale.drop_above or worker not in self._present:
            self.counts.dropped += 1
            actions.append(Drop(worker, number, staleness))
        else:
            self._take(event, actions)
        self._last[worker] = number
        return actions

    def pull(self, event: Pull) -> list[Action]:
        """Return the `Serve` of a read, or nothing: see `Machine`."""
        client, number, wants = event
        if wants < 0:
            raise ValueError(f"pull {number} of client {client} wants version {wants}: expected 0 or more")
        if event in self._reads:
            return []
        held = self._held.get(client, ()) if self.sees_own else ()
        after = next((push.number for push in reversed(held) if push.number < number), None)
        if after is None and (wants <= self.version or self._over):
            return [Serve(client, number, self.version)]
        self._reads.hold(event, after)
        return []

    def leave(self, worker: int) -> list[Action]:
        """Return what follows when a worker leaves: see `Machine`."""
        self._last_of(worker)
        actions: list[Action] = []
        if worker in self._present or worker in self._resting:
            self._resting.discard(worker)
            self._off_the_clock(worker, actions)
            if self._over:
                self._reads.end(self.version, actions)
        return actions

    def rest(self, worker: int) -> list[Action]:
        """Return what follows when a worker rests: see `Machine`."""
        self._last_of(worker)
        actions: list[Action] = []
        if worker in self._present:
            self._resting.add(worker)
            self._off_the_clock(worker, actions)
        return actions

    def resume(self, workers: Iterable[int]) -> None:
        """Have those of `workers` that rest back: see `Machine`."""
        back = self._resting.intersection(workers)
        if back:
            self._resting -= back
            self._back_on_the_clock(back)

    @property
    def _over(self) -> bool:
        """Nobody will ever push again."""
        return not (self._present or self._resting)

    def _off_the_clock(self, worker: int, actions: list[Action]) -> None:
        if worker in self._present:
            self._present.remove(worker)
            self._without(worker, actions)

    def _back_on_the_clock(self, workers: set[int]) -> None:
        """Wait for these too, from the current step on."""
        self._present |= workers

    def waiting(self) -> Waiting:
        """Return what is held."""
        pushes = tuple(push for line in self._held.values() for push in line)
        pulls = self._reads.held()
        return Waiting(pushes, pulls, (self._late() or tuple(sorted(self._resting))) if pushes or pulls else ())

    def _last_of(self, worker: int) -> int:
        try:
            return self._last[worker]
        except KeyError:
            raise ValueError(f"client {worker} is no worker: expected one of {list(self._held)}") from None

    def _apply(self, pushes: Sequence[Push], actions: list[Action]) -> None:
        """Make a step of these, which are in order, and serve who waited for it."""
        share = 1.0 / len(pushes) if self._mean else 1.0
        parts = tuple([Part(worker, number, share * self._weight(base)) for worker, number, base in pushes])
        self.version += 1
        self.counts.applied += len(parts)
        self.counts.incomplete += len(parts) < self._full
        actions.append(Apply(self.version, parts))
        if self._reads:
            self._reads.applied(parts, self.version, actions)

    def _weight(self, base: int) -> float:
        """Count a push that is applied, and return what multiplies it."""
        staleness = self.version - base
        weight = 1.0 if self._stale.scale is None else self._stale.weight(staleness)
        bar = staleness if staleness < EXACT_STALENESS else 1 << (staleness.bit_length() - 1)
        self.counts.staleness[bar] += 1
        if weight != 1.0:
            self.counts.scaled += 1
        return weight

    @abstractmethod
    def _take(self, event: Push, actions: list[Action]) -> None:
        """Hold a push that counts, or make steps."""

    @abstractmethod
    def _without(self, worker: int, actions: list[Action]) -> None:
        """Make the steps that waited for one who is no longer present; all of them, if nobody is."""

    @abstractmethod
    def _late(self) -> tuple[int, ...]:
        """Return the workers that what is held waits for."""
