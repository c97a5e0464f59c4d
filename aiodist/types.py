"""Words that every layer shares."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal, TypeAlias

__all__ = ["ANY", "Impl", "Op", "ReduceOp"]

ANY: Final = -1
"""Any source, any tag: for receives only."""


class ReduceOp(StrEnum):
    """How a reduction combines elements."""

    SUM = "sum"
    MEAN = "mean"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


Op: TypeAlias = Literal["sum", "mean", "prod", "min", "max", "band", "bor", "bxor"] | ReduceOp
"""What `op=` takes."""

Impl: TypeAlias = Literal[
    "auto",
    "mpi",
    "gloo",
    "shm",
    "hierarchical",
    "leaders",
    "ring",
    "doubling",
    "halving",
    "tree",
    "direct",
    "chain",
    "bruck",
    "nccl",
    "cuda_ipc",
    "staged",
]
"""What `impl=` takes: "auto", which lets the selector choose, or the name of an implementation."""
