"""The arithmetic of reductions: dtypes of an operator, storage and rounding of partial results."""

from __future__ import annotations

import torch
from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.backends.inplace import combine, copy, divide, flat, numbers_of
from aiodist.types import ReduceOp

__all__ = ["SUPPORTED", "check_op", "combine", "from_wire", "to_wire", "wire_op"]

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _HALVES | {torch.float32, torch.float64}
_COMPLEX = frozenset({torch.complex64, torch.complex128})
SUPPORTED = _INTEGERS | _FLOATS | _COMPLEX | {torch.bool}
"""Dtypes of a collective."""

TAKES = {
    ReduceOp.SUM: _INTEGERS | _FLOATS | _COMPLEX,
    ReduceOp.MEAN: _FLOATS | _COMPLEX,
    ReduceOp.PROD: _INTEGERS | _FLOATS | _COMPLEX,
    ReduceOp.MIN: _INTEGERS | _FLOATS | {torch.bool},
    ReduceOp.MAX: _INTEGERS | _FLOATS | {torch.bool},
    ReduceOp.BAND: _INTEGERS | {torch.bool},
    ReduceOp.BOR: _INTEGERS | {torch.bool},
    ReduceOp.BXOR: _INTEGERS | {torch.bool},
}


def check_op(op: str, kind: torch.dtype) -> ReduceOp:
    """Return `op` as a ReduceOp; raise ValueError for an unknown one, TypeError if it does not take `kind`."""
    try:
        known = ReduceOp(op)
    except ValueError:
        raise ValueError(f"op={op!r}: expected one of {', '.join(ReduceOp)}") from None
    if kind not in TAKES[known]:
        takes = ", ".join(sorted(map(dtype_name, TAKES[known])))
        raise TypeError(f"{known} of {dtype_name(kind)}: {known} takes {takes}")
    return known


def wire_op(op: ReduceOp) -> ReduceOp:
    """Return the operator of partial results: sum for a mean, which `from_wire` divides."""
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def to_wire(t: Tensor) -> Tensor:
    """Return `t` in the form of partial results: flat, bool as bytes, 16-bit floats in float32 to round once.

    The result is a view of `t` if possible, else a copy.
    """
    numbers = numbers_of(t)
    return numbers.float() if t.dtype in _HALVES else numbers


def from_wire(wire: Tensor, t: Tensor, op: ReduceOp, ranks: int) -> None:
    """Write the reduced `wire` into `t`, unless it is a view of it; a mean is divided first."""
    if op is ReduceOp.MEAN:
        divide(wire, ranks)
    if wire.data_ptr() != t.data_ptr():
        copy(flat(t), wire)
