"""Which tensors NCCL takes, and as what: it has fewer types and operators than we."""

from __future__ import annotations

import torch
from torch import Tensor, dtype

from aiodist.backends.base import DTYPES
from aiodist.backends.inplace import flat, numbers_of
from aiodist.types import ReduceOp

__all__ = ["MOVES", "NATIVE_OPS", "REDUCTIONS", "as_numbers", "supports"]

MOVES = frozenset({"broadcast", "allgather", "alltoall", "exchange"})
REDUCTIONS = frozenset({"allreduce", "reduce", "reduce_scatter"})

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint32, torch.uint64})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_FLOATS = frozenset({torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_TAKES = {
    ReduceOp.SUM: _INTEGERS | _FLOATS | _COMPLEX,
    ReduceOp.MEAN: _FLOATS | _COMPLEX,
    ReduceOp.PROD: _INTEGERS | _FLOATS,
    # Nothing is rounded here, so 16-bit floats may stay what they are.
    ReduceOp.MIN: _INTEGERS | _FLOATS | _HALVES | {torch.bool},
    ReduceOp.MAX: _INTEGERS | _FLOATS | _HALVES | {torch.bool},
    # Of bytes that are 0 or 1: the smaller, the larger.
    ReduceOp.BAND: frozenset({torch.bool}),
    ReduceOp.BOR: frozenset({torch.bool}),
}
NATIVE_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.MEAN: "sum",
    ReduceOp.PROD: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "min",
    ReduceOp.BOR: "max",
}
"""What NCCL calls an operator, given numbers of `as_numbers`; a mean is a sum until it is divided."""


def supports(operation: str, kind: dtype, op: ReduceOp | None) -> bool:
    """Return True for what `NcclNative` does as the contract says; see [Note: nccl] for what it leaves out."""
    if operation in MOVES:
        return kind in DTYPES
    return operation in REDUCTIONS and op is not None and kind in _TAKES.get(op, ())


def as_numbers(t: Tensor) -> Tensor:
    """Return what is reduced for `t`: a flat view, bool as bytes and complex numbers as pairs."""
    numbers = numbers_of(t)
    return flat(torch.view_as_real(numbers)) if numbers.is_complex() else numbers
