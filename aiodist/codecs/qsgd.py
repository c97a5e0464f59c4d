"""A few bits for each element, rounded at random so that the mean is right."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from aiodist.codecs.base import Kind, part, wide
from aiodist.codecs.gradients import DrawingCodec


@dataclass(frozen=True)
class QSGD(DrawingCodec):
    """Stochastic rounding to s = 2**(bits-1) - 1 levels of either sign, for each bucket of elements: unbiased.

    Each `bucket` of elements has a scale, its largest magnitude m; an element v becomes m/s times one of the two
    integers beside v*s/m, the nearer the likelier, so that its expectation is v (up to 2**-24 m/s, and the rounding of
    the dtype itself). The error of an element is below m/s. `bits` is 2, 4 or 8: s = 1, 7 or 127. The code has
    16 + numel*bits/8 bytes and 4 for each bucket (8 for float64): for 4 bits and buckets of 512 an eighth of float32.
    A bucket that holds NaN or an infinity decodes to NaN throughout; other buckets are not touched by it.

    The scales are part of the seed (`DrawingCodec`), so that ranks with one `seed` and different tensors round
    independently, and their errors average out. `decode` raises `ValueError` also for bits that stand for no level.
    Cost: one random number for each element and about ten passes to encode, six to decode.

    Source: Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, "QSGD", arXiv:1610.02132, with buckets that are scaled by the
    maximum, not by the 2-norm. So with 4 or 8 bits a residual (`ErrorFeedback`) stays below 1/(s-1) of the largest
    input.
    """

    kind: ClassVar[Kind] = Kind.QSGD
    unbiased: ClassVar[bool] = True
    bits: int = 4
    bucket: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits={self.bits}: expected one of 2, 4, 8")
        if self.bucket < 1:
            raise ValueError(f"bucket={self.bucket}: expected at least 1 element")

    @property
    def levels(self) -> int:
        """The s of the paper: how many levels there are above zero."""
        return (1 << (self.bits - 1)) - 1

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """See `FloatCodec`."""
        return -(-numel // self.bucket) * wide(dtype).itemsize - (-numel * self.bits // 8)

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
        """See `FloatCodec`."""
        numel, scale = t.numel(), wide(t.dtype)
        if numel:
            width = min(self.bucket, numel)
            rows = torch.zeros(-(-numel // width) * width, dtype=scale, device="cpu")  # zeros fill the last bucket
            rows[:numel].copy_(t)
            rows = rows.view(-1, width)
            largest = rows.abs().amax(1)
            payload[: largest.nbytes].copy_(largest.view(torch.uint8))
            _pack(self._rounded(rows, largest, number)[:numel], self.bits, payload[largest.nbytes :])
        return self.bits

    def read(self, payload: Tensor, dtype: torch.dtype, numel: int, param: int) -> Tensor:
        """See `FloatCodec`."""
        if param != self.bits:
            raise ValueError(f"a code by QSGD with bits={param}: expected {self}")
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        scale, width = wide(dtype), min(self.bucket, numel)
        buckets = -(-numel // width)
        levels = _unpack(payload[buckets * scale.itemsize :], self.bits, numel)
        if int(levels.amax()) > 2 * self.levels:
            raise ValueError(f"a code by QSGD with level {int(levels.amax())}: expected at most {2 * self.levels}")
        rows = torch.empty(buckets * width, dtype=scale, device="cpu")
        rows[:numel].copy_(levels).sub_(self.levels).div_(self.levels)
        rows.view(buckets, width).mul_(part(payload, 0, buckets, scale).unsqueeze(1))
        return rows[:numel].to(dtype, copy=numel < rows.numel())

    def _rounded(self, rows: Tensor, largest: Tensor, number: int) -> Tensor:
        """Return the levels, flat: from 0, which stands for -s, to 2s."""
        mixed = np.random.SeedSequence((self.seed, number, zlib.crc32(largest.numpy().data)))
        seed = int(mixed.generate_state(1, np.uint64)[0] >> np.uint64(1))
        y = rows.div_(torch.where(largest == 0, 1.0, largest).unsqueeze(1)).mul_(self.levels).view(-1)
        if not bool(largest.sum().isfinite()):
            y.nan_to_num_(0.0, 0.0, 0.0)  # the scale makes NaN of it
        below = y.floor()
        drawn = torch.rand(y.numel(), dtype=y.dtype, device="cpu", generator=torch.Generator().manual_seed(seed))
        return below.add_(drawn < y.sub_(below)).add_(self.levels).to(torch.uint8)


@dataclass(frozen=True)
class TernGrad(QSGD):
    """Minus, zero or plus the largest magnitude of each `bucket` of elements, at random so that the mean is right.

    It is `QSGD` with one level of either sign: see there. Source: Wen et al. 2017, "TernGrad", arXiv:1705.07878; the
    scales are of buckets, not of layers, and nothing is clipped, which would be biased.
    """

    bits: int = field(default=2, init=False, repr=False)


def _pack(levels: Tensor, bits: int, packed: Tensor) -> None:
    """Write `levels` to `packed`: byte i has element i in its lowest bits, then i + n, i + 2n, where n is its length.

    So each plane is contiguous, and the kernels are vectorised.
    """
    n = packed.numel()
    packed.copy_(levels[:n])
    for plane in range(1, 8 // bits):
        found = levels[plane * n : (plane + 1) * n]
        packed[: found.numel()].bitwise_or_(found << (plane * bits))


def _unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    planes = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.cat(planes)[:numel]
