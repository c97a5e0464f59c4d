"""Allreduces of a large tensor by ranks that share a GPU: cuda_ipc, copies, gloo, staged, and NCCL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiodist.bench.timing import slowest_of_each
from aiodist.errors import BackendUnavailable
from benchmarks.gpu_turns import Bench, Way, check, in_turns

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["by_gloo", "measure"]

_KICK = 13  # more elements than the measured size: nothing divides evenly
_SERIAL = "serial"
_Reduce = Callable[[Sequence[Tensor]], Awaitable[object]]


async def measure(session: Session) -> list[Record]:
    """Measure `cuda_ipc` and the implementations that the case compares it with.

    All ranks together read and write as many bytes as if each copied its tensor once (see
    `aiodist.collectives.cuda.ipc`), so the ratio of bandwidths is that of the times. The ranks copy at the same time,
    each within its own memory. Copies are queued, so operations are in flight together.
    """
    bench = Bench.of(session)
    case = session.plan.op
    _require(bench, "cuda_ipc")
    if case.startswith("allreduce_") and case != "allreduce_devices":
        reduces = {name: by_aiodist(bench, name) for name in ("cuda_ipc", "staged")}
        return await _measure(bench, reduces | {"gloo": partial(by_gloo, bench)}, fast=("cuda_ipc",), bounds=True)
    if case.startswith("nccl_"):
        _require(bench, "nccl")
    names = [name for name in ("cuda_ipc", "nccl", "staged") if not _missing(bench, name)]
    names = names[:2] if case.startswith("nccl_") else names
    return await _measure(bench, {name: by_aiodist(bench, name) for name in names}, fast=("cuda_ipc", "nccl"))


def _missing(bench: Bench, impl: str) -> str:
    """Return the reason why the communicator lacks an implementation; empty if there is none."""
    offer = bench.coll.availability().of("allreduce", impl, "cuda")
    return "" if offer.state == "available" else f"{impl} is {offer.state}: {offer.reason}"


def _require(bench: Bench, impl: str) -> None:
    """Raise `BackendUnavailable` if the communicator lacks an implementation."""
    if why := _missing(bench, impl):
        raise BackendUnavailable(why)


def by_aiodist(bench: Bench, impl: str) -> _Reduce:
    allreduce: Any = bench.coll.allreduce

    async def reduce(ts: Sequence[Tensor]) -> None:
        await asyncio.gather(*(allreduce(t, impl=impl) for t in ts))

    return reduce


async def by_gloo(bench: Bench, ts: Sequence[Tensor]) -> None:
    """Reduce `ts` with torch.distributed: gloo copies them to the host and back, on its own threads."""
    import torch.distributed as dist

    works = [dist.all_reduce(t, async_op=True) for t in ts]
    for work in works:
        work.wait()
    torch.cuda.synchronize(bench.device)


async def _measure(
    bench: Bench, reduces: dict[str, _Reduce], *, fast: Sequence[str], bounds: bool = False
) -> list[Record]:
    """Return the speed of `cuda_ipc` divided by that of each other implementation, with several operations in flight.

    `fast` implementations have `Sizes.batch` in flight, the others a fifth. `bounds` adds copies, and `cuda_ipc` with
    one operation in flight.
    """
    await _check(bench, reduces)
    nbytes = bench.sizes.allreduce_bytes
    source = torch.randn(nbytes // 4, device=bench.device)
    ts = [torch.empty_like(source) for _ in range(bench.sizes.batch)]

    def refill() -> None:  # repeated sums would overflow
        for t in ts:
            t.copy_(source)

    async def copied() -> None:
        for t in ts:
            t.copy_(source, non_blocking=True)

    flights = {name: len(ts) if name in fast else max(1, len(ts) // 5) for name in reduces}
    ways = [Way(name, partial(reduce, ts[: flights[name]]), prepare=refill) for name, reduce in reduces.items()]
    if bounds:
        flights["copy"] = len(ts)
        ways.append(Way("copy", copied))
        ways.append(Way(_SERIAL, partial(reduces["cuda_ipc"], ts[:1]), len(ts), refill))
    everywhere = await bench.coll.allgather_object(await in_turns(bench, ways))
    samples = {way.name: slowest_of_each([one[way.name] for one in everywhere]) for way in ways}
    samples = {name: [each / flights.get(name, 1) for each in found] for name, found in samples.items()}
    records = await bench.session.timed("allreduce", nbytes, samples)
    seconds = {record.impl: record.seconds or float("nan") for record in records}
    ours, serial = seconds.pop("cuda_ipc", 0.0), seconds.pop(_SERIAL, None)
    values = {name: took / ours for name, took in seconds.items()}
    if serial is not None:
        values["serial"] = serial * 1e3
    return [*records, *bench.values(**values)]


async def _check(bench: Bench, reduces: dict[str, _Reduce]) -> None:
    """Compare the sum of each implementation with that of float64 on the CPU."""
    numel = bench.sizes.allreduce_bytes // 4 + _KICK
    for name, reduce in reduces.items():
        inputs = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(bench.coll.size)]
        # the tensor is NaN until the copy ends, so a reduction that starts too early is seen
        t = torch.full((numel,), float("nan"), device=bench.device)
        t.copy_(inputs[bench.coll.rank].pin_memory(), non_blocking=True)
        await reduce([t])
        expected = torch.zeros(numel, dtype=torch.float64)
        for one in inputs:
            expected += one
        check(f"allreduce of {bench.coll.size} ranks by {name}", t, expected, rtol=1e-5, atol=1e-5)
