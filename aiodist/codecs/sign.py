"""One bit for each element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from aiodist.codecs.base import CHUNK, FLOATS, Head, Kind, check_input, create, parse, part, wide
from aiodist.codecs.gradients import GradientCodec


@dataclass(frozen=True)
class Sign(GradientCodec):
    """The sign of each element, times the mean magnitude of the 65,536 that it lies among; the sign of zero is plus.

    The code has 16 + numel/8 bytes and 4 for each chunk (8 for float64): a thirty-second of float32. With `vote`
    the ranks of a collective take the sign that most of them have, zero where they are even, times the mean of their
    scales; else they add up what their codes say. (What a vote leaves out of the sum is in their residuals, in equal
    parts.) Alone it is biased, and SGD may stand still: use a residual
    (`ErrorFeedback`, or `DataParallel`, which keeps one). Takes float16, bfloat16, float32 and float64, any other dtype
    is a `TypeError`. A chunk that holds NaN or an infinity decodes to NaN throughout.

    `decode` raises `ValueError` for a code of other dtype, numel or length. Cost: one pass over memory each way.
    Source: Karimireddy, Rebjock, Stich, Jaggi 2019, arXiv:1901.09847; the vote: Bernstein et al. 2018,
    arXiv:1810.05291.
    """

    vote: bool = False

    @property
    def sums(self) -> bool:  # type: ignore[override]
        """See `GradientCodec`."""
        return not self.vote

    def encode(self, t: Tensor) -> Tensor:
        """Return the code of `t`, flat; raises `TypeError` unless it holds floats."""
        t = check_input(t, "Sign", FLOATS)
        scale, numel = wide(t.dtype), t.numel()
        code, payload = create(Head(Kind.SIGN, t.dtype, numel), _nbytes(numel, scale))
        scales, bits = _parts(payload, numel, scale)
        room = torch.empty(min(numel, CHUNK), dtype=scale, device="cpu")
        packed = bits.numpy()
        for i, values in enumerate(t.split(CHUNK) if numel else ()):
            values = values.to(scale)  # numpy has no bfloat16
            size = torch.abs(values, out=room[: values.numel()]).mean()  # faster than the norm
            if not bool(size.isfinite()):  # the sum is too large for the dtype, or an element is no number
                size = values.double().abs().mean()
            scales[i] = size if bool(size.isfinite()) else torch.nan
            plus = np.packbits(values.numpy() >= 0)
            packed[i * CHUNK // 8 :][: plus.size] = plus
        return code

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return `numel` elements of `dtype`; raises `ValueError` for a code that does not fit."""
        decoded = torch.empty(numel, dtype=dtype, device="cpu")
        for bits, size, to in _chunks(code, decoded):
            to.copy_(_signs(bits, size, wide(dtype))[: to.numel()])
        return decoded

    def add(self, code: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """See `GradientCodec`."""
        for bits, size, to in _chunks(code, out):
            to.add_(_signs(bits, alpha * size, wide(out.dtype))[: to.numel()])

    def combine(self, codes: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None:
        """See `GradientCodec`; with `vote` the sign of the majority, times the sum of the scales.

        In one pass over `out`, a chunk of all codes at a time.
        """
        dtype = wide(out.dtype)
        for chunk in zip(*(_chunks(code, out) for code in codes), strict=True):
            (bits, size, to), *others = chunk
            total = _signs(bits, 1.0 if self.vote else factor * size, dtype)
            for theirs, of, _ in others:
                total.add_(_signs(theirs, 1.0 if self.vote else factor * of, dtype))
            if self.vote:
                total.sign_().mul_(factor * sum(size for _, size, _ in chunk))
            to.copy_(total[: to.numel()])


def _chunks(code: Tensor, like: Tensor) -> Iterator[tuple[Tensor, float, Tensor]]:
    """Yield the bits of each chunk, its scale, and the part of `like` that it is of."""
    scale, numel = wide(like.dtype), like.numel()
    _, payload = parse(code, Kind.SIGN, like.dtype, numel, _nbytes(numel, scale))
    scales, bits = _parts(payload, numel, scale)
    yield from zip(bits.split(CHUNK // 8), scales.tolist(), like.split(CHUNK), strict=False)


def _signs(bits: Tensor, size: float, dtype: torch.dtype) -> Tensor:
    """Return `size` or its negative for each bit of `bits`."""
    return (_table(dtype) * size).index_select(0, bits.int()).view(-1)


@cache
def _table(dtype: torch.dtype) -> Tensor:
    """Return the signs in each byte, (256, 8)."""
    with torch.inference_mode(False):
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)).reshape(256, 8)
        return torch.from_numpy(bits).to(dtype).mul_(2).sub_(1)


def _nbytes(numel: int, scale: torch.dtype) -> int:
    return -(-numel // CHUNK) * scale.itemsize + -(-numel // 8)


def _parts(payload: Tensor, numel: int, scale: torch.dtype) -> tuple[Tensor, Tensor]:
    chunks = -(-numel // CHUNK)
    return part(payload, 0, chunks, scale), payload[chunks * scale.itemsize :]
