"""What goes into a machine, what comes out, and what policies and machines are.

One server leads a tensor and runs the tensor's machine: pushes, pulls and leavers in, in the order in which they came;
orders out, which all shards follow one after another. So every shard makes the same versions of the same parts, and
what lies between two `Apply` is a consistent cut: a read that all shards serve at its `Serve` never mixes versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

__all__ = [
    "EXACT_STALENESS",
    "Action",
    "Apply",
    "Counts",
    "Drop",
    "Machine",
    "Part",
    "Policy",
    "Pull",
    "Push",
    "Serve",
    "Waiting",
]

EXACT_STALENESS = 1024
"""Below this the histogram of staleness has a bar for each version."""


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
    """A push is thrown away: it was too stale, or its worker had left."""

    worker: int
    number: int
    staleness: int


class Serve(NamedTuple):
    """A read is answered with `version`, which is the current one."""

    client: int
    number: int
    version: int
    """Below what was wanted only when no worker is left that could make more."""


Action = Apply | Drop | Serve


@dataclass(slots=True)
class Counts:
    """What became of the pushes of one tensor, so far."""

    applied: int = 0
    dropped: int = 0
    scaled: int = 0
    """Applied with a weight that its staleness changed."""
    repeated: int = 0
    """Ignored: their number was not above the last of their worker."""
    incomplete: int = 0
    """Steps of fewer pushes than the policy asks for, since the others had left or rested."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many were applied at each staleness: versions between the one that the worker had read and the step.

    From `EXACT_STALENESS` on rounded down to a power of two: a worker that never reads would make a bar for each push.
    """


class Waiting(NamedTuple):
    """What a machine holds, and for whom."""

    pushes: tuple[Push, ...]
    pulls: tuple[Pull, ...]
    late: tuple[int, ...]
    """The workers that it waits for; none where nothing is held."""


class Machine(Protocol):
    """Decides for one tensor. Nothing is lost: a push leaves once, in an `Apply` or a `Drop`, a pull in a `Serve`.

    A read sees its client's own earlier pushes: it waits until each of them that has a smaller number was applied or
    dropped, and until the version is at least what it wants. It is served right after the `Apply` that it waited for.
    A client's events come in the order of their numbers; an event that raises changes nothing. (Save where a user's
    `scale` fails for a push that was held, or gives no finite weight: that error ends the machine.)
    """

    @property
    def version(self) -> int:
        """How many steps were made."""

    @property
    def counts(self) -> Counts:
        """What became of the pushes."""

    def push(self, event: Push) -> list[Action]:
        """Return what follows. A number that is not above the last of that worker is a repetition: ignored, counted.

        A push that comes after its worker has left, as when its death was noticed first, is dropped.
        Raises ValueError for a client that is no worker, and for a base that was never a version.
        """

    def pull(self, event: Pull) -> list[Action]:
        """Return its `Serve`, or nothing: then it is held. One that is held already is ignored; any other is served.

        Raises ValueError when it wants less than version 0.
        """

    def leave(self, worker: int) -> list[Action]:
        """Take a worker that has finished or is dead off the clock, and return what no longer waits for it.

        What it pushed still counts, and what it pulled is served: who sends it knows whether anybody is there. When the
        last one leaves, all that is held comes out; reads that want more than will ever be get what there is.
        Again: nothing happens. Raises ValueError for a client that is no worker.
        """

    def rest(self, worker: int) -> list[Action]:
        """Take a worker off the clock for a while, as at a barrier, and return what no longer waits for it.

        What it pushed still counts. When nobody is present all pushes that are held come out; reads of versions to come
        stay, since workers come back. Who rests or has left: nothing happens. Raises ValueError for a client that is no
        worker.
        """

    def resume(self, workers: Iterable[int]) -> None:
        """Have those of `workers` that rest back on the clock, at the current step: nothing that they missed is due.

        Who pushes while it rests is back by that.
        """

    def waiting(self) -> Waiting:
        """Return what is held: for messages and statistics."""


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
