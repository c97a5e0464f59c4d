"""N3 on a CUDA device: training with `DataParallel` equals plain training, on any stream; the host runs ahead."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import aiodist
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.timeout(120),
]

SIZES: dict[str, Any] = {"bucket_bytes": 20_000, "first_bucket_bytes": 1000}


def mlp(place: str, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)]
    return nn.Sequential(*layers).to(place, dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(16, 40, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return drawn[:, :32].to(dtype), drawn[:, 32:].to(dtype)


def alone(steps: int) -> nn.Sequential:
    module = mlp("cpu")
    opt = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step)
        opt.zero_grad()
        mse_loss(module(x), y).backward()
        opt.step()
    return module


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loss_of(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(module(x), y)


def same(module: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("pipelined", [False, True])
async def test_n3_equals_plain_training(pipelined: bool) -> None:
    async with asyncio.timeout(100), aiodist.init() as coll:
        net = await DataParallel.create(mlp("cuda"), coll, **SIZES)
        opt: Any = await PipelinedOptimizer.create(net, sgd) if pipelined else sgd(net.parameters())
        for step in range(20):
            x, y = (t.cuda() for t in batch(step))
            loss = await net.step(partial(loss_of, net, x, y), opt)
            assert loss.is_cuda
        if pipelined:
            await opt.flush()
        same(net.module, alone(20))
        await assert_synchronized(net.module, coll)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch's own thread, at its first product
async def test_n3_a_module_on_the_cpu_and_the_device() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = list(mlp("cpu"))
            self.first = nn.Sequential(*layers[:2])
            self.second = nn.Sequential(*layers[2:]).cuda()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.second(self.first(x).cuda())
            return result.cpu()

    async with asyncio.timeout(100), aiodist.init() as coll:
        net = await DataParallel.create(Mixed(), coll, **SIZES)
        opt = sgd(net.parameters())
        for step in range(10):
            await net.step(partial(loss_of, net, *batch(step)), opt)
        same(net.module, alone(10))


async def test_n3_forward_on_a_side_stream_and_read_on_it() -> None:
    """100 runs under load, all equal to the last bit."""
    async with asyncio.timeout(100), aiodist.init() as coll:
        net = await DataParallel.create(mlp("cuda"), coll, **SIZES)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        start = {name: t.clone() for name, t in net.state_dict().items()}
        x, y = (t.cuda() for t in batch(0))
        torch.cuda.synchronize()
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        noise = torch.randn(2048, 2048, device="cuda")
        seen = []
        for _ in range(100):
            with torch.cuda.stream(other):
                noise = torch.tanh(noise @ noise)
            with torch.cuda.stream(side):
                net.load_state_dict(start)
                torch.cuda._sleep(200_000)
                loss = await net.step(partial(loss_of, net, x, y), opt)
                seen.append(torch.cat([loss.reshape(1), *(p.detach().reshape(-1) for p in net.parameters())]))
        torch.cuda.synchronize()
        assert all(torch.equal(seen[0], one) for one in seen)


async def test_n3_a_step_returns_before_the_device_is_done() -> None:
    async with asyncio.timeout(100), aiodist.init() as coll:
        net = await DataParallel.create(mlp("cuda"), coll, **SIZES)
        opt = sgd(net.parameters())
        x, y = (t.cuda() for t in batch(0))

        def slow() -> Tensor:
            torch.cuda._sleep(1_000_000_000)  # half a second or so
            return loss_of(net, x, y)

        for _ in range(3):
            await net.step(partial(loss_of, net, x, y), opt)
        torch.cuda.synchronize()
        began = time.perf_counter()
        await net.step(slow, opt)
        returned = time.perf_counter() - began
        torch.cuda.synchronize()
        over = time.perf_counter() - began
        assert returned < 0.5 * over
