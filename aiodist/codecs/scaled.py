"""Eight bits or one for each element, and a scale for each 65,536 of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from aiodist.codecs.base import CHUNK, Kind, parse, part, wide
from aiodist.codecs.gradients import FloatCodec

_LEVELS = 127


class _Scaled(FloatCodec):
    """What both have in common: the scales of all chunks, then the bytes of each. One pass over memory each way."""

    bits: ClassVar[int]

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """See `FloatCodec`."""
        return -(-numel // CHUNK) * wide(dtype).itemsize - (-numel * self.bits // 8)

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
        """See `FloatCodec`."""
        scales, chunks = self._parts(payload, t.numel(), wide(t.dtype))
        for i, (values, to) in enumerate(zip(t.split(CHUNK), chunks, strict=True) if t.numel() else ()):
            scales[i] = self.squeeze(values.to(scales.dtype), to)
        return 0

    def read(self, payload: Tensor, dtype: torch.dtype, numel: int, param: int) -> Tensor:
        """See `FloatCodec`."""
        decoded = torch.empty(numel, dtype=dtype, device="cpu")
        for chunk, scale, to in self._chunks(payload, decoded):
            to.copy_(self.spread(chunk, scale, wide(dtype))[: to.numel()])
        return decoded

    def add(self, code: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """See `GradientCodec`."""
        for chunk, scale, to in self._chunks(self._payload(code, out), out):
            to.add_(self.spread(chunk, alpha * scale, wide(out.dtype))[: to.numel()])

    def combine(self, codes: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None:
        """See `GradientCodec`: in one pass over `out`, a chunk of all codes at a time."""
        for chunks in zip(*(self._chunks(self._payload(code, out), out) for code in codes), strict=True):
            to = chunks[0][2]
            total = self.joined([(chunk, factor * scale) for chunk, scale, _ in chunks], wide(out.dtype))
            to.copy_(total[: to.numel()])

    def joined(self, chunks: Sequence[tuple[Tensor, float]], dtype: torch.dtype) -> Tensor:
        """Return what the same chunk of all ranks comes to."""
        total = self.spread(*chunks[0], dtype)
        for chunk, scale in chunks[1:]:
            total.add_(self.spread(chunk, scale, dtype))
        return total

    def squeeze(self, values: Tensor, to: Tensor) -> float:
        """Write the bytes of a chunk to `to`; return its scale, NaN where an element is not finite."""
        raise NotImplementedError

    def spread(self, chunk: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """Return the values of a chunk, in new memory; maybe a few more."""
        raise NotImplementedError

    def _payload(self, code: Tensor, out: Tensor) -> Tensor:
        return parse(code, self.kind, out.dtype, out.numel(), self.nbytes(out.numel(), out.dtype))[1]

    def _chunks(self, payload: Tensor, like: Tensor) -> Iterator[tuple[Tensor, float, Tensor]]:
        """Yield the bytes of each chunk, its scale, and the part of `like` that it is of."""
        scales, chunks = self._parts(payload, like.numel(), wide(like.dtype))
        return zip(chunks, scales.tolist(), like.split(CHUNK), strict=False)

    def _parts(self, payload: Tensor, numel: int, scale: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
        count = -(-numel // CHUNK)
        return part(payload, 0, count, scale), payload[count * scale.itemsize :].split(CHUNK * self.bits // 8)


@dataclass(frozen=True)
class Int8(_Scaled):
    """Each 65,536 elements share a scale, their largest magnitude m; an element is off by at most m/254.

    The code has 16 + numel bytes and 4 for each scale (8 for float64). A chunk that holds NaN or an infinity decodes to
    NaN throughout; one whose magnitudes are all below about 1e-36 (float32) decodes to zero.
    Source: Dettmers 2016, arXiv:1511.04561, with linear levels.
    """

    kind: ClassVar[Kind] = Kind.INT8
    bits: ClassVar[int] = 8

    def squeeze(self, values: Tensor, to: Tensor) -> float:
        """See `_Scaled`."""
        low, high = (float(each) for each in torch.aminmax(values))
        largest = max(-low, high)  # NaN where there is one
        steps = _LEVELS / largest if largest else math.inf
        if steps > torch.finfo(values.dtype).max:
            largest = 0.0
        if not largest or not math.isfinite(largest) or not math.isfinite(low):
            to.zero_()
            return largest if largest == 0 else math.nan
        to.view(torch.int8).copy_(torch.mul(values, steps).round_())
        return largest

    def spread(self, chunk: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """See `_Scaled`."""
        return chunk.view(torch.int8).to(dtype).mul_(scale / _LEVELS)


@dataclass(frozen=True)
class Sign(_Scaled):
    """The sign of each element, times the mean magnitude of the 65,536 that it lies among; the sign of zero is plus.

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
        """See `GradientCodec`."""
        return not self.vote

    def squeeze(self, values: Tensor, to: Tensor) -> float:
        """See `_Scaled`."""
        size = float(values.abs().mean())
        if not math.isfinite(size):  # the sum is too large for the dtype, or an element is no number
            size = float(values.double().abs().mean())
        to.numpy()[:] = np.packbits(values.numpy() >= 0)
        return size if math.isfinite(size) else math.nan

    def spread(self, chunk: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
        """See `_Scaled`."""
        return (_signs(dtype) * scale).index_select(0, chunk.int()).view(-1)

    def joined(self, chunks: Sequence[tuple[Tensor, float]], dtype: torch.dtype) -> Tensor:
        """See `_Scaled`; with `vote` the sign of the majority, times the sum of the scales."""
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
