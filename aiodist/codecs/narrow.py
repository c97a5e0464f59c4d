"""Fewer bits for each element: sixteen, eight, a few, or one."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.codecs.base import (
    CHUNK,
    SAFE_POWER,
    STRETCH,
    Kind,
    exponent_of,
    parse,
    part,
    saturated,
    times_power,
    wide,
)
from aiodist.codecs.gradients import DrawingCodec, Exchange, FloatCodec, Gradients, NarrowSum, RoundingLoss, Sum

_BIAS = 1 << 16  # exponents are sent as unsigned numbers
_LARGEST = 1200  # float64's are between -1074 and 1023
_TOP = 15  # sent values are below 2**15, so that rounding up does not overflow
_BELOW = 2.0**15 - 2.0**4  # the last float16 below
_LEVELS = 127  # of Int8, of either sign


# --- sixteen bits -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Half(FloatCodec):
    """float16, with one exponent for the whole tensor: 16 + 2 numel bytes.

    The tensor is multiplied with the power of two that brings its largest finite element below 2**15, so nothing
    overflows: elements have a relative error of at most 2**-11 down to 2**-28 of the largest one, and below that an
    absolute one of 2**-39 of it. (A float16 tensor travels as it is.) NaN stays NaN, infinities stay infinities, the
    sign of zero is kept.

    In collectives the ranks agree on one exponent, with which their sum is in the range, too. They add up in float32,
    and from three ranks on the sum is rounded once more. The residual has all these losses. Cost: three passes to
    encode, two to decode. The scaling is that of mixed-precision training, applied to each message: Micikevicius et al.
    2018, arXiv:1710.03740.
    """

    kind: ClassVar[Kind] = Kind.HALF

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
        exponent = 0 if t.dtype is torch.float16 else exponent_of(t, _TOP)
        payload.view(torch.float16).copy_(t if t.dtype is torch.float16 else _scaled(t, exponent))
        return exponent + _BIAS

    def read(self, payload: Tensor, dtype: torch.dtype, numel: int, param: int) -> Tensor:
        exponent = param - _BIAS
        if abs(exponent) > _LARGEST or (dtype is torch.float16 and exponent):
            raise ValueError(f"a code by Half with exponent {exponent}: {dtype_name(dtype)} has none such")
        halves = part(payload, 0, numel, torch.float16)
        return halves.clone() if dtype is torch.float16 else times_power(halves, -exponent, to=wide(dtype)).to(dtype)

    def exchange(self, gradients: Gradients, kept: dict[str, Tensor]) -> Exchange:
        """Add up with an exponent that all ranks agree on, so that the sum does not overflow."""
        total, room = gradients.total, (gradients.size - 1).bit_length()
        mine = exponent_of(total, _TOP) if bool(total.any()) else _LARGEST
        scale = torch.tensor([-mine], dtype=torch.int32, device="cpu")
        yield Sum(scale, "max")
        exponent = -int(scale) - room
        narrow = torch.empty(total.numel(), dtype=torch.float16, device="cpu")
        for values, to in zip(total.split(STRETCH), narrow.split(STRETCH), strict=True):
            to.copy_(times_power(values, exponent))
            if gradients.feedback:
                values.sub_(times_power(to, -exponent, to=total.dtype))
        usual = abs(exponent) <= SAFE_POWER
        lost = yield NarrowSum(narrow, gradients.out, 2.0**-exponent * gradients.factor if usual else 1.0)
        if gradients.feedback:
            _account_for(lost, total, -exponent)
        if not usual:
            gradients.out.copy_(times_power(gradients.out, -exponent)).mul_(gradients.factor)


@dataclass(frozen=True)
class BFloat16(FloatCodec):
    """bfloat16: 16 + 2 numel bytes, eight bits of each element, over the range of float32.

    The relative error of an element is at most 2**-8; NaN stays NaN, infinities stay infinities, and values from
    3.3962e38 on become one. In collectives the ranks add up in float32; from three ranks on the sum is rounded once
    more, and the residual has that loss too. Cost: one pass each way. Source: Kalamkar et al. 2019,
    arXiv:1905.12322.
    """

    kind: ClassVar[Kind] = Kind.BFLOAT16
    elementwise: ClassVar[bool] = True

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
        payload.view(torch.bfloat16).copy_(t)
        return 0

    def read(self, payload: Tensor, dtype: torch.dtype, numel: int, param: int) -> Tensor:
        narrow = part(payload, 0, numel, torch.bfloat16)
        return saturated(narrow.float(), dtype) if dtype is torch.float16 else narrow.to(dtype, copy=True)

    def exchange(self, gradients: Gradients, kept: dict[str, Tensor]) -> Exchange:
        """Add up the codes of all ranks."""
        narrow = torch.empty(gradients.total.numel(), dtype=torch.bfloat16, device="cpu")
        room = torch.empty(min(STRETCH, narrow.numel()), dtype=gradients.total.dtype, device="cpu")
        for values, to in zip(gradients.total.split(STRETCH), narrow.split(STRETCH), strict=True):
            to.copy_(values)
            if gradients.feedback:
                values.sub_(room[: to.numel()].copy_(to))  # half the time of a difference of two dtypes
        lost = yield NarrowSum(narrow, gradients.out, gradients.factor)
        if gradients.feedback:
            _account_for(lost, gradients.total, 0)


def _account_for(lost: RoundingLoss, total: Tensor, exponent: int) -> None:
    """Add this rank's part of the loss of the sum to the residual, times 2**exponent."""
    total[lost.start :][: lost.rest.numel()].add_(times_power(lost.rest, exponent, to=total.dtype))


def _scaled(t: Tensor, exponent: int) -> Tensor:
    """Return t * 2**exponent; finite values do not round to a float16 that overflows the dtype when decoded."""
    scaled = times_power(t, exponent)
    if exponent > _TOP - math.frexp(torch.finfo(t.dtype).max)[1]:
        return scaled
    return torch.where(scaled.isinf(), scaled, scaled.clamp(-_BELOW, _BELOW))


# --- eight bits or one, and a scale for each chunk --------------------------------------------------------------------


class _Scaled(FloatCodec):
    """Base of both codecs: the scales of all chunks, then the bytes of each. One pass over memory each way."""

    bits: ClassVar[int]

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return -(-numel // CHUNK) * wide(dtype).itemsize - (-numel * self.bits // 8)

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
        scales, chunks = self._parts(payload, t.numel(), wide(t.dtype))
        for i, (values, to) in enumerate(zip(t.split(CHUNK), chunks, strict=True) if t.numel() else ()):
            scales[i] = self.squeeze(values.to(scales.dtype), to)
        return 0

    def read(self, payload: Tensor, dtype: torch.dtype, numel: int, param: int) -> Tensor:
        decoded = torch.empty(numel, dtype=dtype, device="cpu")
        for chunk, scale, to in self._chunks(payload, decoded):
            to.copy_(self.spread(chunk, scale, wide(dtype))[: to.numel()])
        return decoded

    def add(self, code: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        for chunk, scale, to in self._chunks(self._payload(code, out), out):
            to.add_(self.spread(chunk, alpha * scale, wide(out.dtype))[: to.numel()])

    def combine(self, codes: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None:
        """Combine a chunk of all codes at a time, in one pass over `out`."""
        for chunks in zip(*(self._chunks(self._payload(code, out), out) for code in codes), strict=True):
            to = chunks[0][2]
            total = self.joined([(chunk, factor * scale) for chunk, scale, _ in chunks], wide(out.dtype))
            to.copy_(total[: to.numel()])

    def joined(self, chunks: Sequence[tuple[Tensor, float]], dtype: torch.dtype) -> Tensor:
        """Return the combined chunk of all ranks."""
        total = self.spread(*chunks[0], dtype)
        for chunk, scale in chunks[1:]:
            total.add_(self.spread(chunk, scale, dtype))
        return total

    def squeeze(self, values: Tensor, to: Tensor) -> float:
        """Write the bytes of a chunk to `to`; return its scale, or NaN if an element is not finite."""
        raise NotImplementedError

    def spread(self, chunk: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Return the values of a chunk, in new memory; maybe a few more."""
        raise NotImplementedError

    def _payload(self, code: Tensor, out: Tensor) -> Tensor:
        return parse(code, self.kind, out.dtype, out.numel(), self.nbytes(out.numel(), out.dtype))[1]

    def _chunks(self, payload: Tensor, like: Tensor) -> Iterator[tuple[Tensor, float, Tensor]]:
        """Yield the bytes of each chunk, its scale, and its part of `like`."""
        scales, chunks = self._parts(payload, like.numel(), wide(like.dtype))
        return zip(chunks, scales.tolist(), like.split(CHUNK), strict=False)

    def _parts(self, payload: Tensor, numel: int, scale: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
        count = -(-numel // CHUNK)
        return part(payload, 0, count, scale), payload[count * scale.itemsize :].split(CHUNK * self.bits // 8)


@dataclass(frozen=True)
class Int8(_Scaled):
    """Each 65,536 elements share a scale, their largest magnitude m.

    An element is off by at most m/254 and the rounding of the dtype itself, which is up to m/512 for bfloat16.
    The code has 16 + numel bytes and 4 for each scale (8 for float64). A chunk that holds NaN or an infinity decodes to
    NaN throughout; one whose magnitudes are all below about 1e-36 (float32) decodes to zero.
    Source: Dettmers 2016, arXiv:1511.04561, with linear levels.
    """

    kind: ClassVar[Kind] = Kind.INT8
    bits: ClassVar[int] = 8

    def squeeze(self, values: Tensor, to: Tensor) -> float:
        low, high = (float(each) for each in torch.aminmax(values))
        largest = max(-low, high)  # NaN where there is one
        steps = _LEVELS / largest if largest else math.inf
        if steps > torch.finfo(values.dtype).max:
            largest = 0.0
        if not largest or not math.isfinite(largest) or not math.isfinite(low):
            to.zero_()
            return largest if largest == 0 else math.nan
        to.view(torch.int8).copy_(torch.mul(values, steps).round_())
        return min(largest, torch.finfo(values.dtype).max * (1 - 2**-20))  # else 127/127 of it may round to infinity

    def spread(self, chunk: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return chunk.view(torch.int8).to(dtype).mul_(scale / _LEVELS)


@dataclass(frozen=True)
class Sign(_Scaled):
    """The sign of each element, times the mean magnitude of its chunk of 65,536; the sign of zero is plus.

    The code has 16 + numel/8 bytes and 4 for each chunk (8 for float64): a thirty-second of float32. With `vote`
    the ranks of a collective take the sign that most of them have, zero where they are even, times the mean of their
    scales; else they add up what their codes say. (What a vote leaves out of the sum is in their residuals, in equal
    parts.) Alone it is biased, and SGD may stand still: use a residual
    (`ErrorFeedback`, or `DataParallel`, which keeps one). A chunk that holds NaN or an infinity decodes to NaN
    throughout. Source: Karimireddy, Rebjock, Stich, Jaggi 2019, arXiv:1901.09847; the vote: Bernstein et al. 2018,
    arXiv:1810.05291.
    """

    kind: ClassVar[Kind] = Kind.SIGN
    bits: ClassVar[int] = 1
    vote: bool = False

    @property
    def sums(self) -> bool:  # type: ignore[override]
        return not self.vote

    def squeeze(self, values: Tensor, to: Tensor) -> float:
        size = float(values.abs().mean())
        if not math.isfinite(size):  # the sum is too large for the dtype, or an element is no number
            top = float(values.abs().max())
            size = top * float((values.double().abs() / top).mean())
        to.numpy()[:] = np.packbits(values.numpy() >= 0)
        return size if math.isfinite(size) else math.nan

    def spread(self, chunk: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        return (_signs(dtype) * scale).index_select(0, chunk.int()).view(-1)

    def joined(self, chunks: Sequence[tuple[Tensor, float]], dtype: torch.dtype) -> Tensor:
        """Combine the chunk of all ranks; with `vote` the sign of the majority, times the sum of the scales."""
        if not self.vote:
            return super().joined(chunks, dtype)
        votes = super().joined([(chunk, 1.0) for chunk, _ in chunks], dtype)
        return votes.sign_().mul_(sum(scale for _, scale in chunks))


@cache
def _signs(dtype: torch.dtype) -> Tensor:
    """Return the signs in each byte, (256, 8)."""
    with torch.inference_mode(False):
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, 8)
        return torch.from_numpy(bits).to(dtype).mul_(2).sub_(1)


# --- a few bits, so that the mean is right ----------------------------------------------------------------------------


@dataclass(frozen=True)
class QSGD(DrawingCodec):
    """Stochastic rounding to s = 2**(bits-1) - 1 levels of either sign, for each bucket of elements: unbiased.

    Each `bucket` of elements has a scale, its largest magnitude m; an element v becomes m/s times one of the two
    integers around v*s/m, the nearer the likelier, so that its expectation is v (up to 2**-24 m/s, and the rounding of
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
        return -(-numel // self.bucket) * wide(dtype).itemsize - (-numel * self.bits // 8)

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
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
            y.nan_to_num_(0.0, 0.0, 0.0)  # the scale turns it into NaN
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
