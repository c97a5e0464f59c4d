"""What all ranks must mean by a table: compared when they open it, and told to its servers as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import DTYPES
from aiodist.ps.optimizers import OptimizerRule
from aiodist.ps.rows.initial import Initial, initial_from, said_of
from aiodist.ps.rows.optimizers import RowOptimizer, rule_from

FLOATS = (torch.float32, torch.float64)
MOST_DIM = 1 << 20
IDS_END = 1 << 63


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
    coded: bool = False
    """Rows are encoded by the codecs of the parameter server."""

    def __post_init__(self) -> None:
        _check_int("dim", self.dim, 1, MOST_DIM)
        if self.rows is not None:
            _check_int("rows", self.rows, 1, IDS_END)
        _check_int("seed", self.seed, 0, IDS_END - 1)
        if self.dtype not in FLOATS:
            raise TypeError(f"dtype={self.dtype}: expected float32 or float64")
        if not isinstance(self.coded, bool):
            raise TypeError(f"coded={self.coded!r}: expected a bool")
        self.make_optimizer()

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dim * self.dtype.itemsize

    def make_optimizer(self) -> RowOptimizer | None:
        """Return a new one."""
        return None if self.optimizer is None else RowOptimizer(self.optimizer, self.dtype)

    def check_settings(self, settings: Mapping[str, Any], name: str) -> None:
        """Raise ValueError or TypeError unless the optimizer of the table `name` has these settings."""
        optimizer = self.make_optimizer()
        if optimizer is None:
            raise ValueError(f"the table {name!r} has no optimizer: expected one for {', '.join(settings)}")
        optimizer.configure(settings)

    def check_ids(self, ids: Tensor) -> None:
        """Raise ValueError unless all of `ids` are of the table."""
        if not ids.numel():
            return
        least, most = (int(one) for one in ids.aminmax())
        end = IDS_END if self.rows is None else self.rows
        if least < 0 or most >= end:
            seen = least if least < 0 else most
            raise ValueError(f"id {seen}: expected 0 to {end - 1}")

    @cached_property
    def said(self) -> dict[str, Any]:
        """It as JSON holds it."""
        return {
            "dim": self.dim,
            "rows": self.rows,
            "dtype": DTYPES.index(self.dtype),
            "init": said_of(self.init),
            "seed": self.seed,
            "optimizer": None if self.optimizer is None else [self.optimizer.name, dict(self.optimizer.settings)],
            "coded": self.coded,
        }

    def __str__(self) -> str:
        return json.dumps(self.said)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> TableSpec:
        """Return what `said` says; raise ValueError, TypeError or KeyError for what it never says."""
        return cls(
            **said
            | {
                "dtype": DTYPES[said["dtype"]],
                "init": initial_from(said["init"]),
                "optimizer": None if said["optimizer"] is None else rule_from(said["optimizer"]),
            }
        )


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {type(value).__name__}: expected an int")
    if not least <= value <= most:
        raise ValueError(f"{name}={value}: expected {least} to {most}")
