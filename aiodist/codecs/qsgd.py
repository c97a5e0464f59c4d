"""A few bits for each element, rounded at random so that the mean is right."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from aiodist.codecs.base import FLOATS, Head, Kind, check_input, create, parse, part, wide
from aiodist.codecs.gradients import GradientCodec

_BITS = (2, 4, 8)


@dataclass(frozen=True)
class QSGD(GradientCodec):
    """Stochastic rounding to s = 2**(bits-1) - 1 levels of either sign, for each bucket of elements: unbiased.

    Each `bucket` of elements has a scale, its largest magnitude m; an element v becomes m/s times one of the two
    integers beside v*s/m, the nearer the likelier, so that its expectation is v (up to 2**-24 m/s, and the rounding of
    the dtype itself). The error of an element is below m/s. `bits` is 2, 4 or 8: s = 1, 7 or 127; `bucket` at most
    2**31 - 1. The code has 16 + numel*bits/8 bytes and 4 for each bucket (8 for float64): for 4 bits and buckets of 512
    an eighth of float32. Takes float16, bfloat16, float32 and float64, any other dtype is a `TypeError`.

    Randomness: each call draws anew; the same `seed` and the same calls in the same order give the same codes, also in
    a copy, which begins at the first call. Exchanges of gradients draw by their number, so training that goes on from
    a checkpoint draws what it would have drawn. The scales are part of the seed, so that ranks with one `seed` and
    different tensors round independently, and their errors average out.

    A bucket that holds NaN or an infinity decodes to NaN throughout; other buckets are not touched by it.

    `decode` raises `ValueError` for a code of other dtype, numel, bits, bucket or length, or with bits that stand for
    no level. Cost: one random number for each element and about ten passes to encode, six to decode.

    Source: Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, "QSGD", arXiv:1610.02132, with buckets that are scaled by the
    maximum, not by the 2-norm. So with 4 or 8 bits a residual (`ErrorFeedback`) stays below 1/(s-1) of the largest
    input, and differences (`Outgoing`) shrink at least s times a round.
    """

    unbiased: ClassVar[bool] = True
    bits: int = 4
    bucket: int = 512
    seed: int = 0
    _calls: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ValueError(f"bits={self.bits}: expected one of {', '.join(map(str, _BITS))}")
        if not 0 < self.bucket < 1 << 31:
            raise ValueError(f"bucket={self.bucket}: expected from 1 to 2**31 - 1 elements")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed}: expected at least 0 and less than 2**63")

    def __reduce__(self) -> tuple[type[QSGD], Any]:
        return type(self), (self.bits, self.bucket, self.seed)

    @property
    def levels(self) -> int:
        """The s of the paper: how many levels there are above zero."""
        return (1 << (self.bits - 1)) - 1

    def encode(self, t: Tensor) -> Tensor:
        """Return the code of `t`, flat; raises `TypeError` unless it holds floats."""
        return self.encode_next(t, next(self._calls))  # atomic: `itertools.count` is C

    def encode_next(self, t: Tensor, number: int) -> Tensor:
        """See `GradientCodec`."""
        t = check_input(t, "QSGD", FLOATS)
        numel, scale = t.numel(), wide(t.dtype)
        buckets, width = self._cut(numel)
        head = Head(Kind.QSGD, t.dtype, numel, extra=self.bits, param=self.bucket)
        code, payload = create(head, buckets * scale.itemsize + self._packed(numel))
        if not numel:
            return code
        rows = torch.zeros(buckets * width, dtype=scale, device="cpu")  # what is missing from the last bucket is zero
        rows[:numel].copy_(t)
        rows = rows.view(buckets, width)
        largest = rows.abs().amax(1)
        payload[: buckets * scale.itemsize].copy_(largest.view(torch.uint8))
        levels = self._rounded(rows, largest, number)[:numel]
        _pack(levels, self.bits, payload[buckets * scale.itemsize :])
        return code

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return `numel` elements of `dtype`; raises `ValueError` for a code that does not fit."""
        scale = wide(dtype)
        buckets, width = self._cut(numel)
        head, payload = parse(code, Kind.QSGD, dtype, numel, buckets * scale.itemsize + self._packed(numel))
        if (head.extra, head.param) != (self.bits, self.bucket):
            raise ValueError(f"a code by QSGD with bits={head.extra}, bucket={head.param}: expected {self}")
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        levels = _unpack(payload[buckets * scale.itemsize :], self.bits, numel)
        if int(levels.amax()) > 2 * self.levels:
            raise ValueError(f"a code by QSGD with level {int(levels.amax())}: expected at most {2 * self.levels}")
        rows = torch.empty(buckets * width, dtype=scale, device="cpu")
        rows[:numel].copy_(levels).sub_(self.levels).div_(self.levels)
        rows.view(buckets, width).mul_(part(payload, 0, buckets, scale).unsqueeze(1))
        return rows[:numel].to(dtype, copy=numel < rows.numel())

    def _cut(self, numel: int) -> tuple[int, int]:
        """Return how many buckets there are, and how many elements each has."""
        return -(-numel // self.bucket), min(self.bucket, numel)

    def _packed(self, numel: int) -> int:
        return -(-numel * self.bits // 8)

    def _rounded(self, rows: Tensor, largest: Tensor, number: int) -> Tensor:
        """Return the levels, flat: from 0, which stands for -s, to 2s."""
        y = rows.div_(torch.where(largest == 0, 1.0, largest).unsqueeze(1)).mul_(self.levels).view(-1)
        if not bool(largest.sum().isfinite()):
            y.nan_to_num_(0.0, 0.0, 0.0)  # the scale makes NaN of it
        below = y.floor()
        up = torch.rand(y.numel(), dtype=y.dtype, device="cpu", generator=self._generator(largest, number)) < y.sub_(
            below
        )
        return below.add_(up).add_(self.levels).to(torch.uint8)

    def _generator(self, largest: Tensor, number: int) -> torch.Generator:
        mixed = np.random.SeedSequence((self.seed, number, zlib.crc32(largest.numpy().data)))
        return torch.Generator(device="cpu").manual_seed(int(mixed.generate_state(1, np.uint64)[0] >> np.uint64(1)))


@dataclass(frozen=True)
class TernGrad(QSGD):
    """Minus, zero or plus the largest magnitude of each `bucket` of elements, at random so that the mean is right.

    It is `QSGD` with one level of either sign: see there. Source: Wen et al. 2017, "TernGrad", arXiv:1705.07878; the
    scales are of buckets, not of layers, and nothing is clipped, which would be biased.
    """

    bits: int = field(default=2, init=False, repr=False)

    def __reduce__(self) -> tuple[type[QSGD], Any]:
        return type(self), (self.bucket, self.seed)


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
