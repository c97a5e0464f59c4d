"""N12 on a CUDA device: gradients that travel as codes train as those of the same net on the CPU."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import aiodist
from aiodist.codecs import BFloat16, Codec, Int8, PowerSGD, TopK
from aiodist.nn import DataParallel, PipelinedOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.timeout(120),
]


async def trained(place: str, codec: Codec, *, pipelined: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return weights and residuals behind 20 steps, of buckets with one parameter and with several."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(
        place, torch.float64
    )

    def loss_of(net: Any, step: int) -> Tensor:
        drawn = torch.randn(16, 40, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(place)
        return mse_loss(net(drawn[:, :32]), drawn[:, 32:])

    async with asyncio.timeout(100), aiodist.init() as coll:
        net = await DataParallel.create(module, coll, compress=codec, bucket_bytes=20_000, first_bucket_bytes=1000)
        make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        opt: Any = PipelinedOptimizer(net, make) if pipelined else make(net.parameters())
        for step in range(20):
            await net.step(loss_of, opt, net, step)
        if pipelined:
            await opt.flush()
        assert net.compressor is not None
        weights = [p.detach().cpu() for p in net.parameters()]
        return weights, net.compressor.state_dict()["residuals"]


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("codec", [BFloat16(), Int8(), PowerSGD(2), TopK(1.0)], ids=str)
async def test_n12_trains_as_on_the_cpu(codec: Codec, pipelined: bool) -> None:
    expected, left = await trained("cpu", codec, pipelined=pipelined)
    weights, kept = await trained("cuda", codec, pipelined=pipelined)
    # What two devices round apart may fall into two codes: as much as a code leaves out.
    slack = 1e-9 if isinstance(codec, TopK) else 1e-2
    for seen, known in zip(weights, expected, strict=True):
        torch.testing.assert_close(seen, known, rtol=slack, atol=slack)
    assert kept.keys() == left.keys()
    assert all(residual.is_cpu for residual in kept.values())
