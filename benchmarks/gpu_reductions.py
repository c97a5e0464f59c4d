"""Allreduces of a large tensor by ranks that share a GPU, beside copies, gloo, our own staging, and NCCL."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist.bench.peers import opened
from aiodist.bench.timing import slowest_of_each
from benchmarks.gpu_cases import Measured
from benchmarks.gpu_turns import Bench, NotPossible, Way, check, in_turns

__all__ = ["beside_copies", "beside_nccl", "on_several_devices"]

_KICK = 13  # elements more than are measured: nothing divides evenly
_SERIAL = "cuda_ipc, one by one"
_Reduce = Callable[[Sequence[Tensor]], Awaitable[object]]


async def beside_copies(bench: Bench) -> Measured:
    """Measure `cuda_ipc` beside what must be copied, staging, and torch's gloo; in flight, and one by one.

    All ranks together read and write as many bytes as if each copied its tensor once (see
    `aiodist.collectives.cuda.ipc`), so the ratio of bandwidths is that of the times. The ranks copy at the same time,
    each within its own memory; as copies are queued one behind the other, so are as many operations in flight.
    """
    _require(bench, "cuda_ipc")
    async with opened(["gloo"], bench.coll):
        reduces = {name: by_aiodist(bench, name) for name in ("cuda_ipc", "staged")} | {"gloo": partial(by_gloo, bench)}
        return await _measure(bench, reduces, quick=("cuda_ipc",), bounds=True)


async def beside_nccl(bench: Bench) -> Measured:
    """Measure `cuda_ipc` beside NCCL, which was told that ranks may share a device."""
    _require(bench, "cuda_ipc")
    _require(bench, "nccl")
    reduces = {name: by_aiodist(bench, name) for name in ("cuda_ipc", "nccl")}
    return await _measure(bench, reduces, quick=tuple(reduces))


async def on_several_devices(bench: Bench) -> Measured:
    """Measure `cuda_ipc` over the links between GPUs."""
    _require(bench, "cuda_ipc")
    names = [name for name in ("cuda_ipc", "nccl", "staged") if _why_not(bench, name) is None]
    measured = await _measure(bench, {name: by_aiodist(bench, name) for name in names}, quick=("cuda_ipc", "nccl"))
    missing = {} if "nccl" in names else {"nccl": _why_not(bench, "nccl") or ""}
    return Measured(measured.values, missing, measured.records)


def _why_not(bench: Bench, impl: str) -> str | None:
    offer = bench.coll.availability().of("allreduce", impl, "cuda")
    return None if offer.state == "available" else f"{impl} is {offer.state}: {offer.reason}"


def _require(bench: Bench, impl: str) -> None:
    """Raise NotPossible where the communicator lacks `impl`: nothing else may run in its place."""
    if (why := _why_not(bench, impl)) is not None:
        raise NotPossible(why)


def by_aiodist(bench: Bench, impl: str) -> _Reduce:
    allreduce: Any = bench.coll.allreduce

    async def reduce(ts: Sequence[Tensor]) -> None:
        await asyncio.gather(*(allreduce(t, impl=impl) for t in ts))

    return reduce


async def by_gloo(bench: Bench, ts: Sequence[Tensor]) -> None:
    """Reduce `ts` as torch.distributed does: gloo copies them to the host and back, on threads of its own."""
    import torch.distributed as dist

    works = [dist.all_reduce(t, async_op=True) for t in ts]
    for work in works:
        work.wait()
    torch.cuda.synchronize(bench.device)


async def _measure(
    bench: Bench, reduces: dict[str, _Reduce], *, quick: Sequence[str], bounds: bool = False
) -> Measured:
    """Return how many times as fast `cuda_ipc` is as each other way, by the time of one operation of several in flight.

    The `quick` ways have `Sizes.batch` in flight, the others a fifth. With `bounds` copies are measured as well, and
    what `cuda_ipc` takes where each operation is awaited before the next.
    """
    await _check(bench, reduces)
    nbytes = bench.sizes.allreduce_bytes
    source = torch.randn(nbytes // 4, device=bench.device)
    ts = [torch.empty_like(source) for _ in range(bench.sizes.batch)]

    def refill() -> None:  # sums of sums would be infinite soon
        for t in ts:
            t.copy_(source)

    async def copied() -> None:
        for t in ts:
            t.copy_(source, non_blocking=True)

    flights = {name: len(ts) if name in quick else max(1, len(ts) // 5) for name in reduces}
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
    return Measured(values, records=records)


async def _check(bench: Bench, reduces: dict[str, _Reduce]) -> None:
    """Compare each way's sum, of the size that is measured and a few more elements, with float64's on the CPU."""
    numel = bench.sizes.allreduce_bytes // 4 + _KICK
    for name, reduce in reduces.items():
        seed = await bench.seed()
        expected = torch.zeros(numel, dtype=torch.float64)
        mine = torch.empty(0)
        for rank in range(bench.coll.size):
            one = torch.randn(numel, generator=torch.Generator().manual_seed(seed + rank))
            expected += one
            mine = one if rank == bench.coll.rank else mine
        # It is NaN until the copy is done: who begins too soon, or leaves something out, is seen.
        t = torch.full((numel,), float("nan"), device=bench.device)
        t.copy_(mine.pin_memory(), non_blocking=True)
        await reduce([t])
        check(f"allreduce of {bench.coll.size} ranks by {name}", t, expected, rtol=1e-5, atol=1e-5)
