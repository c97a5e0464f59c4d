"""N15 on a CUDA device: prefetched items are ready on any stream, and copied during the computation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from aiodist.data import prefetch
from aiodist.handles import Scheduler
from aiodist.streams import CudaStream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.timeout(120),
]


def batches(count: int, numel: int, *, pinned: bool = False) -> Iterator[Tensor]:
    for i in range(count):
        yield torch.full((numel,), float(i), pin_memory=pinned)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("numel", [1, 1000, 5 << 20])
async def test_n15_items_are_right_at_once_on_any_stream(numel: int, pinned: bool) -> None:
    side = torch.cuda.Stream()
    dirty = [torch.full((numel,), float("nan"), device="cuda") for _ in range(8)]
    del dirty
    async with asyncio.timeout(100):
        for _ in range(10):
            async with prefetch(batches(20, numel, pinned=pinned), depth=3, device="cuda") as items:
                expected = 0.0
                async for t in items:
                    with torch.cuda.stream(side):
                        assert bool((t == expected).all())
                    expected += 1
            assert expected == 20
    assert Scheduler.current().in_flight == 0


async def test_n15_memory_is_not_used_anew_before_the_consumer_has_computed() -> None:
    side = torch.cuda.Stream()
    sums = []
    async with asyncio.timeout(100), prefetch(batches(50, 1 << 20), depth=2, device="cuda") as items:
        with torch.cuda.stream(side):
            async for t in items:
                torch.cuda._sleep(5_000_000)  # a few milliseconds
                sums.append(t.sum(dtype=torch.float64))
                del t
        side.synchronize()
    assert [float(total) for total in sums] == [float(i << 20) for i in range(50)]


async def test_n15_the_next_item_is_copied_while_this_one_is_computed_on() -> None:
    """The loop is held while the device computes: the following items arrive nevertheless.

    Not the first ones of a process: the driver pins memory, and loads a kernel, only when the device is idle.
    """
    async with asyncio.timeout(100), prefetch(batches(4, 1 << 20), depth=2, device="cuda") as items:
        assert [float(t.add_(1)[0]) async for t in items] == [1.0, 2.0, 3.0, 4.0]
    async with asyncio.timeout(100), prefetch(batches(4, 1 << 20), depth=2, device="cuda") as items:
        first = await anext(items)
        torch.cuda._sleep(400_000_000)  # some 200 ms
        first += 1
        computed = torch.cuda.Event()
        computed.record()
        others = [await anext(items) for _ in range(3)]
        assert not computed.query()
        assert [float(t[0]) for t in (first, *others)] == [1.0, 1.0, 2.0, 3.0]


async def test_n15_nested_items_of_any_layout() -> None:
    images = torch.randn(4, 3, 50, 50).to(memory_format=torch.channels_last)
    packed = pack_sequence([torch.ones(5), torch.ones(2)])
    sparse = torch.eye(4).to_sparse()
    item = {"x": (images, images[:, :, ::2]), "n": torch.tensor(3), "z": torch.empty(0), "p": packed, "s": sparse}
    async with asyncio.timeout(60), prefetch([item], device="cuda") as items:
        found: Any = await anext(items)
    assert torch.equal(found["x"][0].cpu(), images)
    assert found["x"][0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found["x"][1].cpu(), images[:, :, ::2])
    assert (found["n"].item(), found["z"].numel()) == (3, 0)
    assert isinstance(found["p"], PackedSequence)
    assert found["p"].data.is_cuda
    assert found["s"].is_cuda
    assert torch.equal(found["s"].to_dense().cpu(), torch.eye(4))


async def test_n15_a_loader_with_processes_and_pinned_memory() -> None:
    data = TensorDataset(torch.arange(1000.0).view(-1, 1).expand(-1, 1000).contiguous(), torch.arange(1000))
    loader = DataLoader(data, batch_size=50, num_workers=2, pin_memory=True, multiprocessing_context="spawn")
    seen: list[int] = []
    async with asyncio.timeout(100), prefetch(loader, device="cuda") as items:
        async for x, y in items:
            assert torch.equal(x[:, -1], y.float())
            seen += y.tolist()
    assert seen == list(range(1000))


async def test_n15_copies_overlap_with_the_computation() -> None:
    """A copy of 64 MiB during a computation of about the same time takes hardly longer than the longer of the two."""
    numel, count = 16 << 20, 20
    source = [torch.randn(numel).pin_memory() for _ in range(2)] * (count // 2)
    x = torch.randn(4096, 4096, device="cuda")

    def compute() -> None:
        torch.mm(x, x)

    async def epoch(device: str | None, computes: bool) -> float:
        async with prefetch(source, depth=2, device=device) as items:
            began = time.perf_counter()
            async for _ in items:
                if computes:
                    compute()
                    await CudaStream().record()
            torch.cuda.synchronize()
            return time.perf_counter() - began

    async with asyncio.timeout(100):
        await epoch("cuda", True)
        copying = min([await epoch("cuda", False) for _ in range(3)])
        computing = min([await epoch(None, True) for _ in range(3)])
        both = min([await epoch("cuda", True) for _ in range(3)])
    assert both < max(copying, computing) + 0.5 * min(copying, computing)
