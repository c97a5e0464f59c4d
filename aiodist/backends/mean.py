"""A mean is a sum on the way, which is divided in the end."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["divide"]


def divide(t: Tensor, ranks: int) -> None:
    """Make the mean of a sum over `ranks`, in place."""
    t = t.detach()
    # Complex division multiplies by a reciprocal, which rounds twice.
    (torch.view_as_real(t) if t.is_complex() else t).div_(ranks)
