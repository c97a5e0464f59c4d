"""What all machines share: who is there, what came before, how a step is made and reads are served."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from aiodist.ps.consistency.events import EXACT_STALENESS, Action, Apply, Counts, Drop, Part, Pull, Push, Serve, Waiting
from aiodist.ps.consistency.stale import Stale

_NONE = -1  # below the numbers of all pushes


class Policy(Protocol):
    """What the user chooses: immutable, the same on all ranks. Its `repr` is equal where it does the same."""

    @property
    def accepts(self) -> bool:
        """Whether a push is done, for its worker, when the server has it; else when it is applied or dropped."""

    @property
    def holds(self) -> bool:
        """Whether a push may wait for another worker's."""

    @property
    def scales(self) -> bool:
        """Whether weights other than 1 happen."""

    def machine(self, workers: Sequence[int]) -> Machine:
        """Return a machine at version 0. Raises ValueError for no workers, and for one that is there twice."""


class Machine(ABC):
    """Decides for one tensor. Nothing is lost: a push leaves once, in an `Apply` or a `Drop`, a pull in a `Serve`.

    A read sees its client's own earlier pushes: it waits until each of them that has a smaller number was applied or
    dropped, and until the version is at least what it wants. It is served right after the `Apply` that it waited for.
    A client's events come in the order of their numbers; an event that raises changes nothing. (Save where a user's
    `scale` fails for a push that was held, or gives no finite weight: that error ends the machine.)

    Each policy says when to make a step, and of which pushes: `_take` and `_without`.
    """

    sees_own = True
    """A read waits for its client's own pushes that are held."""

    __slots__ = ("_full", "_held", "_last", "_mean", "_present", "_reads", "_resting", "_stale", "counts", "version")

    def __init__(self, workers: Sequence[int], stale: Stale, *, mean: bool = False, full: int = 1) -> None:
        """`mean` divides each step by the number of its parts; with fewer than `full` it is incomplete."""
        if not workers or len(set(workers)) != len(workers):
            raise ValueError(f"workers {list(workers)}: expected at least one, each of them once")
        self.version = 0
        """How many steps were made."""
        self.counts = Counts()
        self._stale = stale
        self._mean = mean
        self._full = full
        self._present = set(workers)
        self._resting: set[int] = set()
        self._last = dict.fromkeys(workers, _NONE)  # the number of the last push of each
        self._held: dict[int, deque[Push]] = {worker: deque() for worker in sorted(workers)}
        self._reads: dict[tuple[int, int], tuple[Pull, int]] = {}
        """Those that wait, by client and number, each with the number of the push of its client that it waits for."""

    def push(self, event: Push) -> list[Action]:
        """Return what follows. A number that is not above the last of that worker is a repetition: ignored, counted.

        A push that comes after its worker has left, as when its death was noticed first, is dropped.
        Raises ValueError for a client that is no worker, and for a base that was never a version.
        """
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
        """Return its `Serve`, or nothing: then it is held. One that is held already is ignored; any other is served.

        Raises ValueError when it wants less than version 0.
        """
        client, number, wants = event
        if wants < 0:
            raise ValueError(f"pull {number} of client {client} wants version {wants}: expected 0 or more")
        if (client, number) in self._reads:
            return []
        held = self._held.get(client, ()) if self.sees_own else ()
        after = next((push.number for push in reversed(held) if push.number < number), _NONE)
        if after == _NONE and (wants <= self.version or self._over):
            return [Serve(client, number, self.version)]
        self._reads[client, number] = (event, after)
        return []

    def leave(self, worker: int) -> list[Action]:
        """Take a worker that has finished or is dead off the clock, and return what no longer waits for it.

        What it pushed still counts, and what it pulled is served: who sends it knows whether anybody is there. When the
        last one leaves, all that is held comes out; reads that want more than will ever be get what there is.
        Again: nothing happens. Raises ValueError for a client that is no worker.
        """
        self._last_of(worker)
        actions: list[Action] = []
        if worker in self._present or worker in self._resting:
            self._resting.discard(worker)
            self._off_the_clock(worker, actions)
            if self._over:
                actions += [Serve(client, number, self.version) for client, number in self._reads]
                self._reads.clear()
        return actions

    def rest(self, worker: int) -> list[Action]:
        """Take a worker off the clock for a while, as at a barrier, and return what no longer waits for it.

        What it pushed still counts. When nobody is present all pushes that are held come out; reads of versions to come
        stay, since workers come back. Who rests or has left: nothing happens. Raises ValueError for a client that is no
        worker.
        """
        self._last_of(worker)
        actions: list[Action] = []
        if worker in self._present:
            self._resting.add(worker)
            self._off_the_clock(worker, actions)
        return actions

    def resume(self, workers: Iterable[int]) -> None:
        """Have those of `workers` that rest back on the clock, at the current step: nothing that they missed is due.

        Who pushes while it rests is back by that.
        """
        back = self._resting.intersection(workers)
        if back:
            self._resting -= back
            self._back_on_the_clock(back)

    def restart(self, version: int, marks: Mapping[int, int]) -> None:
        """Go on from what a checkpoint has: that version at least, and of each client all up to that number."""
        self.version = max(self.version, version)
        for worker, last in self._last.items():
            self._last[worker] = max(last, marks.get(worker, _NONE))

    def waiting(self) -> Waiting:
        """Return what is held."""
        pushes = tuple(push for line in self._held.values() for push in line)
        return Waiting(pushes, tuple(event for event, _ in self._reads.values()))

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
            self._serve({part.worker: part.number for part in parts}, actions)

    def _serve(self, applied: Mapping[int, int], actions: list[Action]) -> None:
        """Serve the reads that waited for this step; `applied` is the last push of each worker in it."""
        for key, (event, after) in list(self._reads.items()):
            if applied.get(event.client, _NONE) < after:
                continue
            if event.wants <= self.version:
                del self._reads[key]
                actions.append(Serve(event.client, event.number, self.version))
            else:
                self._reads[key] = (event, _NONE)

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
