"""S6 and H11 on a CUDA device: `wait_stream` orders the device and not the host; a graph that is captured refuses."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist.streams import CudaStream, HostStream

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

Spin = Callable[[float], None]
NUMEL = 1 << 18
MODES = ("thread_local", "relaxed")  # in the "global" one CUDA forbids others to ask for events


def late(spin: Spin, into: Tensor, value: float, seconds: float = 2e-3) -> Tensor:
    spin(seconds)
    return into.fill_(value)


async def test_s6_wait_stream_orders_a_stream_behind_work(spin: Spin) -> None:
    first, second = CudaStream.of("compute"), torch.cuda.Stream()
    for i in range(50):
        t = torch.full((NUMEL,), float("nan"), device="cuda")
        torch.cuda.synchronize()
        handle = first.submit(late, spin, t, float(i))
        handle.wait_stream(second)
        with torch.cuda.stream(second):
            y = t + 1
        second.synchronize()
        assert bool((y == i + 1).all())
        async with asyncio.timeout(10):
            await handle


async def test_s6_wait_stream_does_not_hold_the_host(spin: Spin) -> None:
    first, second = CudaStream.of("compute"), torch.cuda.Stream()
    await first.submit(spin, 1e-3)
    t = torch.full((NUMEL,), float("nan"), device="cuda")
    assert bool((t * 2).isnan().all())  # a kernel is loaded at its first use, and that waits for the device
    torch.cuda.synchronize()
    handle = first.submit(late, spin, t, 3.0, 0.3)
    handle.wait_stream(second)
    with torch.cuda.stream(second):
        y = t * 2
        ended = torch.cuda.Event()
        ended.record(second)
    assert not ended.query()
    async with asyncio.timeout(10):
        await handle
    ended.synchronize()
    assert bool((y == 6).all())


async def test_s6_the_current_stream_is_meant_without_an_argument(spin: Spin) -> None:
    side = torch.cuda.Stream()
    t = torch.full((NUMEL,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        CudaStream.of("compute").submit(late, spin, t, 5.0).wait_stream()
        y = t + 0
    side.synchronize()
    assert bool((y == 5).all())


@pytest.mark.parametrize("numel", [1000, 8 << 20])
async def test_s6_behind_a_copy_from_pinned_memory(numel: int, spin: Spin) -> None:
    second = torch.cuda.Stream()
    for i in range(10):
        host = torch.full((numel,), float(i), pin_memory=True)
        t = torch.full((numel,), float("nan"), device="cuda")
        spin(1e-3)  # the copy begins after it
        handle = CudaStream.of("to-device").copy(t, host)
        handle.wait_stream(second)
        with torch.cuda.stream(second):
            right = (t == i).all()
        second.synchronize()
        assert bool(right)
        async with asyncio.timeout(10):
            await handle


async def test_s6_streams_wait_for_handles_and_hosts_for_streams(spin: Spin) -> None:
    t = torch.full((NUMEL,), float("nan"), device="cuda")
    torch.cuda.synchronize()
    copies = CudaStream.of("to-host")
    handle = CudaStream.of("compute").submit(late, spin, t, 4.0)
    copies.wait_handle(handle)
    back = torch.empty(NUMEL, pin_memory=True)
    async with HostStream("reader") as host, asyncio.timeout(10):
        copied = copies.submit(back.copy_, t, non_blocking=True)
        copied.wait_stream(host)
        assert await host.submit(lambda: float(back.sum())) == 4.0 * NUMEL


async def test_s6_behind_a_collective_of_one_rank(spin: Spin) -> None:
    side = torch.cuda.Stream()
    async with aiodist.init() as coll, asyncio.timeout(60):
        for i in range(20):
            t = torch.full((NUMEL,), float("nan"), device=coll.device)
            spin(1e-3)
            t.fill_(float(i))
            handle = coll.allreduce(t)
            handle.wait_stream(side)
            with torch.cuda.stream(side):
                right = (t == i).all()
            side.synchronize()
            assert bool(right)
            await handle


@pytest.mark.parametrize(
    "what", ["submit", "record", "copy", "wait", "wait_handle", "wait_stream", "allreduce", "recv"]
)
async def test_s6_a_captured_graph_holds_no_handles(what: str, spin: Spin) -> None:
    async with aiodist.init() as coll, asyncio.timeout(60):
        stream = CudaStream.of("compute")
        t, host = torch.ones(NUMEL, device=coll.device), torch.ones(NUMEL)
        torch.cuda.synchronize()
        handle = stream.submit(spin, 50e-3)
        calls: dict[str, Callable[[], Any]] = {
            "submit": lambda: stream.submit(t.add_, 1),
            "record": stream.record,
            "copy": lambda: stream.copy(t, host),
            "wait": stream.wait,
            "wait_handle": lambda: stream.wait_handle(handle),
            "wait_stream": handle.wait_stream,
            "allreduce": lambda: coll.allreduce(t),
            "recv": lambda: coll.recv(t, 0),
        }
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):  # `torch.cuda.graph` would wait for the device first
            graph.capture_begin(capture_error_mode="thread_local")
            y = t * 2
            with pytest.raises(RuntimeError, match="captures a CUDA graph"):
                calls[what]()
            graph.capture_end()
        await handle
        graph.replay()  # the capture is none the worse for it
        torch.cuda.synchronize()
        assert bool((y == 2).all())
        assert (await coll.allreduce(t)).sum() == NUMEL  # and so is the communicator


async def test_s6_a_graph_may_be_replayed_between_handles() -> None:
    stream = CudaStream.of("compute")
    t = torch.zeros(NUMEL, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        t.add_(1)
    async with asyncio.timeout(20):
        for i in range(20):
            await stream.submit(graph.replay)
            assert float(t[0]) == i + 1


@pytest.mark.parametrize("mode", MODES)
async def test_s6_handles_are_looked_at_while_a_graph_is_captured(mode: str, spin: Spin) -> None:
    """The progress thread asks for their events, though this thread captures and its loop does not run."""
    t, x = torch.zeros(NUMEL, device="cuda"), torch.ones(NUMEL, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    handle = CudaStream.of("compute").submit(late, spin, t, 5.0, 20e-3)
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode=mode)
        y = x + 1
        until = time.perf_counter() + 0.1
        while time.perf_counter() < until and not handle.done():
            pass
        graph.capture_end()
    assert handle.done()
    assert bool((await handle == 5).all())
    graph.replay()
    torch.cuda.synchronize()
    assert bool((y == 2).all())


@pytest.mark.parametrize("mode", MODES)
async def test_s6_items_are_prefetched_while_a_graph_is_captured(mode: str) -> None:
    """The reader's thread makes room on the device, and copies pass through memory that is pinned for them."""
    x = torch.ones(NUMEL, device="cuda")
    torch.cuda.synchronize()
    going, captured = threading.Event(), threading.Event()

    def source() -> Iterator[Tensor]:
        for i in range(20):
            yield torch.full((NUMEL << 2,), float(i))
            if i == 2:
                going.wait(20)
        captured.wait(20)

    async with aiodist.data.prefetch(source(), depth=25, device="cuda") as items, asyncio.timeout(60):
        assert bool(((await anext(items)) == 0).all())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            y = x + 1
            going.set()
            for _ in range(10_000):
                await asyncio.sleep(0)  # others may issue meanwhile, and this task does not
        captured.set()
        seen = 0
        async for t in items:
            seen += 1
            assert bool((t == seen).all())
    assert seen == 19
    graph.replay()
    torch.cuda.synchronize()
    assert bool((y == 2).all())
