"""What waiting for a CUDA device costs on the host, and on the device itself."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from time import perf_counter, process_time
from typing import Any

import torch

from aiodist.backends import nccl
from aiodist.backends.nccl.library import IN_PROGRESS
from aiodist.errors import BackendUnavailable
from aiodist.handles import gather
from aiodist.streams import CudaStream
from benchmarks.gpu_cases import Measured
from benchmarks.gpu_turns import (
    Bench,
    NotPossible,
    Way,
    check,
    in_turns,
    median,
    poison,
    seconds_between,
    spin_rate,
)

__all__ = ["behind_a_kernel", "finished_soon", "nccl_overhead", "parked"]

_NUMEL = 1 << 20
_SMALL_NUMEL = 256
_NCCL_TIMES = ("await", "issue", "flight")
_TRIES = 10


async def finished_soon(bench: Bench) -> Measured:
    """Measure the await of an event behind a short kernel, from the launch on, beside `event.synchronize`."""
    await _check_order(bench, _awaited)
    ahead, cycles = _cycles(bench)
    stream, event, events = CudaStream(), torch.cuda.Event(), _timing_events()
    kernels: list[float] = []

    async def awaited() -> None:
        torch.cuda._sleep(cycles)
        await stream.record()

    async def blocking() -> None:
        torch.cuda._sleep(cycles)
        event.record()
        event.synchronize()

    async def alone() -> None:
        kernels.append(_kernel_alone(stream.stream, (ahead, cycles), events))

    ways = [
        Way("await", awaited, queues=False),
        Way("blocking", blocking, queues=False),
        Way("kernel", alone, queues=False),
    ]
    samples = await in_turns(bench, ways, bench.sizes.waits)
    samples["kernel"] = kernels[-len(samples["kernel"]) :]  # as the device timed it
    seconds = median(samples)
    values = {name: (seconds[name] - seconds["kernel"]) * 1e6 for name in ("await", "blocking")}
    return Measured(values, records=await bench.session.timed("gpu_await", None, samples))


def _cycles(bench: Bench) -> tuple[int, int]:
    """Return how long the kernel `ahead` and the one that is measured count."""
    rate = spin_rate(bench.sizes.wake)
    return max(1, round(rate * bench.sizes.ahead)), max(1, round(rate * bench.sizes.kernel))


def _timing_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _kernel_alone(
    stream: torch.cuda.Stream, cycles: tuple[int, int], events: tuple[torch.cuda.Event, torch.cuda.Event]
) -> float:
    """Return what the second kernel takes by itself, queued with its events while the first one runs."""
    begin, end = events
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles[0])
        begin.record(stream)
        torch.cuda._sleep(cycles[1])
        end.record(stream)
    end.synchronize()
    return seconds_between(begin, end)


async def parked(bench: Bench) -> Measured:
    """Measure the CPU that all threads of the process take while a long kernel is awaited."""
    cycles = max(1, round(spin_rate(bench.sizes.wake) * bench.sizes.long_kernel))
    stream = CudaStream()
    shares = []
    for _ in range(3):
        torch.cuda.synchronize(bench.device)
        handle = stream.submit(torch.cuda._sleep, cycles)
        began, used = perf_counter(), process_time()
        await handle
        shares.append((process_time() - used) / (perf_counter() - began))
    return Measured({"cpu": statistics.median(shares)})


# --- streams ---------------------------------------------------------------------------------------------------

_Order = Callable[[CudaStream, torch.cuda.Stream], Awaitable[None]]


async def _awaited(first: CudaStream, second: torch.cuda.Stream) -> None:
    await first.record()


async def waited_for(first: CudaStream, second: torch.cuda.Stream) -> None:
    first.record().wait_stream(second)


async def _by_event(first: CudaStream, second: torch.cuda.Stream) -> None:
    second.wait_event(first.stream.record_event())


async def behind_a_kernel(bench: Bench) -> Measured:
    """Measure the time on the device from the end of a kernel to the begin of one on another stream behind it."""
    await _check_order(bench, waited_for)
    first, second = CudaStream.of("compute"), torch.cuda.Stream()
    cycles, events = _cycles(bench), _timing_events()
    orders: dict[str, _Order] = {"wait_stream": waited_for, "wait_event": _by_event, "await": _awaited}
    gaps: dict[str, list[float]] = {name: [] for name in orders}
    alone: list[float] = []
    for turn in range(_TRIES + bench.sizes.waits // 5):
        for name, order in orders.items():
            seconds = await _pair(first, second, order, cycles, events)
            if turn >= _TRIES:
                gaps[name].append(seconds)
        kernel = _kernel_alone(second, cycles, events)
        if turn >= _TRIES:
            alone.append(kernel)
    kernel = statistics.median(alone)
    values = {name: (seconds - kernel) * 1e6 for name, seconds in median(gaps).items()}
    records = await bench.session.timed("gpu_gap", None, {**gaps, "kernel": alone})
    return Measured(values, records=records)


async def _pair(
    first: CudaStream,
    second: torch.cuda.Stream,
    order: _Order,
    cycles: tuple[int, int],
    events: tuple[torch.cuda.Event, torch.cuda.Event],
) -> float:
    """Return seconds from the end of a kernel on `first` to the end of one on `second`."""
    begin, end = events
    with torch.cuda.stream(first.stream):
        torch.cuda._sleep(cycles[0])
        begin.record(first.stream)
    await order(first, second)
    with torch.cuda.stream(second):
        torch.cuda._sleep(cycles[1])
        end.record(second)
    end.synchronize()
    return seconds_between(begin, end)


async def _check_order(bench: Bench, order: _Order) -> None:
    """Compute on one stream, behind a kernel, and go on at once on another; in memory that held NaN."""
    first, second = CudaStream.of("compute"), torch.cuda.Stream()
    cycles, _ = _cycles(bench)
    generator = torch.Generator().manual_seed(await bench.seed())
    for _ in range(_TRIES):
        host = torch.randn(_NUMEL // _TRIES, generator=generator)
        x = host.to(bench.device)
        y = torch.full_like(x, float("nan"))
        poison(bench.device, x.nbytes)
        torch.cuda.synchronize(bench.device)
        with torch.cuda.stream(first.stream):
            torch.cuda._sleep(cycles)
            torch.mul(x, 3.0, out=y)
        await order(first, second)
        with torch.cuda.stream(second):
            z = y + x
        second.synchronize()
        check(f"a kernel behind {order.__name__.strip('_')}", z, host.double() * 4, rtol=1e-6, atol=1e-6)


# --- NCCL ------------------------------------------------------------------------------------------------------


async def nccl_overhead(bench: Bench) -> Measured:
    """Measure small allreduces of one rank by NCCL beside nccl4py's own calls: issued, in flight, and awaited."""
    try:
        library = nccl.load()
    except BackendUnavailable as why:
        raise NotPossible(str(why)) from None
    ours: Any = partial(bench.coll.allreduce, impl="nccl")
    comm = library.connect(1, 0, library.unique_id(), threading.Event())
    stream = torch.cuda.Stream()

    def theirs(t: torch.Tensor) -> None:
        comm.allreduce(t, t, library.ops["sum"], stream=stream.cuda_stream)
        while library.state(comm) == IN_PROGRESS:
            pass

    try:
        await _check_nccl(bench, ours)
        samples = await _nccl_samples(bench, ours, theirs, stream)
    finally:
        with suppress(Exception):  # what went wrong before is the one to tell
            await asyncio.to_thread(library.close, comm, 5.0)
    seconds = median(samples)
    values = {name: (seconds[f"aiodist:{name}"] - seconds[f"nccl4py:{name}"]) * 1e6 for name in _NCCL_TIMES}
    return Measured(values, records=await bench.session.timed("gpu_nccl", _SMALL_NUMEL * 4, samples))


async def _nccl_samples(
    bench: Bench,
    ours: Any,  # noqa: ANN401
    theirs: Callable[[torch.Tensor], None],
    stream: torch.cuda.Stream,
) -> dict[str, list[float]]:
    """Return seconds of one allreduce; both sides wait until the device is done, each time or once for all."""
    count = bench.sizes.flight
    mine = [torch.ones(_SMALL_NUMEL, device=bench.device) for _ in range(count)]
    others = [t.clone() for t in mine]
    issued: dict[str, list[float]] = {"aiodist": [], "nccl4py": []}

    async def our_flight() -> None:
        began = perf_counter()
        handles = [ours(t) for t in mine]
        issued["aiodist"].append(perf_counter() - began)
        await gather(*handles)

    async def their_flight() -> None:
        began = perf_counter()
        for t in others:
            theirs(t)
        issued["nccl4py"].append(perf_counter() - began)
        stream.synchronize()

    async def awaited() -> None:
        await ours(mine[0])

    async def synchronised() -> None:
        theirs(others[0])
        stream.synchronize()

    ways = [
        Way("aiodist:flight", our_flight, queues=False),
        Way("nccl4py:flight", their_flight, queues=False),
        Way("aiodist:await", awaited, bench.sizes.batch, queues=False),
        Way("nccl4py:await", synchronised, bench.sizes.batch, queues=False),
    ]
    samples = await in_turns(bench, ways, bench.sizes.waits)
    for name, found in issued.items():
        flights = samples[f"{name}:flight"]
        samples[f"{name}:issue"] = [seconds / count for seconds in found[-len(flights) :]]
        samples[f"{name}:flight"] = [seconds / count for seconds in flights]
    return samples


async def _check_nccl(bench: Bench, ours: Any) -> None:  # noqa: ANN401
    host = torch.randn(_NUMEL, generator=torch.Generator().manual_seed(await bench.seed()))
    t = torch.full((_NUMEL,), float("nan"), device=bench.device)
    t.copy_(host)
    check("allreduce of one rank by NCCL", await ours(t), host.double(), rtol=0.0, atol=0.0)
