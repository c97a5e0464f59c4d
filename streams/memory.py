"""Contiguous tensors as memory."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch._C import _storage_Use_Count
from torch.multiprocessing.reductions import StorageWeakRef


def dtype_name(kind: torch.dtype) -> str:
    """Return "float32" for `torch.float32`, for messages and comparisons between ranks."""
    return str(kind).removeprefix("torch.")


def flat(t: Tensor) -> Tensor:
    """Return contiguous `t` as one dimension of the same memory, without a history.

    A tensor of one element or none is contiguous with any strides, but torch refuses many views of it: the column of a
    batch of one may have stride 5, an expanded scalar stride 0.

    >>> column = torch.ones(1, 5)[:, 0]
    >>> column.is_contiguous(), column.stride(), flat(column).stride()
    (True, (5,), (1,))
    """
    if t.requires_grad:
        t = t.detach()
    count = t.numel()
    if count <= 1:
        return t.as_strided((count,), (1,))
    return t if t.dim() == 1 else t.view(-1)


def bytes_of(t: Tensor) -> Tensor:
    """Return the memory of contiguous `t` as flat bytes."""
    return flat(t).view(torch.uint8)


def numbers_of(t: Tensor) -> Tensor:
    """Return `flat(t)`, with bool as bytes, for arithmetic and NumPy."""
    return bytes_of(t) if t.dtype is torch.bool else flat(t)


def shares_memory(t: Tensor) -> bool:
    """Return True if other tensors use the storage of `t`, also tensors that torch calls no views. Cost: 2 us."""
    return _uses(t) > _ALONE


def _uses(t: Tensor) -> int:
    return _storage_Use_Count(StorageWeakRef(t.untyped_storage()).cdata)


_ALONE: Final = _uses(torch.empty(1, device="cpu"))
