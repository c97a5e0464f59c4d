"""Sixteen bits for each element: half of float32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.codecs.base import FLOATS, Head, Kind, check_input, create, parse, part

__all__ = ["Half"]

_BIAS = 1 << 16  # exponents travel as unsigned numbers
_LARGEST = 1200  # float64's are between -1074 and 1023
_TOP = 15  # what is sent is below 2**15: rounding up does not overflow
_BELOW = 2.0**15 - 2.0**4  # the last float16 below
_SAFE = 100  # powers of two that float32 has, with room


@dataclass(frozen=True)
class Half:
    """float16, with one exponent for the whole tensor: 16 + 2 numel bytes.

    Takes float16, bfloat16, float32 and float64, any other dtype is a `TypeError`. The tensor is multiplied with the
    power of two that brings its largest finite element below 2**15, so nothing overflows: elements have a relative
    error of at most 2**-11 down to 2**-28 of the largest one, and below that an absolute one of 2**-39 of it. (A
    float16 tensor travels as it is.) NaN stays NaN, infinities stay infinities, the sign of zero is kept.

    `decode` raises `ValueError` for a code of other dtype, numel or length. Cost: three passes to encode, two to
    decode. The scaling is that of mixed-precision training, applied to each message: Micikevicius et al. 2018,
    arXiv:1710.03740.
    """

    def encode(self, t: Tensor) -> Tensor:
        """Return the code of `t`, flat: 16 + 2 numel bytes; raises `TypeError` unless it holds floats."""
        t = check_input(t, "Half", FLOATS)
        exponent = 0 if t.dtype is torch.float16 else _exponent(t)
        code, payload = create(Head(Kind.HALF, t.dtype, t.numel(), param=exponent + _BIAS), 2 * t.numel())
        payload.view(torch.float16).copy_(t if t.dtype is torch.float16 else _scaled(t, exponent))
        return code

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return `numel` elements of `dtype`; raises `ValueError` for a code that does not fit."""
        head, payload = parse(code, Kind.HALF, dtype, numel, 2 * numel)
        exponent = head.param - _BIAS
        if abs(exponent) > _LARGEST or (dtype is torch.float16 and exponent):
            raise ValueError(f"a code by Half with exponent {exponent}: {dtype_name(dtype)} has none such")
        halves = part(payload, 0, numel, torch.float16)
        if dtype is torch.float16:
            return halves.clone()
        return _times_power(halves, -exponent, wide=_wide(dtype)).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _exponent(t: Tensor) -> int:
    """Return the e for which t * 2**e has its largest finite element in [2**14, 2**15); 0 where there is none."""
    if not t.numel():
        return 0
    low, high = torch.aminmax(t)
    largest = max(-low.item(), high.item())
    if not math.isfinite(largest):
        largest = t.abs().nan_to_num_(0.0, 0.0, 0.0).amax().item()
    return _TOP - math.frexp(largest)[1] if largest else 0


def _scaled(t: Tensor, exponent: int) -> Tensor:
    """Return t * 2**exponent; what is finite does not round to a float16 that leaves the dtype when it comes back."""
    scaled = _times_power(t, exponent)
    if exponent > _TOP - math.frexp(torch.finfo(t.dtype).max)[1]:
        return scaled
    return torch.where(scaled.isinf(), scaled, scaled.clamp(-_BELOW, _BELOW))


def _times_power(t: Tensor, exponent: int, wide: torch.dtype | None = None) -> Tensor:
    """Return t * 2**exponent, in `wide`; exact where the result has its bits."""
    t = t.to(wide or _wide(t.dtype))
    while abs(exponent) > _SAFE:  # subnormal or huge: no power of two of this dtype does it in one step
        step = math.copysign(_SAFE, exponent)
        t = t * 2.0**step
        exponent -= int(step)
    return t * 2.0**exponent if exponent else t
