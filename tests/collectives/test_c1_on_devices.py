"""C1 on simulated CUDA devices: every operation by every implementation, against float64 on the host."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from aiodist import Communicator, gather
from aiodist.types import Impl, Op
from tests.support.simulated_cuda.device import SimulatedCuda

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64)
IMPLS: tuple[Impl, ...] = ("auto", "staged", "cuda_ipc", "ring", "doubling", "direct")
PIECE = 1 << 10  # bytes: so that tensors of a few kilobytes go in many pieces


@pytest.fixture
def small_pieces(simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    """Devices whose memory is staged in pieces of a kilobyte."""
    from aiodist.streams import Staging

    monkeypatch.setattr(Staging, "piece_bytes", PIECE)
    return simulated_cuda


def brought(dice: random.Random, ranks: int, numel: int, kind: torch.dtype) -> list[Tensor]:
    """Return what each rank brings, the same on all ranks; sums of it are exact in every dtype."""
    generator = torch.Generator().manual_seed(dice.getrandbits(32))
    low = 0 if kind is torch.uint8 else -9
    return [torch.randint(low, 9, (numel,), generator=generator).to(kind) for _ in range(ranks)]


def reduced(ts: Sequence[Tensor], op: str) -> Tensor:
    kind = ts[0].dtype
    wide = torch.stack([t.to(torch.complex128 if kind.is_complex else torch.float64) for t in ts])
    if op == "sum":
        return wide.sum(0).to(kind)
    if op == "mean":
        return (wide.sum(0) / len(ts)).to(kind)
    return (wide.amin(0) if op == "min" else wide.amax(0)).to(kind)


def same(got: Tensor, expected: Tensor, what: object) -> None:
    assert got.is_cuda, what
    host = got.cpu()
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        torch.testing.assert_close(host, expected, rtol=1e-2 if expected.dtype.itemsize == 2 else 1e-6, atol=1e-6)
    else:
        assert torch.equal(host, expected), what


async def one_round(coll: Communicator, dice: random.Random, impl: Impl) -> None:
    n, rank, device = coll.size, coll.rank, coll.device
    numel = dice.choice([1, 3, 255, 256, 257, dice.randrange(1000, 4000)])
    kind = dice.choice(KINDS)
    ops: list[Op] = ["sum"] if kind.is_complex else ["sum", "min", "max"]
    op = dice.choice([*ops, "mean"] if kind.is_floating_point else ops)
    root = dice.randrange(n)
    ts = brought(dice, n, numel, kind)
    what = (impl, numel, kind, op, root)
    side = torch.cuda.Stream(device=device)
    with torch.cuda.stream(side):  # producers and readers are on streams of their own
        mine = ts[rank].to(device)
        handles = [
            coll.allreduce(mine.clone(), op, impl=impl),
            coll.broadcast(mine.clone(), root, impl=impl),
            coll.reduce(mine.clone(), op, root, impl=impl),
            coll.scan(mine.clone(), op, impl=impl),
            coll.exscan(mine.clone(), op, impl=impl),
        ]
        sizes = [numel // n + (r < numel % n) for r in range(n)]
        scattered = coll.reduce_scatter(mine, op, impl=impl)
        whole = mine.clone()
        in_place = coll.reduce_scatter(whole, op, out=whole, impl=impl)
        cut = [t[: max(numel - r, 0)] for r, t in enumerate(ts)]
        collected = coll.allgather(mine[: max(numel - rank, 0)], impl=impl)
        into = torch.empty(0, dtype=kind, device=device)
        joined = coll.allgather(mine, out=into, impl=impl)
        at_root = coll.gather(mine[: max(numel - rank, 0)], root)
        dealt = coll.scatter([mine[i:].clone() for i in range(n)] if rank == root else None, root)
        swapped = coll.alltoall([mine[: r + 1].clone() for r in range(n)])
        out = torch.empty(numel, dtype=kind, device=device)
        apart = coll.allreduce(mine, op, out=out, impl=impl)
        mixed = [mine.clone(), ts[rank].clone(), mine[:1].clone()]
        listed = coll.allreduce(mixed, op, impl=impl if impl in ("ring", "doubling", "direct") else "auto")
    total = reduced(ts, op)
    all_reduced, cast, at, scanned, before = await gather(*handles)
    same(all_reduced, total, what)
    same(cast, ts[root], what)
    assert (at is None) == (rank != root)
    if at is not None:
        same(at, total, what)
    same(scanned, reduced(ts[: rank + 1], op), what)
    same(before, reduced(ts[:rank], op) if rank else ts[0], what)
    same(await scattered, total.split(sizes)[rank], what)
    same(await in_place, total.split(sizes)[rank], what)
    for got, expected in zip(await collected, cut, strict=True):
        same(got, expected, what)
    assert await joined is into
    same(into, torch.cat(ts), what)
    for got, expected in zip(await at_root or [], cut, strict=rank == root):
        same(got, expected, what)
    same(await dealt, ts[root][rank:], what)
    for got, t in zip(await swapped, ts, strict=True):
        same(got, t[: rank + 1], what)
    assert await apart is out
    same(out, total, what)
    same(mine, ts[rank], what)
    assert await listed is mixed
    assert mixed[1].is_cpu
    torch.testing.assert_close(mixed[1], mixed[0].cpu())
    same(mixed[0], total, what)
    same(mixed[2], total[:1], what)


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3, 5)
async def test_c1_every_operation_on_devices(coll: Communicator, small_pieces: SimulatedCuda) -> None:
    dice = random.Random(f"{coll.size}")
    for impl in IMPLS:
        await one_round(coll, dice, impl)
