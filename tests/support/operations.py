"""Operations with their arguments in one order, from the lists of tests."""

from __future__ import annotations

from typing import Any

from aiodist.testing.seams.transport import Primitive

__all__ = ["operation"]

_ARGUMENTS = {
    "allreduce": ("t", "op"),
    "broadcast": ("t", "root"),
    "reduce": ("t", "op", "root"),
    "scan": ("t", "op"),
    "allgather": ("t", "out", "counts"),
    "reduce_scatter": ("t", "out", "counts", "op"),
    "alltoall": ("t", "out", "counts", "received"),
}


def operation(kind: str, *arguments: Any) -> Primitive:
    """Return an operation, of tensors and then what else it takes."""
    return Primitive(kind, **dict(zip(_ARGUMENTS[kind], arguments, strict=True)))
