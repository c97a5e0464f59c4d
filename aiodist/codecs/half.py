"""Sixteen bits for each element: half of float32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.codecs.base import STRETCH, Kind, part, wide
from aiodist.codecs.gradients import Exchange, FloatCodec, Gradients, NarrowSum, RoundingLoss, Sum

_BIAS = 1 << 16  # exponents travel as unsigned numbers
_LARGEST = 1200  # float64's are between -1074 and 1023
_TOP = 15  # what is sent is below 2**15: rounding up does not overflow
_BELOW = 2.0**15 - 2.0**4  # the last float16 below
_SAFE = 100  # powers of two that float32 has, with room


@dataclass(frozen=True)
class Half(FloatCodec):
    """float16, with one exponent for the whole tensor: 16 + 2 numel bytes.

    The tensor is multiplied with the power of two that brings its largest finite element below 2**15, so nothing
    overflows: elements have a relative error of at most 2**-11 down to 2**-28 of the largest one, and below that an
    absolute one of 2**-39 of it. (A float16 tensor travels as it is.) NaN stays NaN, infinities stay infinities, the
    sign of zero is kept.

    In collectives the ranks agree on one exponent, with which their sum is in the range, too. They add up in float32,
    and from three ranks on the sum is rounded once more. What all that loses is in a residual. Cost: three passes to
    encode, two to decode. The scaling is that of mixed-precision training, applied to each message: Micikevicius et al.
    2018, arXiv:1710.03740.
    """

    kind: ClassVar[Kind] = Kind.HALF

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """See `FloatCodec`."""
        return 2 * numel

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
        """See `FloatCodec`."""
        exponent = 0 if t.dtype is torch.float16 else _exponent(t)
        payload.view(torch.float16).copy_(t if t.dtype is torch.float16 else _scaled(t, exponent))
        return exponent + _BIAS

    def read(self, payload: Tensor, dtype: torch.dtype, numel: int, param: int) -> Tensor:
        """See `FloatCodec`."""
        exponent = param - _BIAS
        if abs(exponent) > _LARGEST or (dtype is torch.float16 and exponent):
            raise ValueError(f"a code by Half with exponent {exponent}: {dtype_name(dtype)} has none such")
        halves = part(payload, 0, numel, torch.float16)
        return halves.clone() if dtype is torch.float16 else _times_power(halves, -exponent, to=wide(dtype)).to(dtype)

    def exchange(self, gradients: Gradients, kept: dict[str, Tensor]) -> Exchange:
        """See `GradientCodec`: the ranks agree on an exponent with which their sum does not overflow, and add up."""
        total, room = gradients.total, (gradients.size - 1).bit_length()
        scale = torch.tensor([-_exponent(total) if bool(total.any()) else -_LARGEST], dtype=torch.int32)
        yield Sum(scale, "max")
        exponent = -int(scale) - room
        narrow = torch.empty(total.numel(), dtype=torch.float16, device="cpu")
        for values, to in zip(total.split(STRETCH), narrow.split(STRETCH), strict=True):
            to.copy_(_times_power(values, exponent))
            if gradients.feedback:
                values.sub_(_times_power(to, -exponent, to=total.dtype))
        usual = abs(exponent) <= _SAFE
        lost = yield NarrowSum(narrow, gradients.out, 2.0**-exponent * gradients.factor if usual else 1.0)
        if gradients.feedback:
            _account_for(lost, total, -exponent)
        if not usual:
            gradients.out.copy_(_times_power(gradients.out, -exponent)).mul_(gradients.factor)


@dataclass(frozen=True)
class BFloat16(FloatCodec):
    """bfloat16: 16 + 2 numel bytes, eight bits of each element, over the range of float32.

    The relative error of an element is at most 2**-8; NaN stays NaN, infinities stay infinities, and float64 beyond
    float32 becomes one. In collectives the ranks add up in float32; from three ranks on the sum is rounded once more,
    and what that loses is in a residual too. Cost: one pass each way. Source: Kalamkar et al. 2019, arXiv:1905.12322.
    """

    kind: ClassVar[Kind] = Kind.BFLOAT16
    elementwise: ClassVar[bool] = True

    def nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """See `FloatCodec`."""
        return 2 * numel

    def write(self, t: Tensor, payload: Tensor, number: int) -> int:
        """See `FloatCodec`."""
        payload.view(torch.bfloat16).copy_(t)
        return 0

    def read(self, payload: Tensor, dtype: torch.dtype, numel: int, param: int) -> Tensor:
        """See `FloatCodec`."""
        return part(payload, 0, numel, torch.bfloat16).to(dtype, copy=True)

    def exchange(self, gradients: Gradients, kept: dict[str, Tensor]) -> Exchange:
        """See `GradientCodec`: the codes add up."""
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
    """Keep what the sum of all ranks lost in its part of this rank, times 2**exponent."""
    total[lost.start :][: lost.rest.numel()].add_(_times_power(lost.rest, exponent, to=total.dtype))


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


def _times_power(t: Tensor, exponent: int, to: torch.dtype | None = None) -> Tensor:
    """Return t * 2**exponent, in `to`; exact where the result has its bits."""
    t = t.to(to or wide(t.dtype))
    while abs(exponent) > _SAFE:  # subnormal or huge: no power of two of this dtype does it in one step
        step = math.copysign(_SAFE, exponent)
        t = t * 2.0**step
        exponent -= int(step)
    return t * 2.0**exponent if exponent else t
