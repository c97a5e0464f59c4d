"""Writes to the user's tensors, from any thread and for tensors of any torch mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from aiodist.streams.memory import bytes_of, flat, numbers_of
from aiodist.types import ReduceOp

__all__ = ["COMBINE", "FUNCTIONS", "bytes_of", "combine", "copy", "divide", "flat", "numbers_of", "writable"]

_as_it_is = nullcontext()

FUNCTIONS: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PROD: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
"""Functions of two tensors that return a third one, `out=` or a new one."""

COMBINE: dict[ReduceOp, Callable[[Tensor, Tensor], object]] = {
    ReduceOp.SUM: lambda into, t: into.add_(t),
    ReduceOp.PROD: lambda into, t: into.mul_(t),
    ReduceOp.MIN: lambda into, t: torch.minimum(into, t, out=into),
    ReduceOp.MAX: lambda into, t: torch.maximum(into, t, out=into),
    ReduceOp.BAND: lambda into, t: into.bitwise_and_(t),
    ReduceOp.BOR: lambda into, t: into.bitwise_or_(t),
    ReduceOp.BXOR: lambda into, t: into.bitwise_xor_(t),
}
"""Functions that combine the second tensor into the first; a mean is a sum that is divided later."""


def writable(t: Tensor) -> AbstractContextManager[object]:
    """Return a context manager that allows writes to `t`: an inference tensor requires inference mode."""
    return torch.inference_mode() if t.is_inference() else _as_it_is


def copy(into: Tensor, t: Tensor) -> None:
    """Copy `t` to `into`; autograd does not record it."""
    with writable(into):
        into.detach().copy_(t.detach())


def combine(into: Tensor, t: Tensor, op: ReduceOp) -> None:
    """Combine `t` into `into`, elementwise, in place."""
    with writable(into):
        COMBINE[op](into, t)


def divide(t: Tensor, ranks: int) -> None:
    """Divide a sum by the number of ranks, in place."""
    with writable(t):
        t = t.detach()
        # Complex division multiplies by a reciprocal, which rounds twice.
        (torch.view_as_real(t) if t.is_complex() else t).div_(ranks)
