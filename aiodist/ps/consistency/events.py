"""What goes into a machine, and what comes out.

One server leads a tensor and runs the tensor's machine: pushes, pulls and leavers in, in the order in which they came;
orders out, which all shards follow one after another. So every shard makes the same versions of the same parts, and
what lies between two `Apply` is a consistent cut: a read that all shards serve at its `Serve` never mixes versions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

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
    """What a machine holds."""

    pushes: tuple[Push, ...]
    pulls: tuple[Pull, ...]
