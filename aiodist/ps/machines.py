"""Which pushes make a version, in which order, and when a read may be served: pure machines, no torch and no I/O.

One server leads a tensor and runs the tensor's machine: pushes, pulls and leavers in, in the order in which they came;
orders out, which all shards follow one after another. So every shard makes the same versions of the same parts, and
what lies between two `Apply` is a consistent cut: a read that all shards serve at its `Serve` never mixes versions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

EXACT_STALENESS = 1024
"""Below this the histogram of staleness has a bar for each version."""
_NONE = -1  # below the numbers of all pushes

Scale = Callable[[int], float]
"""The staleness, in versions, to the weight."""


class Push(NamedTuple):
    """A worker's push. Its numbers rise, over all that it sends; gaps are pushes and pulls of other tensors."""

    worker: int
    number: int
    base: int = 0
    """The version that the worker last read."""


class Pull(NamedTuple):
    """A read. A client that is no worker has no pushes to wait for."""

    client: int
    number: int
    wants: int = 0
    """At least this version."""


class Part(NamedTuple):
    """One push in a step."""

    worker: int
    number: int
    weight: float
    """Multiplies what was pushed."""


class Apply(NamedTuple):
    """One step: applies the parts, which stand in order of workers, then of numbers, and makes `version`."""

    version: int
    parts: tuple[Part, ...]


class Drop(NamedTuple):
    """A push is thrown away: it was too stale, its worker had left, or it had come before."""

    worker: int
    number: int


class Serve(NamedTuple):
    """A read is answered with the current version; below what was wanted only where nobody is left to make more."""

    client: int
    number: int
    version: int


Action = Apply | Drop | Serve


@dataclass(slots=True)
class Counts:
    """What became of the pushes of one tensor, so far."""

    dropped: int = 0
    scaled: int = 0
    """Applied with a weight that its staleness changed."""
    incomplete: int = 0
    """Steps of fewer pushes than the policy asks for, since the others had left or rested."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many were applied at each staleness: versions between the one that the worker had read and the step.

    From `EXACT_STALENESS` on rounded down to a power of two: a worker that never reads would make a bar for each push.
    """


class Machine(ABC):
    """Decides for one tensor. Nothing is lost: a push leaves once, in an `Apply` or a `Drop`, a pull in a `Serve`.

    A read sees its client's own earlier pushes: it waits until each of them was applied or dropped, and until the
    version is at least what it wants. It is served right after the `Apply` that it waited for. A client's events come
    in the order of their numbers. An event that raises changes nothing.

    Each policy says when to make a step, and of which pushes: `_next`.
    """

    sees_own = True
    """A read waits for its client's own pushes that are held."""

    def __init__(
        self,
        workers: Sequence[int],
        *,
        full: int = 1,
        mean: bool = False,
        drop_above: float = inf,
        scale: Scale | None = None,
    ) -> None:
        """With fewer than `full` parts a step is incomplete; `mean` divides each by the number of its parts."""
        if not workers or len(set(workers)) != len(workers):
            raise ValueError(f"workers {list(workers)}: expected at least one, each of them once")
        self.version = 0
        """How many steps were made."""
        self.counts = Counts()
        self.present = set(workers)
        """Those who may be waited for."""
        self.resting: set[int] = set()
        self.held: dict[int, deque[Push]] = {worker: deque() for worker in sorted(workers)}
        self.reads: dict[tuple[int, int], tuple[Pull, int]] = {}
        """Those that wait, by client and number, each with the number of the push of its client that it waits for."""
        self._full = full
        self._mean = mean
        self._drop_above = drop_above
        self._scale = scale
        self._last = dict.fromkeys(workers, _NONE)  # the number of the last push of each

    def push(self, event: Push) -> list[Action]:
        """Return what follows. A number that is not above the last of that worker is a repetition: dropped.

        A push that comes after its worker has left, as when its death was noticed first, is dropped.
        Raises ValueError for a client that is no worker, and for a base that was never a version.
        """
        worker, number, base = event
        last = self._last.get(worker)
        if last is None:
            raise self._not_worker(worker)
        if number <= last:
            return [Drop(worker, number)]
        if not 0 <= base <= self.version:
            # Nothing that was served can have said so: the worker speaks of another tensor, or of another run.
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
                self._go_on(actions)
            except ValueError:
                self.held[worker].pop()
                raise
        self._last[worker] = number
        return actions

    def pull(self, event: Pull) -> list[Action]:
        """Return its `Serve`, or nothing: then it is held."""
        client, number, wants = event
        held = self.held.get(client, ()) if self.sees_own else ()
        after = next((push.number for push in reversed(held) if push.number < number), _NONE)
        if after == _NONE and (wants <= self.version or self._over):
            return [Serve(client, number, self.version)]
        self.reads[client, number] = (event, after)
        return []

    def leave(self, worker: int) -> list[Action]:
        """Take a worker that has finished or is dead off the clock, and return what no longer waits for it.

        What it pushed still counts, and what it pulled is served: who sends it knows whether anybody is there. When the
        last one leaves, all that is held comes out; reads that want more than will ever be get what there is.
        """
        actions = self.rest(worker)
        self.resting.discard(worker)
        if self._over:
            actions += [Serve(client, number, self.version) for client, number in self.reads]
            self.reads.clear()
        return actions

    def rest(self, worker: int) -> list[Action]:
        """Take a worker off the clock for a while, as at a barrier, and return what no longer waits for it.

        When nobody is present all pushes that are held come out; reads of versions to come stay. Who rests or has left:
        nothing happens.
        """
        if worker not in self._last:
            raise self._not_worker(worker)
        actions: list[Action] = []
        if worker in self.present:
            self.present.remove(worker)
            self.resting.add(worker)
            self._go_on(actions)
        return actions

    def resume(self, workers: Iterable[int]) -> None:
        """Have those of `workers` that rest back on the clock, at the current step: nothing that they missed is due.

        Who pushes while it rests is back by that.
        """
        back = self.resting.intersection(workers)
        self.resting -= back
        self.present |= back

    def restart(self, version: int, marks: Mapping[int, int]) -> None:
        """Go on from what a checkpoint has: that version at least, and of each client all up to that number."""
        self.version = max(self.version, version)
        for worker, last in self._last.items():
            self._last[worker] = max(last, marks.get(worker, _NONE))

    @property
    def _over(self) -> bool:
        return not (self.present or self.resting)

    def _not_worker(self, client: int) -> ValueError:
        return ValueError(f"client {client} is no worker: expected one of {list(self.held)}")

    def _go_on(self, actions: list[Action]) -> None:
        while pushes := self._next():
            self._apply(pushes, actions)

    def _apply(self, pushes: Sequence[Push], actions: list[Action]) -> None:
        """Make a step of these, which are in order and the oldest of their workers; serve who waited for it."""
        weights = [1.0] * len(pushes)
        if self._scale is not None:
            weights = [weight_of(self._scale, self.version - push.base) for push in pushes]
            self.counts.scaled += sum([weight != 1 for weight in weights])
        share = 1.0 / len(pushes) if self._mean else 1.0
        parts = tuple([Part(p.worker, p.number, share * weight) for p, weight in zip(pushes, weights, strict=True)])
        for worker, _, base in pushes:
            self.held[worker].popleft()
            age = self.version - base
            self.counts.staleness[age if age < EXACT_STALENESS else 1 << (age.bit_length() - 1)] += 1
        self.version += 1
        self.counts.incomplete += len(parts) < self._full
        actions.append(Apply(self.version, parts))
        if self.reads:
            self._serve({part.worker: part.number for part in parts}, actions)

    def _serve(self, applied: Mapping[int, int], actions: list[Action]) -> None:
        """Serve the reads that waited for this step; `applied` is the last push of each worker in it."""
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
        """Return the pushes of the next step, of the oldest that are held, in order; none while it has to wait."""


class Asynchronously(Machine):
    """Holds nothing but reads of versions to come."""

    def _next(self) -> list[Push]:
        for line in self.held.values():
            if line:
                return [line[0]]
        return []


class Boundedly(Machine):
    """Holds the pushes of those who are too far ahead; a bound of at least 1 never holds the slowest."""

    def __init__(self, ahead: int, workers: Sequence[int]) -> None:
        """`ahead` is how far, in pushes, a worker may be ahead of the slowest."""
        super().__init__(workers)
        self._ahead = ahead
        self._clocks = dict.fromkeys(workers, 0)

    def resume(self, workers: Iterable[int]) -> None:
        """Let them go on beside the slowest; who still has pushes held is as far ahead as when these came."""
        start = min((self._clocks[worker] for worker in self.present), default=max(self._clocks.values()))
        self._clocks |= {w: start for w in self.resting.intersection(workers) if not self.held[w]}
        super().resume(workers)

    def _next(self) -> list[Push]:
        limit = min((self._clocks[worker] for worker in self.present), default=inf) + self._ahead
        ready = [(self._clocks[worker], worker) for worker, line in self.held.items() if line]
        clock, worker = min(ready, default=(inf, 0))  # who is furthest behind goes first
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
        # More lie here only when somebody has just left. All of them count: to hold some for the next step would make
        # those stale.
        pushes = [push for line in self.held.values() for push in line]
        return pushes if len(pushes) >= min(self._full, len(self.present)) else []


def weight_of(scale: Scale, staleness: int) -> float:
    """Return what multiplies a push. Raises ValueError where `scale` returns what cannot be a weight."""
    weight = float(scale(staleness))
    if not 0 <= weight < inf:
        raise ValueError(f"scale({staleness}) is {weight}: expected a finite weight, not below 0")
    return weight
