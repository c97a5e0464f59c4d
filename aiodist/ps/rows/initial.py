"""The first values of rows: functions of seed and id alone, so the same on any server and in any order."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from aiodist.ps.rows.hashing import uniform

_AT_A_TIME = 1 << 15  # elements: what lies between fits into a cache


class _Numbers:
    """A dataclass of finite numbers."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{type(self).__name__}: {name}={value!r}: expected a number")
            if not math.isfinite(value):
                raise ValueError(f"{type(self).__name__}: {name}={value}: expected a finite number")


@dataclass(frozen=True)
class Uniform(_Numbers):
    """Each element is drawn evenly from [low, high)."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low <= self.high:
            raise ValueError(f"Uniform({self.low}, {self.high}): expected low to be at most high")

    def values(self, seed: int, ids: Tensor, dim: int) -> Tensor:
        """Return the rows of `ids`, `(len(ids), dim)` in float64."""
        return uniform(seed, ids, dim).mul_(self.high - self.low).add_(self.low)


@dataclass(frozen=True)
class Normal(_Numbers):
    """Each element is drawn from a normal distribution, as those of `torch.nn.Embedding` are; std is not below 0."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std < 0:
            raise ValueError(f"Normal(std={self.std}): expected a number that is not below 0")

    def values(self, seed: int, ids: Tensor, dim: int) -> Tensor:
        """Return the rows of `ids`: by the inverse of the distribution, one number for one number."""
        drawn = uniform(seed, ids, dim).add_(2.0**-54).mul_(2).sub_(1)  # of (-1, 1)
        return drawn.erfinv_().mul_(self.std * math.sqrt(2)).add_(self.mean)


@dataclass(frozen=True)
class Constant(_Numbers):
    """Each element is `value`."""

    value: float = 0.0

    def values(self, seed: int, ids: Tensor, dim: int) -> Tensor:
        """Return the rows of `ids`."""
        return torch.full((ids.numel(), dim), self.value, dtype=torch.float64)


Initial: TypeAlias = Uniform | Normal | Constant
"""What rows begin with."""


def first_rows(initial: Initial, seed: int, ids: Tensor, into: Tensor) -> None:
    """Write the first values of `ids` into the rows of `into`, `(len(ids), dim)`, some at a time."""
    some = max(1, _AT_A_TIME // max(1, into.shape[1]))
    for rows, chosen in zip(into.split(some), ids.split(some), strict=True):
        rows.copy_(initial.values(seed, chosen, into.shape[1]))


def initial_of(given: object) -> Initial:
    """Return what `init=` means: one of the three, or a number that all elements are. TypeError for anything else."""
    if isinstance(given, Initial):
        return given
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"init={given!r}: expected Uniform(low, high), Normal(mean, std), or a number")
    return Constant(float(given))


def said_of(initial: Initial) -> list[Any]:
    """Return it as JSON holds it."""
    return [type(initial).__name__, asdict(initial)]


def initial_from(said: list[Any]) -> Initial:
    """Return what `said_of` said; raise KeyError, ValueError or TypeError for what it never says."""
    kinds: dict[str, type[Initial]] = {"Uniform": Uniform, "Normal": Normal, "Constant": Constant}
    return kinds[said[0]](**said[1])
