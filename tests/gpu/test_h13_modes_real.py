"""H13 on a CUDA device: current device and stream are each task's own; threads that work for a task get them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from torch import nn

import aiodist
from aiodist.streams import CudaStream, HostStream

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

Spin = Callable[[float], None]
RUNS = 100


def number() -> int:
    """Return that of the current stream."""
    found: int = torch.cuda.current_stream().cuda_stream
    return found


def test_h13_each_task_has_its_stream() -> None:
    async def task(stream: torch.cuda.Stream, turns: int) -> None:
        for _ in range(turns):
            with torch.cuda.stream(stream):
                await asyncio.sleep(0)
                assert number() == stream.cuda_stream
            await asyncio.sleep(0)
            assert number() == 0

    async def main() -> None:
        streams = [torch.cuda.Stream() for _ in range(8)]
        async with asyncio.timeout(20):
            await asyncio.gather(*[task(stream, 10 + i) for i, stream in enumerate(streams)])  # they do not nest
        assert number() == 0

    aiodist.run(main)


def test_h13_each_task_has_its_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("2 devices are needed, there is one")

    async def task(index: int) -> None:
        for _ in range(20):
            with torch.cuda.device(index):
                await asyncio.sleep(0)
                assert torch.cuda.current_device() == index
                assert torch.ones(1, device="cuda").device.index == index

    async def main() -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(*[task(i % 2) for i in range(6)])
        assert torch.cuda.current_device() == 0

    aiodist.run(main)


def test_h13_a_host_stream_computes_on_the_callers_stream(spin: Spin) -> None:
    async def main() -> None:
        side = torch.cuda.Stream()
        async with HostStream("compute") as compute, asyncio.timeout(20):
            with torch.cuda.stream(side):
                assert await compute.submit(number) == side.cuda_stream
                x = torch.full((1 << 18,), float("nan"), device="cuda")
                spin(2e-3)
                x.fill_(2.0)
                y = await compute.submit(lambda: x * 2)  # right behind: it is the same stream
                assert bool((y == 4).all())
            assert await compute.submit(number) == 0

    aiodist.run(main)


def test_h13_modes_of_a_task_do_not_reach_the_progress_thread(spin: Spin) -> None:
    """Copies made for a task in inference mode or without gradients are as any other."""

    async def main() -> None:
        async with asyncio.timeout(20):
            host = torch.randn(3 << 20)
            there = torch.empty(3 << 20, device="cuda")
            with torch.inference_mode():
                await CudaStream.of("to-device").copy(there, host)
            assert torch.equal(there.cpu(), host)
            w = torch.ones((), device="cuda", requires_grad=True)
            (there * w).sum().backward()
            assert w.grad is not None

    aiodist.run(main)


def test_h13_autocast_of_the_device_is_the_tasks() -> None:
    async def half() -> torch.dtype:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            await asyncio.sleep(0)
            return (torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")).dtype

    async def full() -> torch.dtype:
        await asyncio.sleep(0)
        return (torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")).dtype

    async def main() -> list[torch.dtype]:
        async with asyncio.timeout(20):
            return list(await asyncio.gather(half(), full(), half(), full()))

    assert aiodist.run(main) == [torch.bfloat16, torch.float32] * 2


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()


def test_h13_a_step_on_a_side_stream_is_read_there_at_once(spin: Spin) -> None:
    """Forward on a side stream, `await net.step`, read on that stream: as a plain loop, to the bit, under load."""
    x = torch.randn(32, 64, device="cuda")
    plain = _net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    expected = []
    for _ in range(RUNS):
        optimizer.zero_grad()
        loss = plain(x).square().mean()
        loss.backward()
        optimizer.step()
        expected.append((float(loss.detach()), [p.detach().cpu().clone() for p in plain.parameters()]))

    async def load(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            a = torch.randn(512, 512, device="cuda")
        while True:
            with torch.cuda.stream(stream):
                a = (a @ a).tanh()
            await CudaStream(stream).record()

    async def main() -> None:
        side = torch.cuda.Stream()
        async with aiodist.init() as coll, asyncio.timeout(100):
            net = await aiodist.nn.DataParallel.create(_net(), coll)
            ours = torch.optim.SGD(net.parameters(), lr=0.05)
            torch.cuda.synchronize()
            beside = asyncio.create_task(load(torch.cuda.Stream()))
            with torch.cuda.stream(side):
                for i, (loss, parameters) in enumerate(expected):
                    found = await net.step(lambda: net(x).square().mean(), ours)
                    assert float(found) == loss, i
                    for p, wanted in zip(net.parameters(), parameters, strict=True):
                        assert torch.equal(p.detach().cpu(), wanted), i
            beside.cancel()
            await asyncio.wait([beside])
            await net.aclose()

    aiodist.run(main)
