"""The cost of waiting for a CUDA device, on the host and on the device."""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import torch

from aiodist.backends import nccl
from aiodist.backends.nccl.library import IN_PROGRESS
from aiodist.handles import gather
from aiodist.streams import CudaStream
from benchmarks.gpu_turns import Bench, Way, in_turns, median, seconds_between, spin_rate

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["measure"]

_SMALL_NUMEL = 256
_WARMUPS = 10


async def measure(session: Session) -> list[Record]:
    """Measure the case of the session."""
    cases = {"await": _finished_soon, "parked": _parked, "wait_stream": _after_a_kernel, "nccl_overhead": _nccl}
    return await cases[session.plan.op](Bench.of(session))


class _Kernels:
    """Two kernels of known length: a long one, during which the second one is queued and timed."""

    def __init__(self, bench: Bench) -> None:
        rate = spin_rate(bench.sizes.wake)
        self.ahead = max(1, round(rate * bench.sizes.ahead))
        """The length of the first kernel, in cycles."""
        self.cycles = max(1, round(rate * bench.sizes.kernel))
        """The length of the second kernel, in cycles."""
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    async def gap(
        self, first: torch.cuda.Stream, order: Callable[[], Awaitable[None]], second: torch.cuda.Stream
    ) -> float:
        """Return seconds from the end of the first kernel to the end of the second one, which `order` lets start."""
        with torch.cuda.stream(first):
            torch.cuda._sleep(self.ahead)
            self._begin.record(first)
        await order()
        with torch.cuda.stream(second):
            torch.cuda._sleep(self.cycles)
            self._end.record(second)
        self._end.synchronize()
        return seconds_between(self._begin, self._end)

    async def alone(self, stream: torch.cuda.Stream) -> float:
        """Return the seconds of the second kernel."""
        return await self.gap(stream, _no_order, stream)


async def _no_order() -> None:
    pass


async def _finished_soon(bench: Bench) -> list[Record]:
    """Measure the await of an event after a short kernel, from the launch on, and `event.synchronize`."""
    kernels, stream, event = _Kernels(bench), CudaStream(), torch.cuda.Event()
    alone: list[float] = []

    async def awaited() -> None:
        torch.cuda._sleep(kernels.cycles)
        await stream.record()

    async def blocking() -> None:
        torch.cuda._sleep(kernels.cycles)
        event.record()
        event.synchronize()

    async def kernel() -> None:
        alone.append(await kernels.alone(stream.stream))

    calls = {"await": awaited, "blocking": blocking, "kernel": kernel}
    ways = [Way(name, once, queues=False) for name, once in calls.items()]
    samples = await in_turns(bench, ways, bench.sizes.waits)
    samples["kernel"] = alone[-len(samples["kernel"]) :]  # the device's own times
    seconds = median(samples)
    values = {name: (seconds[name] - seconds["kernel"]) * 1e6 for name in ("await", "blocking")}
    return [*await bench.session.timed("gpu_await", None, samples), *bench.values(**values)]


async def _parked(bench: Bench) -> list[Record]:
    """Measure the CPU time of all threads of the process while a long kernel is awaited."""
    cycles = max(1, round(spin_rate(bench.sizes.wake) * bench.sizes.long_kernel))
    stream = CudaStream()
    shares = []
    for _ in range(3):
        torch.cuda.synchronize(bench.device)
        handle = stream.submit(torch.cuda._sleep, cycles)
        began, used = perf_counter(), process_time()
        await handle
        shares.append((process_time() - used) / (perf_counter() - began))
    return bench.values(cpu=statistics.median(shares))


async def _after_a_kernel(bench: Bench) -> list[Record]:
    """Measure the time on the device between a kernel and a later one on another stream."""
    first, second = CudaStream.of("compute"), torch.cuda.Stream()
    kernels = _Kernels(bench)

    async def wait_stream() -> None:
        first.record().wait_stream(second)

    async def wait_event() -> None:
        second.wait_event(first.stream.record_event())

    async def awaited() -> None:
        await first.record()

    orders = {"wait_stream": wait_stream, "wait_event": wait_event, "await": awaited}
    samples: dict[str, list[float]] = {name: [] for name in (*orders, "kernel")}
    for turn in range(_WARMUPS + bench.sizes.waits // 5):
        found = {name: await kernels.gap(first.stream, order, second) for name, order in orders.items()}
        found["kernel"] = await kernels.alone(second)
        for name, seconds in found.items() if turn >= _WARMUPS else ():
            samples[name].append(seconds)
    medians = median(samples)
    values = {name: (medians[name] - medians["kernel"]) * 1e6 for name in orders}
    return [*await bench.session.timed("gpu_gap", None, samples), *bench.values(**values)]


# --- NCCL ------------------------------------------------------------------------------------------------------


async def _nccl(bench: Bench) -> list[Record]:
    """Measure small allreduces of one rank by NCCL, of aiodist and of nccl4py: issued, in flight, and awaited."""
    library = nccl.load()
    ours: Any = partial(bench.coll.allreduce, impl="nccl")
    comm = library.connect(1, 0, library.unique_id(), threading.Event())
    stream = torch.cuda.Stream()

    def theirs(t: torch.Tensor) -> None:
        comm.allreduce(t, t, library.ops["sum"], stream=stream.cuda_stream)
        while library.state(comm) == IN_PROGRESS:
            pass

    try:
        samples = await _nccl_samples(bench, ours, theirs, stream)
    finally:
        with suppress(Exception):  # an earlier error is the one to report
            await asyncio.to_thread(library.close, comm, 5.0)
    seconds = median(samples)
    times = ("await", "issue", "flight")
    values = {name: (seconds[f"aiodist:{name}"] - seconds[f"nccl4py:{name}"]) * 1e6 for name in times}
    return [*await bench.session.timed("gpu_nccl", _SMALL_NUMEL * 4, samples), *bench.values(**values)]


async def _nccl_samples(
    bench: Bench, ours: Callable[..., Any], theirs: Callable[..., None], stream: torch.cuda.Stream
) -> dict[str, list[float]]:
    """Return seconds of one allreduce; both sides wait for the device, each time or once for all."""
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
