"""Which consistency the user chooses: which pushes make a version, and who waits for whom."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import ClassVar, Literal

from aiodist.ps.machines import Asynchronously, Boundedly, FirstOf, Machine, Scale, Stepwise, weight_of

_SAMPLES = (0, 1, 2, 3, 5, 10, 100)


def inverse_age(staleness: int) -> float:
    """Return 1 / (1 + staleness).

    After Zhang, Gupta, Lian and Liu, "Staleness-aware async-SGD for distributed deep learning" (IJCAI 2016), who divide
    the learning rate by the staleness; they count it from 1.

    >>> inverse_age(0), inverse_age(3)
    (1.0, 0.25)
    """
    return 1.0 / (1 + staleness)


class Policy(ABC):
    """A consistency, as a frozen dataclass. Its `repr` is the same on all ranks, where it does the same."""

    accepts: ClassVar[bool] = False
    """Whether a push is done, for its worker, when the server has it; else when it is applied or dropped."""

    @property
    def scales(self) -> bool:
        """Whether weights other than 1 happen."""
        return getattr(self, "stale", None) == "scale" or getattr(self, "reduction", None) == "mean"

    @abstractmethod
    def machine(self, workers: Sequence[int]) -> Machine:
        """Return a machine at version 0. Raises ValueError for no workers, and for one that is there twice."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{field.name}={_shown(getattr(self, field.name))}" for field in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True, repr=False)
class Asynchronous(Policy):
    """Each push makes a version as soon as it comes; nobody waits for anybody.

    What is more than `max_staleness` versions old is dropped; with None nothing is. With "scale" each push is
    multiplied by `scale(staleness)` instead, 1 / (1 + staleness) where none is given. A worker's own pushes make
    versions too: it grows stale when it pushes without reading. Raises ValueError for anything else.
    """

    max_staleness: int | None = None
    stale: Literal["drop", "scale"] = "drop"
    scale: Scale | None = None

    def __post_init__(self) -> None:
        _one_of("stale", self.stale, ("drop", "scale"))
        if self.max_staleness is not None:
            _at_least("max_staleness", self.max_staleness, 0)
            if self.stale == "scale":
                raise ValueError("max_staleness is given, but stale is 'scale': expected 'drop'")
        _check_scale(self.stale, self.scale)

    def machine(self, workers: Sequence[int]) -> Asynchronously:
        """Return a machine at version 0. Raises ValueError for no workers, and for one that is there twice."""
        limit = inf if self.max_staleness is None else self.max_staleness
        return Asynchronously(workers, drop_above=limit, scale=_check_scale(self.stale, self.scale))


@dataclass(frozen=True, repr=False)
class Bounded(Policy):
    """Each push makes a version, but one that brings its worker more than `staleness` ahead of the slowest is held.

    A worker's clock is the number of its pushes that were applied. The slowest is sought among those that are still
    there. What is held is applied as soon as the clock allows. With a staleness of 0 all move at once: a step takes one
    push of each. After a barrier all clocks are equal. Raises ValueError for anything else.

    After Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server" (NIPS 2013).
    """

    staleness: int

    def __post_init__(self) -> None:
        _at_least("staleness", self.staleness, 0)

    def machine(self, workers: Sequence[int]) -> Machine:
        """Return a machine at version 0. Raises ValueError for no workers, and for one that is there twice."""
        return Boundedly(self.staleness, workers) if self.staleness else Stepwise(workers, full=len(workers))


@dataclass(frozen=True, repr=False)
class Synchronous(Policy):
    """Step k takes the k-th push of each worker that is still there, and of those that left what they had pushed.

    Who rests at a barrier is not there: a step lacks what it does not push. After the barrier all are in step again.
    "mean" divides by the number of pushes in the step, "sum" does not. A worker may push ahead of the others: that is
    held. Raises ValueError for another reduction.
    """

    accepts: ClassVar[bool] = True

    reduction: Literal["mean", "sum"]

    def __post_init__(self) -> None:
        _one_of("reduction", self.reduction, ("mean", "sum"))

    def machine(self, workers: Sequence[int]) -> Stepwise:
        """Return a machine at version 0. Raises ValueError for no workers, and for one that is there twice."""
        return Stepwise(workers, full=len(workers), mean=self.reduction == "mean")


@dataclass(frozen=True, repr=False)
class Quorum(Policy):
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

    n: int
    reduction: Literal["mean", "sum"]
    stale: Literal["accept", "drop", "scale"] = "accept"
    scale: Scale | None = None

    def __post_init__(self) -> None:
        _at_least("n", self.n, 1)
        _one_of("reduction", self.reduction, ("mean", "sum"))
        _one_of("stale", self.stale, ("accept", "drop", "scale"))
        _check_scale(self.stale, self.scale)

    def machine(self, workers: Sequence[int]) -> FirstOf:
        """Return a machine at version 0. Raises ValueError for fewer than n workers, and for one there twice."""
        if len(workers) < self.n:
            raise ValueError(f"a quorum of {self.n} of workers {list(workers)}: expected at least {self.n} workers")
        drops, scale = self.stale == "drop", _check_scale(self.stale, self.scale)
        mean = self.reduction == "mean"
        machine = FirstOf(workers, full=self.n, mean=mean, drop_above=0 if drops else inf, scale=scale)
        machine.sees_own = drops
        return machine


def _check_scale(stale: str, scale: Scale | None) -> Scale | None:
    """Return the function to scale with, if any. Raises ValueError for one that would not be used, or is of no use."""
    if stale != "scale":
        if scale is not None:
            raise ValueError(f"scale is given, but stale is {stale!r}: expected 'scale'")
        return None
    for staleness in _SAMPLES:
        weight_of(scale or inverse_age, staleness)
    return scale or inverse_age


def _shown(value: object) -> str:
    """Return the repr of a setting; of a function, which would show its address, its name and some of its values."""
    if isinstance(value, str):
        return repr(str(value))  # a ReduceOp is a string too
    if not callable(value):
        return repr(value)
    name = getattr(value, "__name__", type(value).__name__)
    return f"{name}{[float(value(staleness)) for staleness in _SAMPLES]}"


def _one_of(what: str, seen: str, known: tuple[str, ...]) -> None:
    if seen not in known:
        raise ValueError(f"{what} {seen!r}: expected one of {', '.join(known)}")


def _at_least(what: str, seen: object, least: int) -> None:
    if not isinstance(seen, int) or isinstance(seen, bool) or seen < least:
        raise ValueError(f"{what} is {seen!r}: expected an integer of at least {least}")
