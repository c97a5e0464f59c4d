"""Tensors as the bytes that travel."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["empty", "pieces"]

_PIECE_BYTES = 1 << 30


def empty(nbytes: int) -> Tensor:
    """Return new memory."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def pieces(flat: Tensor) -> list[Tensor]:
    """Return `flat` in pieces whose counts every library can hold."""
    most = _PIECE_BYTES // flat.element_size()
    return [flat[start : start + most] for start in range(0, max(1, flat.numel()), most)]
