"""Sums of 16-bit floats that travel as such, and are added up in float32."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiodist.codecs import Gather, NarrowSum, RoundingLoss
from aiodist.codecs.base import STRETCH


class Swap(NamedTuple):
    """Give each rank between hosts its part of `tensor`, which has as many; the answer is this rank's part of each."""

    tensor: Tensor


def narrow_sum(request: NarrowSum, rank: int, ranks: int) -> Generator[Gather | Swap, Any, RoundingLoss]:
    """Add up 16-bit floats as `NarrowSum` says, in two collectives. (An allreduce sends them as float32.)

    Each rank sums a part, which is rounded for the others. Two send each other all, which is as many bytes: nothing is
    rounded, and none waits for the second half.
    """
    t, out, factor = request
    if ranks <= 2:
        codes = (yield Gather(t)) if ranks == 2 else [t]
        room = torch.empty(min(STRETCH, out.numel()), dtype=out.dtype)
        for to, first, *others in zip(*(part.split(STRETCH) for part in (out, *codes)), strict=True):
            to.copy_(first)
            for other in others:
                to.add_(room[: to.numel()].copy_(other))  # half the time of a sum of two dtypes
            if factor != 1.0:
                to.mul_(factor)
        return RoundingLoss(0, out[:0])
    part = -(-t.numel() // ranks)
    padded = torch.zeros(ranks * part, dtype=t.dtype)
    padded[: t.numel()].copy_(t)
    theirs = yield Swap(padded)
    summed = theirs.view(ranks, part).sum(0, dtype=torch.float32)
    narrow = summed.to(t.dtype)
    for to, values in zip(out.split(part), (yield Gather(narrow)), strict=False):
        to.copy_(values[: to.numel()]).mul_(factor)
    start = min(rank * part, t.numel())
    return RoundingLoss(start, summed.sub_(narrow)[: t.numel() - start])
