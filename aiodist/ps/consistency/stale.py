"""What is done about pushes that are based on an old version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import inf

Scale = Callable[[int], float]
"""The staleness, in versions, to the weight."""

_SAMPLES = (0, 1, 2, 3, 5, 10, 100)


def inverse_age(staleness: int) -> float:
    """Return 1 / (1 + staleness).

    After Zhang, Gupta, Lian and Liu, "Staleness-aware async-SGD for distributed deep learning" (IJCAI 2016), who divide
    the learning rate by the staleness; they count it from 1.

    >>> inverse_age(0), inverse_age(3)
    (1.0, 0.25)
    """
    return 1.0 / (1 + staleness)


@dataclass(frozen=True, slots=True)
class Stale:
    """A rule for stale pushes."""

    drop_above: float = inf
    """Pushes that are staler than this, in versions, are dropped."""
    scale: Scale | None = None
    scale_above: int = -1
    """Those that are staler than this are multiplied by `scale(staleness)`."""

    def weight(self, staleness: int) -> float:
        """Return what multiplies a push. Raises ValueError when `scale` returns what cannot be a weight."""
        if self.scale is None or staleness <= self.scale_above:
            return 1.0
        weight = float(self.scale(staleness))
        if not 0 <= weight < inf:
            raise ValueError(f"scale({staleness}) is {weight}: expected a finite weight, not below 0")
        return weight


class Described:
    """A policy, as a frozen dataclass: its `repr` is equal on all ranks, where it does the same.

    A function's own `repr` shows its address. Here it is its name and its values at a few points.
    """

    @property
    def scales(self) -> bool:
        """Whether weights other than 1 happen."""
        return getattr(self, "stale", None) == "scale" or getattr(self, "reduction", None) == "mean"

    def __repr__(self) -> str:
        shown = ", ".join(f"{field.name}={_shown(getattr(self, field.name))}" for field in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({shown})"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(str(value))  # a ReduceOp is a string too
    if not callable(value):
        return repr(value)
    name = getattr(value, "__name__", type(value).__name__)
    return f"{name}{[float(value(staleness)) for staleness in _SAMPLES]}"


def checked_scale(stale: str, scale: Scale | None) -> Scale | None:
    """Return the function to scale with, if any. Raises ValueError for one that would not be used, or is of no use."""
    if stale != "scale":
        if scale is not None:
            raise ValueError(f"scale is given, but stale is {stale!r}: expected 'scale'")
        return None
    rule = Stale(scale=scale or inverse_age)
    for staleness in _SAMPLES:
        rule.weight(staleness)
    return rule.scale


def one_of(what: str, seen: str, known: tuple[str, ...]) -> None:
    """Raise ValueError where `seen` is unknown."""
    if seen not in known:
        raise ValueError(f"{what} {seen!r}: expected one of {', '.join(known)}")


def at_least(what: str, seen: object, least: int) -> None:
    """Raise ValueError where `seen` is no integer of that size."""
    if not isinstance(seen, int) or isinstance(seen, bool) or seen < least:
        raise ValueError(f"{what} is {seen!r}: expected an integer of at least {least}")
