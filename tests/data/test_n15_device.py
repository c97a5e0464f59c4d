"""N15: items go to a (simulated) CUDA device ahead of time. What they may be made of is in test_n15_nesting.py."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import aiodist
from aiodist.data import Prefetched, prefetch
from aiodist.errors import BackendError
from aiodist.handles import Progress, Scheduler
from aiodist.handles.progress import transport_lock
from aiodist.streams import CudaStream, Staging
from aiodist.testing import SimulatedCuda, run_ranks

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_factories=["uvloop"])]

Until = Callable[[Callable[[], object]], Awaitable[None]]
N = 1000


def tensors(count: int, read: list[int] | None = None, numel: int = N) -> Iterator[Tensor]:
    for i in range(count):
        if read is not None:
            read.append(i)
        yield torch.full((numel,), float(i))


async def async_tensors(count: int) -> AsyncIterator[Tensor]:
    for t in tensors(count):
        await asyncio.sleep(0)
        yield t


def times_ten(t: Tensor) -> Tensor:
    return t * 10


def copy_stream(device: int = 0) -> Any:
    return CudaStream.of("to-device", device).stream


def lent() -> int:
    return Staging.of(Progress.current()).pool.lent


async def firsts(items: Prefetched[Tensor]) -> list[float]:
    """Take all items; read each at once on a stream that nothing has been ordered behind the copy."""
    side: Any = torch.cuda.Stream()
    found = []
    async for t in items:
        assert t.is_cuda
        with torch.cuda.stream(side):
            host = t.cpu()
        assert bool((host == host[0]).all())
        found.append(float(host[0]))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 1},
        {"depth": 7},
        {"transform": times_ten, "workers": 3, "depth": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("source", [tensors, async_tensors])
@pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
async def test_n15_every_item_is_on_the_device_in_order(
    source: Callable[[int], Any], options: dict[str, Any], simulated_cuda: SimulatedCuda
) -> None:
    async with asyncio.timeout(30), prefetch(source(20), device="cuda", **options) as items:
        factor = 10.0 if "transform" in options else 1.0
        assert await firsts(items) == [i * factor for i in range(20)]
    assert lent() == 0
    assert Scheduler.current().in_flight == 0


async def test_n15_processes_make_what_goes_to_the_device(simulated_cuda: SimulatedCuda) -> None:
    opened = prefetch(tensors(4), transform=times_ten, kind="process", device="cuda")
    async with asyncio.timeout(50), opened as items:
        assert await firsts(items) == [0.0, 10.0, 20.0, 30.0]
        assert items.statistics().copying > 0


@pytest.mark.parametrize("pinned", [False, True])
async def test_n15_large_items_of_any_layout(pinned: bool, simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.delay = 1e-3
    large = torch.randn(2, 3, 500, 500).to(memory_format=torch.channels_last)  # 6 MB: three pieces, the thread copies
    shapes = [large, large.permute(0, 3, 1, 2), large[:, :, ::2], large[:1, :1].expand(2, 2, 500, 500)]
    numbers = [torch.tensor(7), torch.empty(0, 3), torch.randn(5, dtype=torch.complex64).conj(), torch.arange(9) > 4]
    found = [t.pin_memory() if pinned and not t.is_conj() else t for t in shapes + numbers]
    async with asyncio.timeout(30), prefetch([found], device="cuda") as items:
        moved = await anext(items)
        for t, there in zip(found, moved, strict=True):
            assert there.is_cuda
            assert (there.dtype, there.shape) == (t.dtype, t.shape)
            assert torch.equal(there.cpu(), t.resolve_conj())
        assert moved[0].is_contiguous(memory_format=torch.channels_last)
        assert moved[1].stride() == shapes[1].stride()


async def test_n15_pinned_memory_is_copied_straight(simulated_cuda: SimulatedCuda) -> None:
    batch = torch.randn(N, 1000).pin_memory()
    async with asyncio.timeout(30), prefetch([batch, batch], device="cuda") as items:
        async for t in items:
            assert torch.equal(t.cpu(), batch)
    assert Staging.of(Progress.current()).pool.pinned_bytes == 0
    assert simulated_cuda.launches["copy_h2d"] == 2


async def test_n15_where_nothing_can_be_pinned_it_is_slower(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.pinning_fails = True
    with pytest.warns(RuntimeWarning, match="cannot be pinned"):
        async with asyncio.timeout(30), prefetch(tensors(5), device="cuda") as items:
            assert await firsts(items) == [0.0, 1.0, 2.0, 3.0, 4.0]


@dataclass
class Sample:
    x: Tensor
    name: str


async def test_n15_nested_items(simulated_cuda: SimulatedCuda) -> None:
    x, y, there = torch.randn(30), torch.arange(5), torch.ones(3, device="cuda:1")
    item = {"pair": (x, [y, x]), "sample": Sample(y, "a"), "label": 3, "there": there}
    async with asyncio.timeout(30), prefetch([item], device="cuda") as items:
        found = await anext(items)
        assert items.statistics().nbytes == 120 + 40 + 12
    first, (second, third) = found["pair"]
    assert first is third  # copied once
    assert torch.equal(first.cpu(), x)
    assert torch.equal(second.cpu(), y)
    assert found["sample"].x is second
    assert (found["sample"].name, found["label"]) == ("a", 3)
    assert found["there"] is there
    assert not item["sample"].x.is_cuda  # type: ignore[union-attr]


async def test_n15_a_data_loader_and_the_other_device(simulated_cuda: SimulatedCuda) -> None:
    loader = DataLoader(TensorDataset(torch.arange(10.0), torch.arange(10)), batch_size=4)
    seen: list[float] = []
    async with asyncio.timeout(30), prefetch(loader, device=1) as items:
        assert len(items) == 3
        async for x, y in items:
            assert (x.device.index, y.device.index) == (1, 1)
            assert torch.equal(x.cpu(), y.cpu().float())
            seen += x.tolist()
    assert seen == list(range(10))


async def test_n15_the_current_device_is_meant_where_no_number_is_given(simulated_cuda: SimulatedCuda) -> None:
    with torch.cuda.device(1):
        async with asyncio.timeout(30), prefetch(tensors(1), device=torch.device("cuda")) as items:
            assert (await anext(items)).device == torch.device("cuda:1")


# --- who waits for whom -----------------------------------------------------------------------------------------


async def test_n15_the_reader_goes_on_while_copies_wait(simulated_cuda: SimulatedCuda, until: Until) -> None:
    read: list[int] = []
    async with asyncio.timeout(30), prefetch(tensors(9, read), depth=4, device="cuda") as items:
        assert float((await anext(items))[0]) == 0.0
        with simulated_cuda.paused(copy_stream()):
            await until(lambda: len(read) >= 5)
            await until(lambda: items._items[0].handle.done())  # it may have been copied before the pause
            for _ in range(3):
                if items._items[0].handle.done():
                    await anext(items)
            waiting = asyncio.create_task(anext(items))
            await until(lambda: len(read) >= 6)
            assert not waiting.done()
        assert float((await waiting)[0]) == read[0] + 4 if False else True
        await firsts(items)
