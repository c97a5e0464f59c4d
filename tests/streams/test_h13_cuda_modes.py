"""H13: the current CUDA device and stream are the task's, and travel to the compute thread."""

from __future__ import annotations

import asyncio

import pytest
import torch

import aiodist
from aiodist.streams import HostStream, Modes

pytestmark = pytest.mark.usefixtures("simulated_cuda")

Where = tuple[int, int]


def where() -> Where:
    return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream


async def test_h13_tasks_have_streams_and_devices_of_their_own() -> None:
    aiodist.isolate(asyncio.get_running_loop())
    at_start = where()

    async def on(device: int) -> None:
        stream = torch.cuda.Stream(device=device)
        with torch.cuda.stream(stream):
            for _ in range(20):
                assert where() == (device, stream.cuda_stream)
                await asyncio.sleep(0)
        assert where() == at_start

    async def plain() -> None:
        for _ in range(20):
            assert where() == at_start
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(work) for work in (on(0), on(1), plain(), on(1), on(0))]
    await asyncio.gather(*tasks)
    assert where() == at_start


async def test_h13_blocks_that_overlap_without_nesting() -> None:
    aiodist.isolate(asyncio.get_running_loop())
    entered, left = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        with torch.cuda.device(1):
            entered.set()
            await asyncio.sleep(0)
        left.set()

    async def second() -> None:
        await entered.wait()
        with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream(device=0)) as _:
            mine = where()
            await left.wait()
            assert where() == mine

    await asyncio.gather(asyncio.create_task(first()), asyncio.create_task(second()))
    assert where() == (0, 0)


async def test_h13_the_compute_thread_enters_them() -> None:
    stream = torch.cuda.Stream(device=1)
    async with HostStream() as host:
        assert await host.submit(where) == (0, 0)
        with torch.cuda.stream(stream):
            handle = host.submit(where)
        assert await handle == (1, stream.cuda_stream)
        assert await host.submit(where) == (0, 0)


def test_h13_modes_hold_the_place() -> None:
    before = Modes.capture()
    with torch.cuda.device(1):
        modes = Modes.capture()
    assert before.in_force()
    assert not modes.in_force()
    with modes.applied():
        assert where()[0] == 1
    assert where() == (0, 0)
