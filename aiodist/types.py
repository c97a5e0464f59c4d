"""Words that every layer shares."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["ANY", "ReduceOp"]

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
