"""N12: gradients of 16 bits, several in a bucket, which travels in several parts: against sums in float64."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from aiodist import Communicator
from aiodist.codecs import BFloat16, Codec, Half, Int8, PowerSGD, TopK
from aiodist.nn import DataParallel
from aiodist.testing.seams.progress import reducer_of

SHAPES = ((3, 5), (1,), (7, 11), (2,), (13,), (1, 1))
STEPS = 4


def gradients(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Return what a rank brings in a step; the sizes of its elements differ by rank, step and parameter."""
    draw = torch.Generator().manual_seed(100 * rank + step)
    return [
        (torch.randn(shape, generator=draw, dtype=torch.float64) * 3.7 ** (number - rank - 2)).to(dtype)
        for number, shape in enumerate(SHAPES)
    ]


@pytest.mark.drawn(3)
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("codec", [BFloat16(), Half(), Int8(), TopK(0.3), PowerSGD(1)], ids=str)
async def test_n12_parts_of_a_narrow_bucket_lose_nothing(
    coll: Communicator, codec: Codec, dtype: torch.dtype, op: Literal["mean", "sum"]
) -> None:
    """The outputs of all steps plus the residuals equal the inputs; each step is right to rounding.

    A bucket has all parameters, and a part of it 37 elements: parts begin and end within parameters, the last is short.
    """
    module = nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES])
    net = await DataParallel.create(module, coll, op=op, compress=codec)
    assert net.compressor is not None
    net.compressor.part_numel = 37
    params = list(module.parameters())
    factor = coll.size if op == "mean" else 1
    brought = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    came = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(STEPS):
        every = [gradients(rank, step, dtype) for rank in range(coll.size)]
        mine = every[coll.rank]
        module.zero_grad()
        await net.backward(torch.stack([(p * g).sum() for p, g in zip(params, mine, strict=True)]).float().sum())
        for number, p in enumerate(params):
            assert p.grad is not None
            assert p.grad.dtype is dtype
            expected = torch.stack([grads[number].double() for grads in every])
            brought[number] += expected.sum(0)
            came[number] += p.grad.double() * factor
            if isinstance(codec, (BFloat16, Half)) and step == 0:  # each element is rounded thrice at most
                size = expected.abs().sum(0)
                slack = size * (3 * 2.0**-8 if isinstance(codec, BFloat16) else 2e-3) + size * torch.finfo(dtype).eps
                assert bool(((p.grad.double() * factor - expected.sum(0)).abs() <= slack + 3e-4).all()), number
    assert len(reducer_of(net).buckets) == 1
    kept: Any = await coll.allgather_object(net.compressor.state_dict()["residuals"])
    for number, (total, seen) in enumerate(zip(brought, came, strict=True)):
        left = sum(residuals[str(number)].double() for residuals in kept).view(SHAPES[number])
        scale = float(total.abs().max() + seen.abs().max() + left.abs().max())
        assert float((seen + left - total).abs().max()) <= 1e-6 * scale, number
