"""What all ranks must mean by a table: compared when they open it, and told to its servers as JSON.

First values are functions of seed and id alone, so the same on any server and in any order.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from aiodist.backends.base import DTYPES
from aiodist.ps.optimizers import OptimizerRule, optimizer

MOST_DIM = 1 << 20
IDS_END = 1 << 63
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio, as a signed number: what a stream of mixed numbers is counted up by."""
_AT_A_TIME = 1 << 15  # elements: what lies between fits into a cache


@dataclass(frozen=True)
class Uniform:
    """Each element is drawn evenly from [low, high)."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        _check(self, ordered=self.low <= self.high)

    def values(self, drawn: Tensor) -> Tensor:
        """Return first values for float64 numbers that were drawn from [0, 1)."""
        return drawn.mul_(self.high - self.low).add_(self.low)


@dataclass(frozen=True)
class Normal:
    """Each element is drawn from a normal distribution, as those of `torch.nn.Embedding` are; std is not below 0."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _check(self, ordered=self.std >= 0)

    def values(self, drawn: Tensor) -> Tensor:
        """See `Uniform`: by the inverse of the distribution, one number for one number."""
        in_one = drawn.add_(2.0**-54).mul_(2).sub_(1)  # of (-1, 1)
        return in_one.erfinv_().mul_(self.std * math.sqrt(2)).add_(self.mean)


@dataclass(frozen=True)
class Constant:
    """Each element is `value`."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def values(self, drawn: Tensor) -> Tensor:
        """See `Uniform`."""
        return drawn.fill_(self.value)


Initial: TypeAlias = Uniform | Normal | Constant
_KINDS: dict[str, type[Initial]] = {"Uniform": Uniform, "Normal": Normal, "Constant": Constant}


def _check(initial: Initial, *, ordered: bool = True) -> None:
    finite = all(isinstance(value, int | float) and math.isfinite(value) for value in asdict(initial).values())
    if not finite or not ordered:
        raise ValueError(f"{initial!r}: expected finite numbers, low at most high and std not below 0")


def initial_of(given: object) -> Initial:
    """Return what `init=` means: one of the three, or a number that all elements are. TypeError for anything else."""
    if isinstance(given, Initial):
        return given
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"init={given!r}: expected Uniform(low, high), Normal(mean, std), or a number")
    return Constant(float(given))


@dataclass(frozen=True)
class TableSpec:
    """Rows of `dim` elements under ids from 0 to below `rows`, or all that int64 has. Raises for what cannot be."""

    dim: int
    rows: int | None
    dtype: torch.dtype
    init: Initial
    seed: int
    optimizer: OptimizerRule | None
    """None: pushes are added."""

    def __post_init__(self) -> None:
        _check_int("dim", self.dim, 1, MOST_DIM)
        if self.rows is not None:
            _check_int("rows", self.rows, 1, IDS_END)
        _check_int("seed", self.seed, 0, IDS_END - 1)
        if self.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype={self.dtype}: expected float32 or float64")

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dim * self.dtype.itemsize

    def check_ids(self, ids: Tensor) -> None:
        """Raise ValueError unless all of `ids` are of the table."""
        if not ids.numel():
            return
        least, most = (int(one) for one in ids.aminmax())
        end = IDS_END if self.rows is None else self.rows
        if least < 0 or most >= end:
            raise ValueError(f"id {least if least < 0 else most}: expected 0 to {end - 1}")

    def first_rows(self, ids: Tensor, into: Tensor) -> None:
        """Write the first values of `ids` into the rows of `into`, `(len(ids), dim)`, some at a time."""
        seed, columns = mix(torch.tensor(self.seed)), torch.arange(1, self.dim + 1) * _GOLDEN
        some = max(1, _AT_A_TIME // self.dim)
        for rows, chosen in zip(into.split(some), ids.split(some), strict=True):
            bits = shifted(mix(mix(chosen ^ seed)[:, None] + columns), 11)
            rows.copy_(self.init.values(bits.to(torch.float64).mul_(2.0**-53)))

    @cached_property
    def said(self) -> dict[str, Any]:
        """It as JSON holds it."""
        return {
            "dim": self.dim,
            "rows": self.rows,
            "dtype": DTYPES.index(self.dtype),
            "init": [type(self.init).__name__, asdict(self.init)],
            "seed": self.seed,
            "optimizer": None if self.optimizer is None else [self.optimizer.name, dict(self.optimizer.settings)],
        }

    def __str__(self) -> str:
        return json.dumps(self.said)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> TableSpec:
        """Return what `said` says; raise ValueError, TypeError or KeyError for what it never says."""
        (kind, of_init), of_optimizer = said["init"], said["optimizer"]
        rule = None if of_optimizer is None else _rule(*of_optimizer)
        return cls(**said | {"dtype": DTYPES[said["dtype"]], "init": _KINDS[kind](**of_init), "optimizer": rule})


def _rule(name: str, settings: dict[str, Any]) -> OptimizerRule:
    if name not in ("SGD", "Adagrad", "Adam"):
        raise ValueError(f"optimizer {name!r} of rows: expected SGD, Adagrad or Adam")
    return optimizer(getattr(torch.optim, name), **settings)


def mix(t: Tensor) -> Tensor:
    """Return 64 well mixed bits for each int64 of `t`, one to one, in new memory.

    The finaliser of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014,
    doi:10.1145/2660193.2660195), with Stafford's constants. int64 wraps around, as uint64 does.
    """
    z = shifted(t, 30).bitwise_xor_(t).mul_(_FIRST)
    z = shifted(z, 27).bitwise_xor_(z).mul_(_SECOND)
    return shifted(z, 31).bitwise_xor_(z)


def shifted(t: Tensor, bits: int) -> Tensor:
    """Return `t` shifted to the right, with zeros from the left; torch brings copies of the sign."""
    return (t >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {type(value).__name__}: expected an int")
    if not least <= value <= most:
        raise ValueError(f"{name}={value}: expected {least} to {most}")
