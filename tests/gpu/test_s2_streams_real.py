"""S2 on a CUDA device: streams, events and copies are handles; done means that the data is there, on any stream."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist.handles import Progress
from aiodist.streams import CudaStream, Events

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

Spin = Callable[[float], None]
NUMEL = 1 << 18


def poisoned(numel: int = NUMEL) -> Tensor:
    """Return new memory of the device that is known to hold NaN."""
    t = torch.full((numel,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    return t


def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


async def test_s2_awaited_work_is_there_on_any_stream(spin: Spin) -> None:
    stream, other = CudaStream.of("compute"), side()
    for i in range(100):
        y = poisoned()
        x = torch.full((NUMEL,), float(i), device="cuda")
        stream.wait()

        def work(x: Tensor = x, y: Tensor = y) -> Tensor:
            spin(200e-6)
            return torch.mul(x, 2.0, out=y)

        async with asyncio.timeout(10):
            assert await stream.submit(work) is y
        with torch.cuda.stream(other):
            right = (y == 2.0 * i).all()
        other.synchronize()
        assert bool(right)


async def test_s2_a_handle_is_not_done_before_the_device(spin: Spin) -> None:
    stream = CudaStream.of("compute")
    await stream.submit(spin, 1e-3)  # what is made at first use is made
    handle = stream.submit(spin, 0.3)
    assert not handle.done()
    ticks = 0
    async with asyncio.timeout(10):
        while not handle.done():
            await asyncio.sleep(0)
            ticks += 1
    assert stream.stream.query()
    assert ticks > 10  # the loop continued
    assert handle.result() is None


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_s2_a_thousand_handles_on_three_streams(spin: Spin) -> None:
    dice = random.Random(0)
    streams = [CudaStream.of(role) for role in ("compute", "local", "global")]
    counters = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    seen = [torch.full((), -1, dtype=torch.int64, device="cuda") for _ in range(1000)]
    torch.cuda.synchronize()
    expected, counts = [], [0] * len(streams)

    def work(counter: Tensor, into: Tensor, seconds: float) -> Tensor:
        spin(seconds)
        counter.add_(1)
        return into.copy_(counter)

    handles = []
    for into in seen:
        k = dice.randrange(len(streams))
        counts[k] += 1
        expected.append(counts[k])
        handles.append(streams[k].submit(work, counters[k], into, dice.choice((0.0, 20e-6, 200e-6))))
    async with asyncio.timeout(60):
        results = await aiodist.gather(*handles)
    assert [int(t) for t in results] == expected
    assert len(Events.of(Progress.current())) == 0


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("numel", [0, 1, 1000, (5 << 20) + 13])
async def test_s2_copies_there_and_back(numel: int, pinned: bool) -> None:
    up, down = CudaStream.of("to-device"), CudaStream.of("to-host")
    for _ in range(5):
        host = torch.randn(numel, pin_memory=pinned)
        there = poisoned(numel)
        back = torch.full((numel,), float("nan"), pin_memory=pinned)
        async with asyncio.timeout(20):
            assert await up.copy(there, host) is there
            with torch.cuda.stream(side()):
                assert torch.equal(there.cpu(), host)
            await down.copy(back, there)
        assert torch.equal(back, host)


async def test_s2_a_copy_begins_after_what_the_current_stream_has_queued(spin: Spin) -> None:
    for pinned in (False, True):
        back = torch.full((NUMEL,), float("nan"), pin_memory=pinned)
        t = poisoned()
        spin(20e-3)
        t.fill_(7.0)
        async with asyncio.timeout(10):
            await CudaStream.of("to-host").copy(back, t)
        assert bool((back == 7).all())


async def test_s2_what_follows_a_copy_from_pinned_memory_comes_behind_it() -> None:
    stream = CudaStream.of("to-device")
    for i in range(50):
        host, there = torch.full((4 << 20,), float(i), pin_memory=True), poisoned(4 << 20)
        stream.copy(there, host)
        async with asyncio.timeout(10):
            assert bool(((await stream.submit(torch.mul, there, 2)) == 2 * i).all())


async def test_s2_any_layout_is_copied() -> None:
    host = torch.randn(40, 50)
    for view in (host.T, host[:, ::2], host[3:7]):
        there = torch.full((50, 60), float("nan"), device="cuda")[: view.shape[0], : view.shape[1]]
        there = there if there.shape == view.shape else torch.empty(view.shape, device="cuda")
        async with asyncio.timeout(10):
            await CudaStream.of("to-device").copy(there, view)
        assert torch.equal(there.cpu(), view)


async def test_s2_memory_of_a_dropped_handle_is_not_used_before_its_end(spin: Spin) -> None:
    """Tensor and handle are dropped; allocations on another stream meanwhile get other memory."""
    stream = CudaStream.of("compute")
    total = torch.zeros((), dtype=torch.float64, device="cuda")

    def work(t: Tensor) -> None:
        spin(50e-3)
        total.add_(t.sum(dtype=torch.float64))

    for i in range(5):
        t = torch.full((NUMEL,), 1.0, device="cuda")
        gone = weakref.ref(t)
        stream.wait()
        stream.submit(work, t).add_done_callback(lambda h: None)
        del t
        assert gone() is not None, i
        with torch.cuda.stream(side()):
            others = [torch.full((NUMEL,), float("nan"), device="cuda") for _ in range(20)]
        del others
    async with asyncio.timeout(10):
        await stream.record()
        while gone() is not None:  # noqa: ASYNC110  - what is waited for sets no event
            await asyncio.sleep(0)
    assert float(total) == 5.0 * NUMEL


async def test_s2_a_collection_of_garbage_frees_nothing_in_flight(spin: Spin) -> None:
    """As above, after the loop has parked, with the polled objects dropped too."""
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    total += torch.zeros(NUMEL, device="cuda").sum(dtype=torch.float64)  # what is loaded at first use is loaded
    torch.cuda.synchronize()

    def issue() -> weakref.ref[Tensor]:
        stream, t = CudaStream.of("compute"), torch.full((NUMEL,), 1.0, device="cuda")
        stream.wait()

        def work() -> None:
            spin(1.0)  # a collection takes its time
            total.add_(t.sum(dtype=torch.float64))

        stream.submit(work).add_done_callback(lambda _: None)
        return weakref.ref(t)

    gone = issue()
    await asyncio.sleep(0)
    gc.collect()
    assert gone() is not None
    async with asyncio.timeout(10):
        await CudaStream.of("compute").record()
    assert float(total) == NUMEL


async def test_s2_roles_are_made_once_for_each_device() -> None:
    roles = ("compute", "to-device", "to-host", "local", "global")
    for index in range(torch.cuda.device_count()):
        found = [CudaStream.of(role, index) for role in roles]
        assert len({one.stream.cuda_stream for one in found}) == len(roles)
        assert all(CudaStream.of(role, index) is one for role, one in zip(roles, found, strict=True))
        assert {one.device for one in found} == {torch.device("cuda", index)}
        handles = [one.submit(partial(torch.ones, 10, device=one.device)) for one in found]
        async with asyncio.timeout(10):
            assert all(bool((t == 1).all()) for t in await aiodist.gather(*handles))


async def test_s2_what_a_stream_is_given_may_raise(spin: Spin) -> None:
    stream = CudaStream.of("compute")
    with pytest.raises(RuntimeError, match=r"shapes|dim"):
        stream.submit(torch.mm, torch.ones(2, 3, device="cuda"), torch.ones(2, 3, device="cuda"))
    with pytest.raises(ValueError, match="expected the same"):
        stream.copy(torch.empty(3, device="cuda"), torch.empty(4))
    async with asyncio.timeout(10):
        await stream.submit(spin, 1e-4)


async def test_s2_work_goes_on_while_python_holds_the_loop(spin: Spin) -> None:
    """H1: the pieces of a copy through pageable memory need no loop."""
    host = torch.randn(8 << 20)
    there = poisoned(8 << 20)
    handle = CudaStream.of("to-device").copy(there, host)
    until = time.perf_counter() + 10
    while not handle.done() and time.perf_counter() < until:
        sum(range(1000))  # the loop does not run
    assert handle.done()
    assert torch.equal(there.cpu(), host)


async def test_s2_an_awaited_event_costs_little_cpu_when_it_is_far(spin: Spin) -> None:
    stream = CudaStream.of("compute")
    await stream.submit(spin, 1e-3)
    handle = stream.submit(partial(spin, 1.0))
    began, used = time.perf_counter(), time.process_time()
    async with asyncio.timeout(20):
        await handle
    share = (time.process_time() - used) / (time.perf_counter() - began)
    print(f"{share:.3f} CPU s/s")
    assert share < 0.5  # `python -m benchmarks gpu` has the figure to reach
