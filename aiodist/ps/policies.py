"""The consistency policies, which choose the pushes of a step, and the workers that wait for others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import ClassVar, Literal

from aiodist.ps.machines import Asynchronously, Boundedly, FirstOf, Machine, Scale, Stepwise, weight_of
from aiodist.types import check_int, one_of

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
    """A consistency, as a frozen dataclass. Equal policies have the same `repr` on all ranks."""

    accepts: ClassVar[bool] = False
    """True ends a push when the servers have it. False ends it when they have applied or dropped it."""

    @property
    def scales(self) -> bool:
        """True if the policy may weight pushes by other factors than 1."""
        return getattr(self, "stale", None) == "scale" or getattr(self, "reduction", None) == "mean"

    @abstractmethod
    def machine(self, workers: Sequence[int]) -> Machine:
        """Return a machine at version 0. Raises ValueError without workers, and for a worker that is listed twice."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{field.name}={_shown(getattr(self, field.name))}" for field in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({shown})"


@dataclass(frozen=True, repr=False)
class Asynchronous(Policy):
    """Each push makes a version when it arrives, and no worker waits for another.

    A push that is more than `max_staleness` versions old is dropped; None drops none. With "scale" each push is
    multiplied by `scale(staleness)` instead, by default by 1 / (1 + staleness). A worker's own pushes make versions
    too, so a worker that pushes without reading grows stale. Raises ValueError or TypeError for anything else.
    """

    max_staleness: int | None = None
    stale: Literal["drop", "scale"] = "drop"
    scale: Scale | None = None

    def __post_init__(self) -> None:
        one_of("stale", self.stale, ("drop", "scale"))
        if self.max_staleness is not None:
            check_int("max_staleness", self.max_staleness, 0)
            if self.stale == "scale":
                raise ValueError("max_staleness is given, but stale is 'scale': expected 'drop'")
        _check_scale(self.stale, self.scale)

    def machine(self, workers: Sequence[int]) -> Asynchronously:
        limit = inf if self.max_staleness is None else self.max_staleness
        return Asynchronously(workers, drop_above=limit, scale=_check_scale(self.stale, self.scale))


@dataclass(frozen=True, repr=False)
class Bounded(Policy):
    """Each push makes a version, but a push that brings its worker more than `staleness` ahead of the slowest is held.

    A worker's clock is the number of its applied pushes. The slowest worker is one that has not left. A held push is
    applied when the clocks allow. With a staleness of 0 a step takes one push of each worker. After a barrier all
    clocks are equal. Raises ValueError or TypeError for anything else.

    After Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server" (NIPS 2013).
    """

    staleness: int

    def __post_init__(self) -> None:
        check_int("staleness", self.staleness, 0)

    def machine(self, workers: Sequence[int]) -> Machine:
        return Boundedly(self.staleness, workers) if self.staleness else Stepwise(workers, full=len(workers))


@dataclass(frozen=True, repr=False)
class Synchronous(Policy):
    """Step k takes the k-th push of each worker; pushes of a worker that has left still count.

    No step waits for a worker that has left or waits at a barrier. After the barrier all workers are at the same step.
    "mean" divides by the number of pushes in the step, "sum" does not. A worker may push ahead of the others; such
    pushes are held. Raises ValueError for another reduction.
    """

    accepts: ClassVar[bool] = True

    reduction: Literal["mean", "sum"]

    def __post_init__(self) -> None:
        one_of("reduction", self.reduction, ("mean", "sum"))

    def machine(self, workers: Sequence[int]) -> Stepwise:
        return Stepwise(workers, full=len(workers), mean=self.reduction == "mean")


@dataclass(frozen=True, repr=False)
class Quorum(Policy):
    """The first n pushes make a step, from any workers; or fewer, if fewer than n workers are present.

    A worker that has left or waits at a barrier is not present. `stale` defines the use of a push whose base is not the
    current version: "accept" counts it as any other; "drop" discards it, which with more workers than n is synchronous
    training with backup workers; "scale" multiplies it by `scale(staleness)`, by default by 1 / (1 + staleness). "mean"
    divides by the number of pushes in the step, "sum" does not. Raises ValueError or TypeError for anything else, and
    ValueError on opening with fewer than n workers.

    With "drop" a read waits for the step of its client's own push. Otherwise a read does not wait: two workers could
    wait for each other, each at a tensor whose step lacks the other's push.

    After Chen, Pan, Monga, Bengio and Jozefowicz, "Revisiting distributed synchronous SGD" (arXiv:1604.00981, 2016).
    """

    accepts: ClassVar[bool] = True

    n: int
    reduction: Literal["mean", "sum"]
    stale: Literal["accept", "drop", "scale"] = "accept"
    scale: Scale | None = None

    def __post_init__(self) -> None:
        check_int("n", self.n, 1)
        one_of("reduction", self.reduction, ("mean", "sum"))
        one_of("stale", self.stale, ("accept", "drop", "scale"))
        _check_scale(self.stale, self.scale)

    def machine(self, workers: Sequence[int]) -> FirstOf:
        drops, scale = self.stale == "drop", _check_scale(self.stale, self.scale)
        mean = self.reduction == "mean"
        machine = FirstOf(workers, full=self.n, mean=mean, drop_above=0 if drops else inf, scale=scale)
        machine.sees_own = drops
        return machine


def _check_scale(stale: str, scale: Scale | None) -> Scale | None:
    """Return the scale function, or None. Raises ValueError for an unused one, and for one without valid weights."""
    if stale != "scale":
        if scale is not None:
            raise ValueError(f"scale is given, but stale is {stale!r}: expected 'scale'")
        return None
    for staleness in _SAMPLES:
        weight_of(scale or inverse_age, staleness)
    return scale or inverse_age


def _shown(value: object) -> str:
    """Return the repr of a setting; a function's name and some of its values, since its repr has an address."""
    if isinstance(value, str):
        return repr(str(value))  # a ReduceOp is a string too
    if not callable(value):
        return repr(value)
    name = getattr(value, "__name__", type(value).__name__)
    return f"{name}{[float(value(staleness)) for staleness in _SAMPLES]}"
