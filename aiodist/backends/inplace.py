"""Writing to the user's tensors, whatever torch mode they were made in and whoever resumes the operation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["copy", "divide", "writable"]

_as_it_is = nullcontext()


def writable(t: Tensor) -> AbstractContextManager[object]:
    """Return a block in which `t` may be written to: what was made in inference mode demands that mode again."""
    return torch.inference_mode() if t.is_inference() else _as_it_is


def copy(into: Tensor, t: Tensor) -> None:
    """Copy `t` over `into`, without a history."""
    with writable(into):
        into.detach().copy_(t.detach())


def divide(t: Tensor, ranks: int) -> None:
    """Make the mean of a sum over `ranks`, in place."""
    with writable(t):
        t = t.detach()
        # Complex division multiplies by a reciprocal, which rounds twice.
        (torch.view_as_real(t) if t.is_complex() else t).div_(ranks)
