"""Tables of rows: their description, the server of each row, and the format of ids and rows in messages.

First values are functions of seed and id alone, so they are the same on any server and in any order. A message has the
number of ids, the ids, and their rows, all little-endian. The ids of a push rise, so a server checks in one pass that
each occurs once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from aiodist.backends.base import DTYPES
from aiodist.ps.optimizers import OptimizerRule, optimizer
from aiodist.types import check_int

MOST_DIM = 1 << 20
IDS_END = 1 << 63
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio, as a signed number: the increment of a stream of mixed numbers."""
_SAMPLE = 1 << 10
"""Ids per sample."""
_AT_A_TIME = 1 << 15
"""Elements per pass, so that intermediate results fit into a cache."""


@dataclass(frozen=True)
class Uniform:
    """Each element is drawn evenly from [low, high)."""

    low: float = -0.05
    high: float = 0.05

    def __post_init__(self) -> None:
        _check(self, ordered=self.low <= self.high)

    def values(self, drawn: Tensor) -> Tensor:
        """Return first values for float64 numbers drawn from [0, 1)."""
        return drawn.mul_(self.high - self.low).add_(self.low)


@dataclass(frozen=True)
class Normal:
    """Each element is drawn from a normal distribution, as those of `torch.nn.Embedding` are; std is not below 0."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _check(self, ordered=self.std >= 0)

    def values(self, drawn: Tensor) -> Tensor:
        in_one = drawn.add_(2.0**-54).mul_(2).sub_(1)  # of (-1, 1)
        return in_one.erfinv_().mul_(self.std * math.sqrt(2)).add_(self.mean)


@dataclass(frozen=True)
class Constant:
    """Each element is `value`."""

    value: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def values(self, drawn: Tensor) -> Tensor:
        return drawn.fill_(self.value)


Initial: TypeAlias = Uniform | Normal | Constant
_KINDS: dict[str, type[Initial]] = {"Uniform": Uniform, "Normal": Normal, "Constant": Constant}


def _check(initial: Initial, *, ordered: bool = True) -> None:
    finite = all(isinstance(value, int | float) and math.isfinite(value) for value in asdict(initial).values())
    if not finite or not ordered:
        raise ValueError(f"{initial!r}: expected finite numbers, low at most high and std not below 0")


def initial_of(given: object) -> Initial:
    """Return `init=` as one of the three; a number is a `Constant`. TypeError for anything else."""
    if isinstance(given, Initial):
        return given
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"init={given!r}: expected Uniform(low, high), Normal(mean, std), or a number")
    return Constant(float(given))


@dataclass(frozen=True)
class TableSpec:
    """Rows of `dim` elements with ids from 0 to below `rows`, or to below 2^63. Raises for arguments out of range."""

    dim: int
    rows: int | None
    dtype: torch.dtype
    init: Initial
    seed: int
    optimizer: OptimizerRule | None
    """Optimizer, or None to add pushes."""

    def __post_init__(self) -> None:
        check_int("dim", self.dim, 1, MOST_DIM)
        if self.rows is not None:
            check_int("rows", self.rows, 1, IDS_END)
        check_int("seed", self.seed, 0, IDS_END - 1)
        if self.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype={self.dtype}: expected float32 or float64")

    @property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize

    def check_ids(self, ids: Tensor) -> None:
        if not ids.numel():
            return
        least, most = (int(one) for one in ids.aminmax())
        end = IDS_END if self.rows is None else self.rows
        if least < 0 or most >= end:
            raise ValueError(f"id {least if least < 0 else most}: expected 0 to {end - 1}")

    def first_rows(self, ids: Tensor, into: Tensor) -> None:
        """Write the first values of `ids` into the rows of `into`, `(len(ids), dim)`, some at a time."""
        seed, columns = (
            mix(torch.tensor(self.seed, device="cpu")),
            torch.arange(1, self.dim + 1, device="cpu") * _GOLDEN,
        )
        some = max(1, _AT_A_TIME // self.dim)
        for rows, chosen in zip(into.split(some), ids.split(some), strict=True):
            bits = shifted(mix(mix(chosen ^ seed)[:, None] + columns), 11)
            rows.copy_(self.init.values(bits.to(torch.float64).mul_(2.0**-53)))

    @cached_property
    def said(self) -> dict[str, Any]:
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
        """Return the table that `said` describes; raise ValueError, TypeError or KeyError for a wrong description."""
        (kind, of_init), rule = said["init"], None
        if said["optimizer"] is not None:
            name, settings = said["optimizer"]
            if name not in ("SGD", "Adagrad", "Adam"):
                raise ValueError(f"optimizer {name!r} of rows: expected SGD, Adagrad or Adam")
            rule = optimizer(getattr(torch.optim, name), **settings)
        return cls(**said | {"dtype": DTYPES[said["dtype"]], "init": _KINDS[kind](**of_init), "optimizer": rule})


def mix(t: Tensor) -> Tensor:
    """Return 64 well mixed bits for each int64 of `t`, one to one, in new memory.

    The finaliser of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014,
    doi:10.1145/2660193.2660195), with Stafford's constants. int64 wraps around, as uint64 does.
    """
    z = shifted(t, 30).bitwise_xor_(t).mul_(_FIRST)
    z = shifted(z, 27).bitwise_xor_(z).mul_(_SECOND)
    return shifted(z, 31).bitwise_xor_(z)


def shifted(t: Tensor, bits: int) -> Tensor:
    """Return `t` shifted to the right, with zeros from the left; torch's shift copies the sign."""
    return (t >> bits).bitwise_and_((1 << (64 - bits)) - 1)


COUNT_BYTES = ID_BYTES = 8
_OWNER_BITS = 24


def owners(ids: Tensor, servers: int) -> Tensor:
    """Return the server of each row, a number below `servers`. Rows are spread evenly."""
    return shifted(mix(ids), 64 - _OWNER_BITS).remainder_(servers)


class GroupedIds(NamedTuple):
    """The ids of a call, grouped by server."""

    ids: Tensor
    """Each id once: the rising ids of the first server, then those of the second, and so on.

    If made for a read, perhaps in the order of the call, and some ids several times.
    """
    places: Tensor
    """Place in `ids` of each id of the call, `(numel,)`."""
    counts: list[int]
    """Number of ids of each server."""
    shape: torch.Size
    """Shape of the call's ids."""
    as_called: bool = False
    """True if `ids` are the ids of the call, in this order."""

    def blocks(self) -> list[slice]:
        return [slice(end - count, end) for end, count in zip(accumulate(self.counts), self.counts, strict=True)]

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum of the rows of each id, `(len(ids), dim)`, of the call's `values`, `(numel, dim)`."""
        if self.ids.numel() == self.places.numel():  # a gather is faster than a sum
            return self.last(values)
        return values.new_zeros(self.ids.numel(), values.shape[1]).index_add_(0, self.places, values)

    def last(self, values: Tensor) -> Tensor:
        """Return the last row of each id, `(len(ids), dim)`, of the call's `values`, `(numel, dim)`."""
        order = torch.arange(self.places.numel(), device="cpu")
        return values.index_select(0, torch.zeros_like(self.ids).scatter_reduce_(0, self.places, order, "amax"))


def grouped(ids: object, spec: TableSpec, servers: int, *, to_read: bool = False) -> GroupedIds:
    """Return `ids`, of any shape, grouped by server.

    True for `to_read` permits ids that occur several times, in any order. Raises TypeError unless `ids` is an int32 or
    int64 tensor on the CPU, ValueError for an id out of range. Cost: a sort, unless `to_read` and few ids repeat.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or not ids.is_cpu:
        seen = f"{ids.dtype} on {ids.device}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"ids are {seen}: expected a tensor of int64 or int32 on the CPU")
    with torch.inference_mode(False), torch.no_grad():
        flat = ids.detach().reshape(-1).to(torch.int64)
        spec.check_ids(flat)
        as_called = to_read and not _repeat(flat)
        if as_called:
            unique, places = flat, torch.arange(flat.numel(), device="cpu")
        else:
            unique, places = flat.unique(return_inverse=True)
        if servers == 1:
            return GroupedIds(unique, places, [unique.numel()], ids.shape, as_called)
        owner = owners(unique, servers)
        order = owner.argsort(stable=True)
        moved = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device="cpu"))
        return GroupedIds(unique[order], moved[places], torch.bincount(owner, minlength=servers).tolist(), ids.shape)


def _repeat(ids: Tensor) -> bool:
    """Return True if many ids seem to repeat others, or if a sort costs little.

    Two samples: ids at some places, for ids that occur very often; and the ids with some hashes, each as often as it
    occurs.
    """
    part = ids.numel() // _SAMPLE
    if part < 2:
        return True
    samples = ids[::part], ids[ids * _GOLDEN >= IDS_END - (2 * IDS_END) // part]
    return any(8 * sample.unique().numel() < 7 * sample.numel() for sample in samples)


def packed_rows(ids: Tensor, rows: Tensor, room: Callable[[int], Tensor] | None = None) -> Tensor:
    """Return the message of ids and rows, flat uint8, in new memory or in `room(nbytes)`."""
    start = COUNT_BYTES + ids.nbytes
    nbytes = start + rows.nbytes
    packed = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if room is None else room(nbytes)[:nbytes]
    packed[:COUNT_BYTES].view(torch.int64)[0] = ids.numel()
    packed[COUNT_BYTES:start].view(torch.int64).copy_(ids)
    packed[start:].view(rows.dtype).view_as(rows).copy_(rows)
    return packed


def unpack(packed: Tensor, spec: TableSpec) -> tuple[Tensor, Tensor]:
    """Return the ids and rows of a message; raise ValueError for wrong lengths or ids."""
    if packed.numel() < COUNT_BYTES:
        raise ValueError(f"rows in {packed.numel()} bytes: expected {COUNT_BYTES} or more")
    count = int(packed[:COUNT_BYTES].view(torch.int64)[0])
    start = COUNT_BYTES + count * ID_BYTES
    if count < 0 or packed.numel() != start + count * spec.row_bytes:
        raise ValueError(f"{count} rows in {packed.numel()} bytes: expected {start + count * spec.row_bytes}")
    return ids_in(packed[COUNT_BYTES:start], spec), packed[start:].view(spec.dtype).view(count, spec.dim)


def ids_in(packed: Tensor, spec: TableSpec, *, rise: bool = True) -> Tensor:
    """Return flat uint8 as ids; raise ValueError unless they are in the range of the table, and, if asked, rise."""
    if packed.numel() % ID_BYTES:
        raise ValueError(f"ids in {packed.numel()} bytes: expected a multiple of {ID_BYTES}")
    ids = packed.view(torch.int64)
    if not rise:
        spec.check_ids(ids)
        return ids
    if not bool((ids[1:] > ids[:-1]).all()):
        raise ValueError("ids that do not rise: expected each once, in order")
    spec.check_ids(ids[:: max(1, ids.numel() - 1)])  # the lowest and the highest
    return ids
