"""N15: items go to a (simulated) CUDA device ahead of time. Kinds of items are in test_n15_nesting.py."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import aiodist
from aiodist.data import Prefetched, prefetch
from aiodist.errors import BackendError
from aiodist.handles import Scheduler
from aiodist.streams import CudaStream
from aiodist.testing import run_ranks
from aiodist.testing.seams.progress import transport_lock
from tests.support.blocking import blocked_until
from tests.support.simulated_cuda.device import SimulatedCuda

pytestmark = pytest.mark.timeout(60)

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


async def firsts(items: Prefetched[Tensor]) -> list[float]:
    """Take all items; read each immediately on a stream that is not ordered after the copy."""
    side: Any = torch.cuda.Stream()
    found = []
    async for t in items:
        assert t.is_cuda
        with torch.cuda.stream(side):
            host = t.cpu()
        assert bool((host == host[0]).all())
        found.append(float(host[0]))
    return found


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 1},
        {"depth": 7},
        {"transform": times_ten, "workers": 3, "depth": 5},
    ],
    ids=["defaults", "depth 1", "depth 7", "workers"],
)
@pytest.mark.parametrize("source", [tensors, async_tensors])
async def test_n15_every_item_is_on_the_device_in_order(
    source: Callable[[int], Any], options: dict[str, Any], simulated_cuda: SimulatedCuda
) -> None:
    async with asyncio.timeout(30), prefetch(source(20), device="cuda", **options) as items:
        factor = 10.0 if "transform" in options else 1.0
        assert await firsts(items) == [i * factor for i in range(20)]
    assert Scheduler.current().in_flight == 0


@pytest.mark.thorough
@pytest.mark.asyncio(loop_factories=["uvloop"])  # a process takes seconds to start
async def test_n15_processes_make_what_goes_to_the_device(simulated_cuda: SimulatedCuda) -> None:
    opened = prefetch(tensors(4), transform=times_ten, kind="process", device="cuda")
    async with asyncio.timeout(50), opened as items:
        assert await firsts(items) == [0.0, 10.0, 20.0, 30.0]
        assert items.statistics().copying_seconds > 0


@pytest.mark.drawn(1)
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
    assert simulated_cuda.launches["copy_h2d"] == 2


async def test_n15_pinned_memory_is_copied_straight_beside_other_memory(simulated_cuda: SimulatedCuda) -> None:
    item = (torch.randn(N, 1000).pin_memory(), torch.arange(N))
    async with asyncio.timeout(30), prefetch([item], device="cuda") as items:
        batch, labels = await anext(items)
        assert torch.equal(batch.cpu(), item[0])
        assert torch.equal(labels.cpu(), item[1])
    assert simulated_cuda.launches["copy_h2d"] == 2  # 4 MB would be two pieces


async def test_n15_where_nothing_can_be_pinned_it_is_slower(simulated_cuda: SimulatedCuda) -> None:
    simulated_cuda.pinning_fails = True
    with pytest.warns(RuntimeWarning, match="cannot be pinned"):
        async with asyncio.timeout(30), prefetch(tensors(5), device="cuda") as items:
            assert await firsts(items) == [0.0, 1.0, 2.0, 3.0, 4.0]


async def test_n15_nested_items(simulated_cuda: SimulatedCuda) -> None:
    x, y, there = torch.randn(30), torch.arange(5), torch.ones(3, device="cuda:1")
    item: dict[str, Any] = {"pair": (x, [y, x]), "sample": {"x": y}, "label": 3, "there": there}
    async with asyncio.timeout(30), prefetch([item], device="cuda") as items:
        found = await anext(items)
        assert items.statistics().nbytes == 120 + 40 + 12
    first, (second, third) = found["pair"]
    assert first is third  # copied once
    assert torch.equal(first.cpu(), x)
    assert torch.equal(second.cpu(), y)
    assert found["sample"]["x"] is second
    assert found["label"] == 3
    assert found["there"] is there
    assert not item["sample"]["x"].is_cuda


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


async def test_n15_the_reader_goes_on_while_copies_wait(simulated_cuda: SimulatedCuda, until: Until) -> None:
    read: list[int] = []
    opened = prefetch(tensors(9, read, numel=1 << 20), depth=4, device="cuda")
    async with asyncio.timeout(30):
        with simulated_cuda.paused(copy_stream()):
            items = await opened.__aenter__()
            waiting = asyncio.create_task(anext(items))
            await until(lambda: len(read) == 4)  # 16 MiB, all the pinned pieces there are
            assert not waiting.done()
        assert float((await waiting)[0]) == 0.0
        assert await firsts(items) == list(range(1, 9))
        await opened.__aexit__(None, None, None)
    assert items.statistics().copying_seconds > 0


async def test_n15_the_next_item_is_copied_while_this_one_is_computed_on(simulated_cuda: SimulatedCuda) -> None:
    async with asyncio.timeout(30), prefetch(tensors(4), depth=2, device="cuda") as items:
        first = await anext(items)
        with simulated_cuda.paused(torch.cuda.current_stream()):
            doubled = first * 2
            others = [await anext(items) for _ in range(3)]  # on the device, though it has not computed
        assert [float(t[0]) for t in (doubled, *others)] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("numel", [N, 2 << 20])
async def test_n15_items_are_copied_while_the_consumer_holds_the_loop(
    numel: int, simulated_cuda: SimulatedCuda
) -> None:
    async with asyncio.timeout(30), prefetch(tensors(3, numel=numel), depth=1, device="cuda") as items:
        await anext(items)
        assert blocked_until(lambda: simulated_cuda.launches["copy_h2d"] == 2)
        torch.cuda.synchronize()


async def test_n15_reading_does_not_wait_for_the_transport_lock(simulated_cuda: SimulatedCuda, until: Until) -> None:
    read: list[int] = []
    opened = prefetch(tensors(9, read), depth=4, device="cuda")
    async with asyncio.timeout(30):
        with transport_lock:  # as the progress thread in a large transfer
            items = await opened.__aenter__()
            await until(lambda: len(read) == 4)
        assert await firsts(items) == list(range(9))
        await opened.__aexit__(None, None, None)


async def test_n15_memory_is_not_used_anew_before_the_consumer_has_computed(simulated_cuda: SimulatedCuda) -> None:
    """The fixture reports work that used freed memory."""
    side: Any = torch.cuda.Stream()
    sums = []
    async with asyncio.timeout(30), prefetch(tensors(6), depth=1, device="cuda") as items:
        with simulated_cuda.paused(side), torch.cuda.stream(side):
            async for t in items:
                sums.append(t.sum())
                del t  # the copy stream is far ahead, and may have the memory as soon as it is free
            await CudaStream.of("to-device").record()
        side.synchronize()
    assert [float(t) for t in sums] == [1000.0 * i for i in range(6)]


async def test_n15_room_is_made_on_the_copy_stream(simulated_cuda: SimulatedCuda) -> None:
    """On any other stream the allocator gives memory away that work queued there has yet to read."""
    async with asyncio.timeout(30), prefetch(tensors(1), device="cuda") as items:
        block = simulated_cuda.memory.block(await anext(items))
        assert block is not None
        assert block.lane is copy_stream().lane
        assert torch.cuda.current_stream().lane in block.users  # type: ignore[attr-defined]


async def test_n15_nothing_is_left_on_the_device(simulated_cuda: SimulatedCuda, until: Until) -> None:
    async with asyncio.timeout(30), prefetch(tensors(9), depth=3, device="cuda") as items:
        await anext(items)
        await until(lambda: Scheduler.current().in_flight == 3 * 4 * N)
    assert Scheduler.current().in_flight == 0
    await until(lambda: simulated_cuda.allocated() == 0)  # no garbage collector is needed


@pytest.mark.parametrize("cancelled", [False, True])
async def test_n15_leaving_waits_for_the_copies_under_way(
    cancelled: bool, simulated_cuda: SimulatedCuda, until: Until
) -> None:
    read: list[int] = []
    entered = asyncio.Event()

    async def leave() -> None:
        async with prefetch(tensors(9, read), depth=3, device="cuda"):
            await until(lambda: len(read) == 3)
            entered.set()
            if cancelled:
                await asyncio.Event().wait()

    async with asyncio.timeout(30):
        with simulated_cuda.paused(copy_stream()):
            leaving = asyncio.create_task(leave())
            await entered.wait()
            if cancelled:
                leaving.cancel()
            await until(lambda: not [t for t in threading.enumerate() if t.name == "aiodist-prefetch"])
            for _ in range(20):
                await asyncio.sleep(0)
            assert not leaving.done()
        await asyncio.wait([leaving])
    assert leaving.cancelled() is cancelled
    await until(lambda: simulated_cuda.allocated() == 0)


async def test_n15_a_wait_that_is_cancelled_loses_no_item(simulated_cuda: SimulatedCuda) -> None:
    opened = prefetch(tensors(3), device="cuda")
    async with asyncio.timeout(30):
        with simulated_cuda.paused(copy_stream()):
            items = await opened.__aenter__()
            waiting = asyncio.create_task(anext(items))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert await firsts(items) == [0.0, 1.0, 2.0]
        await opened.__aexit__(None, None, None)


@pytest.mark.parametrize("where", ["source", "transform"])
async def test_n15_an_error_comes_after_the_items_before_it(where: str, simulated_cuda: SimulatedCuda) -> None:
    def failing(t: Tensor) -> Tensor:
        if float(t[0]) == 2.0:
            raise LookupError("item 2")
        return t

    options: Any = {"transform": failing, "workers": 3} if where == "transform" else {}
    source = tensors(9) if where == "transform" else map(failing, tensors(9))
    opened = prefetch(source, device="cuda", depth=4, **options)
    async with asyncio.timeout(30):
        with simulated_cuda.paused(copy_stream()):  # what comes before it arrives last
            items = await opened.__aenter__()
            waiting = asyncio.create_task(anext(items))
            await asyncio.sleep(0)
        assert float((await waiting)[0]) == 0.0
        assert float((await anext(items))[0]) == 1.0
        with pytest.raises(LookupError, match="item 2"):
            await anext(items)
        assert await firsts(items) == []
        await opened.__aexit__(None, None, None)
    assert Scheduler.current().in_flight == 0


async def test_n15_a_copy_that_fails_ends_the_stream(simulated_cuda: SimulatedCuda) -> None:
    def source() -> Iterator[Any]:
        yield torch.ones(3)
        yield {"x": torch.ones(3), "y": _Unmovable()}
        raise AssertionError("nothing is read after the error was seen")

    async with asyncio.timeout(30), prefetch(source(), depth=1, device="cuda") as items:
        assert (await anext(items)).tolist() == [1.0, 1.0, 1.0]
        with pytest.raises(LookupError, match="cannot be pinned"):
            await anext(items)
        assert await firsts(items) == []
    assert Scheduler.current().in_flight == 0


class _Unmovable:
    def pin_memory(self) -> None:
        raise LookupError("cannot be pinned")

    def to(self, device: object, *, non_blocking: bool) -> None:
        raise AssertionError("never")


async def test_n15_a_device_that_is_lost_is_an_error_of_the_item(simulated_cuda: SimulatedCuda) -> None:
    opened = prefetch(tensors(5), depth=2, device="cuda")
    async with asyncio.timeout(30):
        with simulated_cuda.paused(copy_stream()):
            items = await opened.__aenter__()
            waiting = asyncio.create_task(anext(items))
            await asyncio.sleep(0)
            simulated_cuda.fail(0, "an illegal memory access was encountered")
        with pytest.raises((BackendError, RuntimeError), match="illegal memory access"):
            await waiting
        assert await firsts(items) == []
        await opened.__aexit__(None, None, None)


class Graph:
    """Moves itself, as the batches of graph libraries do."""

    def __init__(self, x: Tensor, how: tuple[Any, ...] = ()) -> None:
        self.x = x
        self.how = how

    def pin_memory(self) -> Graph:
        return Graph(self.x.pin_memory(), (*self.how, threading.current_thread().name))

    def to(self, device: torch.device, *, non_blocking: bool) -> Graph:
        stream = torch.cuda.current_stream()
        return Graph(self.x.to(device, non_blocking=non_blocking), (*self.how, self.x.is_pinned(), stream))


async def test_n15_what_moves_itself_does_so_when_it_is_taken(simulated_cuda: SimulatedCuda) -> None:
    side: Any = torch.cuda.Stream()
    graph = Graph(torch.ones(5))
    source: list[Any] = [[graph, torch.arange(3)]]
    async with asyncio.timeout(30), prefetch(source, device="cuda") as items:
        with torch.cuda.stream(side):
            moved, numbers = await anext(items)
            assert moved.how == ("aiodist-prefetch", True, side)
            assert (moved.x + 1).tolist() == [2.0] * 5
            assert numbers.tolist() == [0, 1, 2]
    assert graph.x.device.type == "cpu"


async def test_n15_tensors_that_only_torch_can_move(simulated_cuda: SimulatedCuda) -> None:
    weight = nn.Parameter(torch.ones(3))
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    async with asyncio.timeout(30), prefetch([(weight, packed)], device="cuda") as items:
        there, sequence = await anext(items)
        assert there.is_cuda
        (there * 3).sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [3.0] * 3  # the way to the device is a part of the graph
        assert sequence.data.is_cuda
        assert sequence.data.tolist() == [1.0] * 3


class _Immovable(Graph):
    def pin_memory(self) -> Graph:
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> Graph:
        raise LookupError("stays")


async def test_n15_what_cannot_move_ends_the_stream(simulated_cuda: SimulatedCuda) -> None:
    source: Iterator[Any] = iter([torch.ones(2), _Immovable(torch.ones(3)), torch.ones(2), torch.ones(2)])
    async with asyncio.timeout(30), prefetch(source, depth=3, device="cuda") as items:
        await anext(items)
        with pytest.raises(LookupError, match="stays"):
            await anext(items)
        assert await firsts(items) == []
        assert items.statistics().items == 1
    assert Scheduler.current().in_flight == 0


@pytest.mark.thorough
def test_n15_every_rank_prefetches_and_reduces(simulated_cuda: SimulatedCuda) -> None:
    async def main() -> list[float]:
        async with aiodist.init() as coll:
            mine = (t + coll.rank for t in tensors(4, numel=1 << 20))  # 4 MiB: large
            async with prefetch(mine, device="cuda") as items:
                return [await coll.allreduce(float(t[-1])) async for t in items]

    assert run_ranks(2, main) == [[1.0, 3.0, 5.0, 7.0]] * 2


async def test_n15_copying_counts_as_work_that_may_be_hidden(
    simulated_cuda: SimulatedCuda, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1.0]
    for module in ("items", "prefetch", "reading"):
        monkeypatch.setattr(sys.modules[f"aiodist.data.{module}"], "perf_counter", lambda: now[0])
    opened = prefetch(tensors(4), depth=4, device="cuda")
    async with asyncio.timeout(30):
        with simulated_cuda.paused(copy_stream()):
            items = await opened.__aenter__()
            await until(lambda: simulated_cuda.launches["copy_h2d"] == 4)
            now[0] = 6.0
        assert await firsts(items) == [0.0, 1.0, 2.0, 3.0]
        await opened.__aexit__(None, None, None)
    found = items.statistics()
    assert (found.copying_seconds, found.waited_seconds, found.hidden) == (20.0, 0.0, 1.0)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
async def test_n15_the_cpu_is_no_device_to_go_to(device: Any) -> None:
    source = list(tensors(2))
    async with asyncio.timeout(30), prefetch(source, device=device) as items:
        for t in source:
            assert await anext(items) is t
        assert items.statistics().copying_seconds == 0


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda")])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
async def test_n15_without_cuda_the_block_says_what_to_do(device: Any) -> None:
    opened = prefetch(tensors(2), device=device)
    with pytest.raises(RuntimeError, match="leave `device` away"):
        await opened.__aenter__()


async def test_n15_a_device_that_is_not_there(simulated_cuda: SimulatedCuda) -> None:
    with pytest.raises(RuntimeError, match="there are 2 CUDA devices"):
        await prefetch(tensors(2), device="cuda:2").__aenter__()


@pytest.mark.parametrize("device", ["mps", "meta", "gpu", torch.device("xpu"), -1, 1.5])
def test_n15_devices_of_other_kinds_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="expected a CUDA device, the CPU, or None"):
        prefetch(tensors(2), device=device)
