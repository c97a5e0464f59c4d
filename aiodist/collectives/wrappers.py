"""Small programs around programs: what is done before the first step or to the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from aiodist.backends.inplace import copy
from aiodist.collectives.arithmetic import combine, from_wire, to_wire, wire_op
from aiodist.collectives.program import Program
from aiodist.types import ReduceOp

__all__ = ["copied_to_all", "interleaved", "local_first", "mapped", "nothing", "returning"]

T = TypeVar("T")
U = TypeVar("U")


def mapped(program: Program[T], convert: Callable[[T], U]) -> Program[U]:
    """Convert the result."""
    result = yield from program
    return convert(result)


def returning(program: Program[Any], result: T) -> Program[T]:
    """Run `program` for its effect and return `result`."""
    yield from program
    return result


def nothing() -> Program[None]:
    """Do nothing."""
    yield []


def interleaved(program: Program[list[list[Tensor]]]) -> Program[list[Tensor]]:
    """Turn a list by tensor of lists by rank into one list in the order rank * len + i."""
    by_tensor = yield from program
    return [t for by_rank in zip(*by_tensor, strict=True) for t in by_rank]


def copied_to_all(program: Program[Any], ts: list[Tensor]) -> Program[list[Tensor]]:
    """Copy the first tensor, which `program` fills, into the others."""
    yield from program
    for t in ts[1:]:
        copy(t.view(-1), ts[0].view(-1))
    return ts


def local_first(ts: Sequence[Tensor], op: ReduceOp, reduce: Callable[[Tensor], Program[Any]]) -> Program[Tensor]:
    """Combine the list on this rank, then have `reduce` combine the ranks; the first tensor holds the total.

    `reduce` reduces a flat wire tensor in place with the operator that `wire_op(op)` names.
    """
    total = to_wire(ts[0])
    for t in ts[1:]:
        combine(total, to_wire(t), wire_op(op))
    ranks = yield from reduce(total)
    if ranks:
        from_wire(total, ts[0], op, ranks * len(ts))
    return ts[0]
