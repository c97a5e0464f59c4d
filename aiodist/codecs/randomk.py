"""A few elements, drawn at random, the same ones on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from aiodist.codecs.base import FLOATS, Head, Kind, check_input, create, parse, part, share_of, wide
from aiodist.codecs.gradients import Exchange, GradientCodec, Gradients, Sum

_DRAWS = 1 << 32


@dataclass(frozen=True)
class RandomK(GradientCodec):
    """One element out of each of k stretches of equal length, drawn anew each time; the rest decodes to zero.

    `ratio`, in (0, 1], is the part that is kept: k = round(ratio * numel), at least one element. `seed` and a number
    say which ones, so no index travels: the code has 16 + k * itemsize bytes, and codes of one number add up, so
    collectives reduce k elements and nothing else. What is kept is exact; with `scaled` it is multiplied by the length
    of its stretch, which makes the code unbiased. Use it without `scaled` where a residual is kept. Where NaN or an
    infinity is about, all that is kept is NaN, so that it is not hidden.

    Takes float16, bfloat16, float32 and float64, any other dtype is a `TypeError`. `decode` raises `ValueError` for a
    code of other dtype, numel, ratio or length. Cost: one pass to encode, one to decode.
    Source: Stich, Cordonnier, Jaggi 2018, "Sparsified SGD with memory", arXiv:1809.07599.
    """

    ratio: float
    scaled: bool = False
    seed: int = 0
    _calls: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        share_of(self.ratio, 0)
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed={self.seed}: expected at least 0 and less than 2**63")

    def __reduce__(self) -> tuple[type[RandomK], tuple[float, bool, int]]:
        return type(self), (self.ratio, self.scaled, self.seed)

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """See `GradientCodec`."""
        return self.scaled

    def encode(self, t: Tensor) -> Tensor:
        """Return the code of `t`, flat; raises `TypeError` unless it holds floats."""
        t = check_input(t, "RandomK", FLOATS)
        number = next(self._calls) % _DRAWS
        kept, _ = self._draw(number, t.numel())
        code, payload = create(Head(Kind.RANDOM_K, t.dtype, t.numel(), param=number), kept.numel() * t.dtype.itemsize)
        payload.copy_(_taken(t, kept).view(torch.uint8))
        return code

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return `numel` elements of `dtype`; raises `ValueError` for a code that does not fit."""
        head, payload = parse(code, Kind.RANDOM_K, dtype, numel, share_of(self.ratio, numel) * dtype.itemsize)
        kept, lengths = self._draw(head.param, numel)
        values = part(payload, 0, kept.numel(), dtype)
        decoded = torch.zeros(numel, dtype=dtype, device="cpu")
        decoded[kept] = values * lengths.to(dtype) if self.scaled else values
        return decoded

    def exchange(self, gradients: Gradients, kept: dict[str, Tensor]) -> Exchange:
        """See `GradientCodec`: the ranks add up what they have at the same places."""
        total, out = gradients.total, gradients.out
        places, lengths = self._draw(gradients.number % _DRAWS, total.numel())
        values = _taken(total, places)
        if gradients.feedback:
            total.index_add_(0, places, values * lengths if self.scaled else values, alpha=-1)
        yield Sum(values)
        out.zero_()
        values.mul_(gradients.factor)
        out[places] = values * lengths.to(out.dtype) if self.scaled else values

    def _draw(self, number: int, numel: int) -> tuple[Tensor, Tensor]:
        """Return which elements are kept, ascending, and how long the stretch of each is."""
        count = share_of(self.ratio, numel)
        starts = np.arange(count + 1, dtype=np.int64) * numel // max(count, 1)
        random = np.random.default_rng((self.seed, number))
        lengths = np.diff(starts)
        return torch.from_numpy(starts[:-1] + random.integers(lengths)), torch.from_numpy(lengths)


def _taken(t: Tensor, places: Tensor) -> Tensor:
    taken = t[places]
    return taken if bool(t.sum(dtype=wide(t.dtype)).isfinite()) or bool(t.isfinite().all()) else taken.fill_(torch.nan)
