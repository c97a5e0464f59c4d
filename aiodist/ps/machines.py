"""The consistency policies, as machines without torch and I/O.

A machine decides which pushes make a version, and when a read is served. The server that leads a tensor runs its
machine: pushes, pulls and leaves in, in the order of arrival, and actions out, which all shards carry out in order. So
all shards make the same versions of the same pushes, and a read that all serve at one `Serve` has one version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

EXACT_STALENESS = 1024
"""Staleness from which a bar of the histogram has several values."""
_NONE = -1  # less than the number of any push

Scale = Callable[[int], float]
"""Function of the staleness, in versions, that returns the weight."""


class Push(NamedTuple):
    """A worker's push. The numbers of a client rise, with gaps for its requests to other tensors."""

    worker: int
    number: int
    base: int = 0
    """Version that the worker last read."""


class Pull(NamedTuple):
    """A read, also of a client that is no worker."""

    client: int
    number: int
    wants: int = 0
    """Lowest version."""


class Part(NamedTuple):
    """A push in a step."""

    worker: int
    number: int
    weight: float
    """Factor of the pushed values."""


class Apply(NamedTuple):
    """A step, which applies parts in the order of workers, then of numbers, and makes `version`."""

    version: int
    parts: tuple[Part, ...]


class Drop(NamedTuple):
    """The end of a push that is too stale, repeated, or of a worker that has left."""

    worker: int
    number: int


class Serve(NamedTuple):
    """A read of the current version, which is below the wanted one only if all workers have left."""

    client: int
    number: int
    version: int


Action = Apply | Drop | Serve


@dataclass(slots=True)
class Counts:
    """Counts of the pushes of one tensor."""

    dropped: int = 0
    scaled: int = 0
    """Number of pushes with a weight for their staleness."""
    incomplete: int = 0
    """Number of steps with fewer pushes than the policy asks for, since the other workers had left or rested."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of applied pushes by staleness: the versions between the worker's last read and the step.

    From `EXACT_STALENESS` on rounded down to a power of two, since a worker may never read.
    """


class Machine(ABC):
    """The machine of one tensor. Each push ends in one `Apply` or `Drop`, and each pull in one `Serve`.

    A read waits until its client's earlier pushes are applied or dropped, and until the version is the wanted one or
    later. The `Serve` follows the `Apply` that the read waited for. The events of a client come in the order of their
    numbers. An event that raises changes nothing.

    Each policy has a `_next`, which chooses the time and the pushes of a step.
    """

    sees_own = True
    """True if a read waits for its client's held pushes."""

    def __init__(
        self,
        workers: Sequence[int],
        *,
        full: int = 1,
        mean: bool = False,
        drop_above: float = inf,
        scale: Scale | None = None,
    ) -> None:
        """A step with fewer than `full` parts is incomplete. `mean` divides a step by the number of its parts.

        Pushes that are staler than `drop_above` are dropped. `scale` returns the weight for a staleness.
        """
        if not workers or len(set(workers)) != len(workers):
            raise ValueError(f"workers {list(workers)}: expected at least one, each of them once")
        self.version = 0
        """Number of steps."""
        self.counts = Counts()
        self.present = set(workers)
        """Workers for which steps wait."""
        self.resting: set[int] = set()
        """Workers for which no step waits until they push again."""
        self.held: dict[int, deque[Push]] = {worker: deque() for worker in sorted(workers)}
        self.reads: dict[tuple[int, int], tuple[Pull, int]] = {}
        """Waiting reads by client and number, each with the number of the own push that it waits for."""
        self._full = full
        self._mean = mean
        self._drop_above = drop_above
        self._scale = scale
        self._last = dict.fromkeys(workers, _NONE)
        """Number of the last push, by worker."""

    def push(self, event: Push) -> list[Action]:
        """Return the actions after a push.

        A number that is not above the worker's last one is a repetition, which is dropped. So is a push of a worker
        that has left, or whose loss was reported first. Raises ValueError for a client that is no worker, and for a
        base that was never a version.
        """
        worker, number, base = event
        last = self._last.get(worker)
        if last is None:
            raise self._not_worker(worker)
        if number <= last:
            return [Drop(worker, number)]
        if not 0 <= base <= self.version:
            # No read had this version: the push is of another tensor or another run.
            raise ValueError(f"push {number} of worker {worker} is based on version {base}: expected 0..{self.version}")
        actions: list[Action] = []
        if worker in self.resting:
            self.resume((worker,))
        if self.version - base > self._drop_above or worker not in self.present:
            self.counts.dropped += 1
            actions.append(Drop(worker, number))
        else:
            self.held[worker].append(event)
            try:
                self._make_steps(actions)
            except ValueError:
                self.held[worker].pop()
                raise
        self._last[worker] = number
        return actions

    def step(self, worker: int, number: int, base: int) -> bool:
        """Make a step of this push alone, of weight 1. Return False, with nothing changed, if `push` must decide."""
        del worker, number, base
        return False

    def pull(self, event: Pull) -> list[Action]:
        """Return the `Serve` of a read, or no action for a read that waits."""
        client, number, wants = event
        held = self.held.get(client, ()) if self.sees_own else ()
        after = next((push.number for push in reversed(held) if push.number < number), _NONE)
        if after == _NONE and (wants <= self.version or self._over):
            return [Serve(client, number, self.version)]
        self.reads[client, number] = (event, after)
        return []

    def leave(self, worker: int) -> list[Action]:
        """Remove a worker that has finished or is lost from the clock. Return the actions that waited for it.

        The worker's pushes still count, and pending reads are served. After the last leave, all held pushes are
        applied, and reads of later versions get the last one.
        """
        actions = self.rest(worker)
        self.resting.discard(worker)
        if self._over:
            actions += [Serve(client, number, self.version) for client, number in self.reads]
            self.reads.clear()
        return actions

    def rest(self, worker: int) -> list[Action]:
        """Remove a worker from the clock until `resume`, as at a barrier. Return the actions that waited for it.

        Without a present worker, all held pushes are applied, and reads of later versions wait. The call has no effect
        for a worker that rests or has left.
        """
        if worker not in self._last:
            raise self._not_worker(worker)
        actions: list[Action] = []
        if worker in self.present:
            self.present.remove(worker)
            self.resting.add(worker)
            self._make_steps(actions)
        return actions

    def resume(self, workers: Iterable[int]) -> None:
        """Return resting workers to the clock, at the current step. They owe no push for the steps that they missed.

        A push of a resting worker does the same.
        """
        back = self.resting.intersection(workers)
        self.resting -= back
        self.present |= back

    def restart(self, version: int, marks: Mapping[int, int]) -> None:
        """Continue from a checkpoint: at its version or later, and after the pushes up to `marks`, by client."""
        self.version = max(self.version, version)
        for worker, last in self._last.items():
            self._last[worker] = max(last, marks.get(worker, _NONE))

    def late(self, *, accepts: bool) -> set[int]:
        """Return the workers for whose pushes reads wait, or held pushes unless the server `accepts` pushes early."""
        waits = self.reads or (not accepts and any(list(self.held.values())))
        return {worker for worker in self.present.copy() if not self.held[worker]} if waits else set()

    @property
    def _over(self) -> bool:
        return not (self.present or self.resting)

    def _not_worker(self, client: int) -> ValueError:
        return ValueError(f"client {client} is no worker: expected one of {list(self.held)}")

    def _make_steps(self, actions: list[Action]) -> None:
        """Make the steps that need not wait, and serve the reads that waited for each."""
        while pushes := self._next():
            weights = [1.0] * len(pushes)
            if self._scale is not None:
                weights = [weight_of(self._scale, self.version - push.base) for push in pushes]
                self.counts.scaled += sum([weight != 1 for weight in weights])
            share = 1.0 / len(pushes) if self._mean else 1.0
            parts = tuple([Part(p.worker, p.number, share * weight) for p, weight in zip(pushes, weights, strict=True)])
            for worker, _, base in pushes:
                self.held[worker].popleft()
                self._count(self.version - base)
            self.version += 1
            self.counts.incomplete += len(parts) < self._full
            actions.append(Apply(self.version, parts))
            if self.reads:
                self._serve({part.worker: part.number for part in parts}, actions)

    def _count(self, age: int) -> None:
        self.counts.staleness[age if age < EXACT_STALENESS else 1 << (age.bit_length() - 1)] += 1

    def _serve(self, applied: Mapping[int, int], actions: list[Action]) -> None:
        """Serve the reads that waited for a step. `applied` has the number of the last push of each worker in it."""
        for key, (event, after) in list(self.reads.items()):
            if applied.get(event.client, _NONE) < after:
                continue
            if event.wants <= self.version:
                del self.reads[key]
                actions.append(Serve(event.client, event.number, self.version))
            else:
                self.reads[key] = (event, _NONE)

    @abstractmethod
    def _next(self) -> list[Push]:
        """Return the pushes of the next step in order, the oldest of their workers, or none while the step waits."""


class Asynchronously(Machine):
    """Makes a step of each push immediately."""

    def step(self, worker: int, number: int, base: int) -> bool:
        """See `Machine.step`. This machine holds no push."""
        age = self.version - base
        if self._scale is not None or self.reads or worker not in self.present or number <= self._last[worker]:
            return False
        if not 0 <= age <= min(self.version, self._drop_above):
            return False
        self._last[worker] = number
        self._count(age)
        self.version += 1
        return True

    def _next(self) -> list[Push]:
        for line in self.held.values():
            if line:
                return [line[0]]
        return []


class Boundedly(Machine):
    """Holds the pushes of workers that are too far ahead. A bound of at least 1 never holds the slowest."""

    def __init__(self, ahead: int, workers: Sequence[int]) -> None:
        """`ahead` is the number of pushes by which a worker may be ahead of the slowest."""
        super().__init__(workers)
        self._ahead = ahead
        self._clocks = dict.fromkeys(workers, 0)

    def resume(self, workers: Iterable[int]) -> None:
        """Return workers to the clock of the slowest. Workers with held pushes keep their clocks."""
        start = min((self._clocks[worker] for worker in self.present), default=max(self._clocks.values()))
        self._clocks |= {w: start for w in self.resting.intersection(workers) if not self.held[w]}
        super().resume(workers)

    def late(self, *, accepts: bool) -> set[int]:
        """See `Machine.late`."""
        late = super().late(accepts=accepts)
        slowest = min((self._clocks[worker] for worker in late), default=0)
        return {worker for worker in late if self._clocks[worker] == slowest}

    def _next(self) -> list[Push]:
        limit = min((self._clocks[worker] for worker in self.present), default=inf) + self._ahead
        ready = [(self._clocks[worker], worker) for worker, line in self.held.items() if line]
        clock, worker = min(ready, default=(inf, 0))  # the slowest first
        if clock >= limit:
            return []
        self._clocks[worker] += 1
        return [self.held[worker][0]]


class Stepwise(Machine):
    """Holds pushes until each worker that is present has one."""

    def _next(self) -> list[Push]:
        if not all(self.held[worker] for worker in self.present):
            return []
        return [line[0] for line in self.held.values() if line]


class FirstOf(Machine):
    """Holds pushes until there are `full`, or as many as workers are present."""

    def _next(self) -> list[Push]:
        # After a leave there may be more. All of them count, since pushes held for the next step would be stale.
        pushes = [push for line in self.held.values() for push in line]
        return pushes if len(pushes) >= min(self._full, len(self.present)) else []


def weight_of(scale: Scale, staleness: int) -> float:
    """Return the weight of a push. Raises ValueError if `scale` returns no weight."""
    weight = float(scale(staleness))
    if not 0 <= weight < inf:
        raise ValueError(f"scale({staleness}) is {weight}: expected a finite weight, not below 0")
    return weight
