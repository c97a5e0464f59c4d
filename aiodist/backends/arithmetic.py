"""The arithmetic of reductions: dtypes of an operator, partial results, writes to tensors of any torch mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from aiodist.streams.memory import dtype_name, flat, numbers_of
from aiodist.types import ReduceOp

_as_it_is = nullcontext()

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_FLOATS = _HALVES | {torch.float32, torch.float64}
_COMPLEX = frozenset({torch.complex64, torch.complex128})
SUPPORTED = _INTEGERS | _FLOATS | _COMPLEX | {torch.bool}
"""Dtypes of a collective."""
INEXACT = _FLOATS | _COMPLEX
"""Dtypes whose sums depend on the order."""
CONVERTED = _HALVES | {torch.bool}
"""Dtypes whose partial results have another dtype."""

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

FUNCTIONS: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PROD: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
"""Functions of two tensors that return the result, in `out=` or in a new tensor."""

COMBINE: dict[ReduceOp, Callable[[Tensor, Tensor], object]] = {
    ReduceOp.SUM: Tensor.add_,
    ReduceOp.PROD: Tensor.mul_,
    ReduceOp.MIN: lambda into, t: torch.minimum(into, t, out=into),
    ReduceOp.MAX: lambda into, t: torch.maximum(into, t, out=into),
    ReduceOp.BAND: Tensor.bitwise_and_,
    ReduceOp.BOR: Tensor.bitwise_or_,
    ReduceOp.BXOR: Tensor.bitwise_xor_,
}
"""Functions that combine the second tensor into the first. A mean is a sum with a later division."""


def check_op(op: str, kind: torch.dtype) -> ReduceOp:
    """Return `op` as a ReduceOp, or raise ValueError for an unknown one, TypeError for a wrong `kind`."""
    try:
        known = ReduceOp(op)
    except ValueError:
        raise ValueError(f"op={op!r}: expected one of {', '.join(ReduceOp)}") from None
    if kind not in TAKES[known]:
        takes = ", ".join(sorted(map(dtype_name, TAKES[known])))
        raise TypeError(f"{known} of {dtype_name(kind)}: {known} takes {takes}")
    return known


def writable(t: Tensor) -> AbstractContextManager[object]:
    """Return a context manager that allows writes to `t`. An inference tensor requires inference mode."""
    return torch.inference_mode() if t.is_inference() else _as_it_is


def copy(into: Tensor, t: Tensor) -> None:
    """Copy `t` to `into`. Autograd does not record the write."""
    with writable(into):
        into.data.copy_(t.detach())  # `data` has a version of its own, see `Mark`


def combine(into: Tensor, t: Tensor, op: ReduceOp) -> None:
    """Combine `t` into `into`, elementwise, in place."""
    with writable(into):
        COMBINE[op](into.data, t)


def combined(ts: Sequence[Tensor], op: ReduceOp, device: torch.device, out: Tensor | None = None) -> Tensor:
    """Return the combination of `ts` in the fixed order (`schedules.plan.combined`), in the dtype of partial results.

    `ts` are flat, and only read, unless one is `out`, the memory of the result. The combination of one tensor is a view
    if possible.
    """
    if len(ts) == 1:
        return to_wire(ts[0].to(device))
    half = 1 << (len(ts) - 1).bit_length() - 1
    left, right = combined(ts[:half], op, device), combined(ts[half:], op, device)
    result = left if out is None and half > 1 else out
    with _as_it_is if result is None else writable(result):
        return FUNCTIONS[op](left, right, out=None if result is None else result.data)


def divide(t: Tensor, ranks: int) -> None:
    """Divide a sum by the number of ranks, in place."""
    with writable(t):
        t = t.data
        # Complex division, and division by a number on a device, multiply by a reciprocal, which rounds twice.
        reals = torch.view_as_real(t) if t.is_complex() else t
        reals.div_(ranks if t.is_cpu else torch.full((), ranks, dtype=reals.dtype, device=t.device))


def wire_op(op: ReduceOp) -> ReduceOp:
    """Return the operator of partial results, which is sum for a mean, since `from_wire` divides."""
    return ReduceOp.SUM if op is ReduceOp.MEAN else op


def to_wire(t: Tensor) -> Tensor:
    """Return flat `t` in the dtype of partial results, bool as bytes and 16-bit floats in float32, to round once.

    The result is a view of `t` if possible, else a copy.
    """
    numbers = numbers_of(t)
    return numbers.float() if t.dtype in _HALVES else numbers


def from_wire(wire: Tensor, t: Tensor, op: ReduceOp, ranks: int) -> None:
    """Write the reduced `wire` into `t`, unless `wire` is a view of `t`, after the division of a mean."""
    if op is ReduceOp.MEAN:
        divide(wire, ranks)
    if wire.data_ptr() != t.data_ptr():
        copy(flat(t), wire)
