"""Eight bits for each element, rounded to the nearest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aiodist.codecs.base import CHUNK, FLOATS, Head, Kind, check_input, create, parse, part, wide
from aiodist.codecs.gradients import GradientCodec

_LEVELS = 127


@dataclass(frozen=True)
class Int8(GradientCodec):
    """Each 65,536 elements share a scale, their largest magnitude m; an element is off by at most m/254.

    The code has 16 + numel bytes and 4 for each scale (8 for float64). Takes float16, bfloat16, float32 and float64,
    any other dtype is a `TypeError`. A chunk that holds NaN or an infinity decodes to NaN throughout; one whose
    magnitudes are all below about 1e-36 (float32) decodes to zero.

    `decode` raises `ValueError` for a code of other dtype, numel or length. Cost: one pass over memory each way, a
    chunk at a time in the cache. Source: Dettmers 2016, arXiv:1511.04561, with linear levels.
    """

    def encode(self, t: Tensor) -> Tensor:
        """Return the code of `t`, flat; raises `TypeError` unless it holds floats."""
        t = check_input(t, "Int8", FLOATS)
        scale, numel = wide(t.dtype), t.numel()
        code, payload = create(Head(Kind.INT8, t.dtype, numel), _nbytes(numel, scale))
        scales, levels = _parts(payload, numel, scale)
        room = torch.empty(min(numel, CHUNK), dtype=scale, device="cpu")
        found = []
        for values, to in zip(t.split(CHUNK), levels.split(CHUNK), strict=True) if numel else ():
            low, high = torch.aminmax(values)
            largest = max(-low.item(), high.item())  # NaN where there is one
            steps = _LEVELS / largest if largest else math.inf
            largest = 0.0 if steps > torch.finfo(scale).max else largest
            found.append(largest if math.isfinite(largest) and math.isfinite(low.item()) else math.nan)
            if not largest or math.isnan(found[-1]):
                to.zero_()
            else:
                to.copy_(torch.mul(values.to(scale), steps, out=room[: values.numel()]).round_())
        scales.copy_(torch.tensor(found, dtype=scale))
        return code

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return `numel` elements of `dtype`; raises `ValueError` for a code that does not fit."""
        decoded = torch.empty(numel, dtype=dtype, device="cpu")
        for levels, step, to in _chunks(code, decoded):
            if dtype is wide(dtype):
                to.copy_(levels).mul_(step)
            else:
                to.copy_(levels.to(wide(dtype)).mul_(step))
        return decoded

    def add(self, code: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """See `GradientCodec`."""
        for levels, step, to in _chunks(code, out):
            to.add_(levels.to(wide(out.dtype)), alpha=alpha * step)

    def combine(self, codes: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None:
        """See `GradientCodec`: in one pass over `out`, a chunk of all codes at a time."""
        dtype = wide(out.dtype)
        for (first, step, to), *others in zip(*(_chunks(code, out) for code in codes), strict=True):
            total = to if to.dtype is dtype else torch.empty(to.numel(), dtype=dtype, device="cpu")
            total.copy_(first).mul_(factor * step)
            for levels, step_of, _ in others:
                total.add_(levels.to(dtype), alpha=factor * step_of)
            if total is not to:
                to.copy_(total)


def _chunks(code: Tensor, like: Tensor) -> Iterator[tuple[Tensor, float, Tensor]]:
    """Yield the levels of each chunk, how large a step between two is, and the part of `like` that it is of."""
    scale, numel = wide(like.dtype), like.numel()
    _, payload = parse(code, Kind.INT8, like.dtype, numel, _nbytes(numel, scale))
    scales, levels = _parts(payload, numel, scale)
    for largest, of, to in zip(scales.tolist(), levels.split(CHUNK), like.split(CHUNK), strict=False):
        yield of, largest / _LEVELS, to


def _nbytes(numel: int, scale: torch.dtype) -> int:
    return -(-numel // CHUNK) * scale.itemsize + numel


def _parts(payload: Tensor, numel: int, scale: torch.dtype) -> tuple[Tensor, Tensor]:
    chunks = -(-numel // CHUNK)
    return part(payload, 0, chunks, scale), payload[chunks * scale.itemsize :].view(torch.int8)
