"""Allreduces of a large tensor by ranks that share a GPU, beside copies, gloo, our own staging, and NCCL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist.bench.gpu_cases import Measured
from aiodist.bench.gpu_turns import Bench, NotPossible, Way, check, in_turns
from aiodist.bench.peers import Buffers, Peer, opened

__all__ = ["beside_copies", "beside_nccl", "on_several_devices"]

_KICK = 13  # elements more than are measured: nothing divides evenly
_Reduce = Callable[[Tensor], Awaitable[object]]


async def beside_copies(bench: Bench) -> Measured:
    """Measure `cuda_ipc` beside what must be copied, staging, and torch's gloo.

    Each rank reads and writes as many bytes as if it copied its tensor once (see `aiodist.collectives.cuda_ipc`), so
    the ratio of bandwidths is that of the times. The ranks copy at the same time, each within its own memory.
    """
    _require(bench, "cuda_ipc")
    async with opened(["gloo"], bench.coll) as peers:
        reduces: dict[str, _Reduce] = {"cuda_ipc": _ours(bench, "cuda_ipc"), "staged": _ours(bench, "staged")}
        for peer in peers:
            reduces[peer.name] = partial(_theirs, bench, peer)
        return await _measure(bench, reduces, quick=("cuda_ipc",), copies=True)


async def beside_nccl(bench: Bench) -> Measured:
    """Measure `cuda_ipc` beside NCCL, which was told that ranks may share a device."""
    _require(bench, "cuda_ipc")
    _require(bench, "nccl")
    reduces = {name: _ours(bench, name) for name in ("cuda_ipc", "nccl")}
    return await _measure(bench, reduces, quick=tuple(reduces), copies=False)


async def on_several_devices(bench: Bench) -> Measured:
    """Measure `cuda_ipc` over the links between GPUs."""
    _require(bench, "cuda_ipc")
    names = [name for name in ("cuda_ipc", "nccl", "staged") if _why_not(bench, name) is None]
    measured = await _measure(bench, {name: _ours(bench, name) for name in names}, quick=("cuda_ipc", "nccl"))
    missing = {} if "nccl" in names else {"nccl": _why_not(bench, "nccl") or ""}
    return Measured(measured.values, missing, measured.records)


def _why_not(bench: Bench, impl: str) -> str | None:
    offer = bench.coll.availability().of("allreduce", impl, "cuda")
    return None if offer.state == "available" else f"{impl} is {offer.state}: {offer.reason}"


def _require(bench: Bench, impl: str) -> None:
    """Raise NotPossible where the communicator lacks `impl`: nothing else may run in its place."""
    if (why := _why_not(bench, impl)) is not None:
        raise NotPossible(why)


def _ours(bench: Bench, impl: str) -> _Reduce:
    allreduce: Any = bench.coll.allreduce
    return partial(allreduce, impl=impl)


async def _theirs(bench: Bench, peer: Peer, t: Tensor) -> None:
    """Reduce `t` as torch.distributed does: gloo copies it to the host and back."""
    buffers = Buffers(bench.coll.rank, bench.coll.size, t, None)
    for contender in peer.contenders("allreduce", buffers):
        contender.once()
    torch.cuda.synchronize(bench.device)


async def _measure(
    bench: Bench, reduces: dict[str, _Reduce], *, quick: Sequence[str], copies: bool = False
) -> Measured:
    """Return how many times as fast `cuda_ipc` is as each other way; the `quick` ones are repeated in a sample."""
    await _check(bench, reduces)
    nbytes = bench.sizes.allreduce_bytes
    source = torch.randn(nbytes // 4, device=bench.device)
    t = torch.empty_like(source)

    def refill() -> None:  # sums of sums would be infinite soon
        t.copy_(source)

    async def copied() -> None:
        t.copy_(source, non_blocking=True)

    ways = [
        Way(name, partial(reduce, t), bench.sizes.batch if name in quick else 1, refill)
        for name, reduce in reduces.items()
    ]
    if copies:
        ways.append(Way("copy", copied, bench.sizes.batch))
    samples = await in_turns(bench, ways)
    records = await bench.session.timed("allreduce", nbytes, samples)
    seconds = {record.impl: record.seconds or float("nan") for record in records}
    values = {name: took / seconds["cuda_ipc"] for name, took in seconds.items() if name != "cuda_ipc"}
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
        await reduce(t)
        check(f"allreduce of {bench.coll.size} ranks by {name}", t, expected, rtol=1e-5, atol=1e-5)
