"""Tensors as c10d's callers bring them, and as communicators take them: flat, dense, of dtypes that both know."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiodist.collectives.arithmetic import SUPPORTED


def flat(t: Tensor) -> Tensor:
    """Return the memory of `t` as one dimension; raise ValueError where it has gaps.

    A tensor whose dimensions lie in another order (channels last) goes too: it has to lie alike on all ranks.
    """
    t = t.detach() if t.requires_grad else t
    if t.is_contiguous():
        return t if t.dim() == 1 else t.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(t):
        return t.as_strided((t.numel(),), (1,))
    raise ValueError(f"a tensor of shape {list(t.shape)} has strides {t.stride()}: expected contiguous memory")


def movable(t: Tensor) -> Tensor:
    """Return `t` flat, as bytes where its dtype is none that communicators know: for what only moves it."""
    t = flat(t)
    return t if t.dtype in SUPPORTED else t.view(torch.uint8)


def together(ts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors that are alike and lie one behind the other in one storage as one flat tensor, else None."""
    first = ts[0]
    start, nbytes, storage = first.data_ptr(), first.nbytes, first.untyped_storage().data_ptr()
    for i, t in enumerate(ts):
        if t.data_ptr() != start + i * nbytes or t.nbytes != nbytes or t.dtype is not first.dtype:
            return None
        if t.untyped_storage().data_ptr() != storage or not t.is_contiguous():
            return None
    return first.detach().as_strided((len(ts) * first.numel(),), (1,))


def joined(ts: Sequence[Tensor]) -> Tensor:
    """Return the elements of all `ts` in one flat tensor, which is a copy only where they do not lie so already."""
    lying = together(ts)
    return torch.cat([t.detach().reshape(-1) for t in ts]) if lying is None else lying


def room_for(ts: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Return one flat tensor for what is to end in `ts`, and whether it has to be copied there."""
    lying = together(ts)
    if lying is not None:
        return lying, False
    return ts[0].new_empty(sum(t.numel() for t in ts)), True


def deal(room: Tensor, ts: Sequence[Tensor]) -> None:
    """Copy from `room` what belongs into each of `ts`."""
    for t, part in zip(ts, room.split([t.numel() for t in ts]), strict=True):
        t.detach().copy_(part.view(t.shape))


def blocks(t: Tensor, sizes: Sequence[int], ranks: int) -> list[Tensor]:
    """Return the flat blocks of `t` for each rank: `sizes` rows of it, or even blocks where there are none."""
    line = movable(t)
    if not sizes:
        return list(line.split(line.numel() // ranks)) if line.numel() else [line] * ranks
    if sum(sizes) != t.shape[0]:
        raise ValueError(f"split sizes {list(sizes)} add up to {sum(sizes)}: expected the {t.shape[0]} rows of dim 0")
    row = line.numel() // max(1, t.shape[0])
    return list(line.split([size * row for size in sizes]))
