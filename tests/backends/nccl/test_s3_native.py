"""NCCL's collectives and messages against float64, by a fake that queues its kernels on simulated streams (S3)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from aiodist.testing.seams.nccl import LaunchSlot, NcclNative, supports
from aiodist.testing.seams.transport import DTYPES, Done, Exchange, Primitive
from aiodist.types import ReduceOp
from tests.support.operations import operation

if TYPE_CHECKING:
    from tests.backends.nccl.conftest import World

    Make = Callable[..., World]
    Step = Callable[[NcclNative, Done], None]

SIZES = [1, 2, 3, 5]
KINDS = [kind for kind in DTYPES if kind not in (torch.uint16, torch.uint32, torch.uint64)]
REDUCED = [(kind, op) for kind in KINDS for op in ReduceOp if supports("allreduce", kind, op)]
NUMELS = (0, 1, 7, 1024)


def values(kind: torch.dtype, numel: int, seed: int) -> Tensor:
    """Return a host tensor of its own."""
    generator = torch.Generator().manual_seed(seed)
    if kind.is_complex:
        return torch.complex(*torch.randn(2, numel, generator=generator, dtype=torch.float64)).to(kind)
    if kind.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(kind)
    if kind is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    low, high = (0, 256) if kind is torch.uint8 else (-128, 128)
    return torch.randint(low, high, (numel,), generator=generator).to(kind)


def reduced(parts: list[Tensor], op: ReduceOp) -> Tensor:
    """Reduce in float64, complex128 or int64."""
    first = parts[0]
    wide = torch.complex128 if first.is_complex() else torch.float64 if first.is_floating_point() else torch.int64
    if op in (ReduceOp.MIN, ReduceOp.BAND):
        return torch.stack([part.to(wide) for part in parts]).amin(0)
    if op in (ReduceOp.MAX, ReduceOp.BOR):
        return torch.stack([part.to(wide) for part in parts]).amax(0)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total * part.to(wide) if op is ReduceOp.PROD else total + part.to(wide)
    return total / len(parts) if op is ReduceOp.MEAN else total


def step(kind: str, *args: object) -> Step:
    """Return what begins that operation."""
    return lambda n, done: n.start(operation(kind, *args), done)


def start_all(operations: list[Primitive], native: NcclNative, done: Done) -> None:
    native.start_all(operations, done)


def check(t: Tensor, expected: Tensor) -> None:
    """Compare a tensor of a device with the result in higher precision."""
    host = t.cpu()
    if host.dtype.is_floating_point or host.dtype.is_complex:
        torch.testing.assert_close(host.to(expected.dtype), expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(host, expected.to(host.dtype))  # integers wrap


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dawdle", [0, 5])
async def test_s3_reductions_of_every_kind(world: Make, size: int, dawdle: int) -> None:
    w = world(size, dawdle=dawdle, seed=size)
    futures, checks = [], []
    for seed, (kind, op) in enumerate(REDUCED if size == 3 and not dawdle else REDUCED[dawdle % 3 :: 5]):
        numel = NUMELS[seed % 4]
        root = seed % size
        given = [values(kind, numel, 100 * seed + rank) for rank in range(size)]
        expected = reduced(given, op)
        for rank in range(size):
            everywhere, at_root = (w.put(given[rank], rank) for _ in range(2))
            futures.append(w.call(rank, step("allreduce", everywhere, op)))
            futures.append(w.call(rank, step("reduce", at_root, op, root)))
            checks.append((everywhere, expected))
            checks.append((at_root, expected if rank == root else given[rank]))
    await w.succeed(futures)
    for t, wanted in checks:
        check(t, wanted.to(torch.int64) if wanted.dtype is torch.bool else wanted)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("equal", [True, False])
async def test_s3_reduce_scatter_with_equal_and_unequal_counts(world: Make, size: int, equal: bool) -> None:
    w = world(size, dawdle=5)
    futures, checks = [], []
    for seed, (kind, op) in enumerate(REDUCED[::2]):
        counts = [5] * size if equal else [(3 * rank + seed) % 7 for rank in range(size)]
        given = [values(kind, sum(counts), 100 * seed + rank) for rank in range(size)]
        blocks = reduced(given, op).split(counts)
        for rank in range(size):
            t = w.put(given[rank], rank)
            out = torch.empty(counts[rank], dtype=kind, device=w.device(rank))
            futures.append(w.call(rank, step("reduce_scatter", t, out, counts, op)))
            checks += [(out, blocks[rank]), (t, given[rank])]  # what is given is only read
    await w.succeed(futures)
    for t, wanted in checks:
        check(t, wanted)


@pytest.mark.parametrize("size", SIZES)
async def test_s3_broadcast_and_allgather_move_every_kind(world: Make, size: int) -> None:
    w = world(size, dawdle=5)
    futures, checks = [], []
    for seed, kind in enumerate(KINDS):
        root = seed % size
        numel = NUMELS[seed % 4]
        given = [values(kind, numel, 100 * seed + rank) for rank in range(size)]
        counts = [numel] * size if seed % 2 else [(5 * rank + seed) % 9 for rank in range(size)]
        blocks = [values(kind, count, 1000 * seed + rank) for rank, count in enumerate(counts)]
        for rank in range(size):
            t, block = w.put(given[rank], rank), w.put(blocks[rank], rank)
            out = torch.empty(sum(counts), dtype=kind, device=w.device(rank))
            if seed % 3 == 0:  # my own block of the result
                begin = sum(counts[:rank])
                own = out[begin : begin + counts[rank]]
                own.copy_(block)
                block = own
            futures.append(w.call(rank, step("broadcast", t, root)))
            futures.append(w.call(rank, step("allgather", block, out, counts)))
            checks += [(t, given[root]), (out, torch.cat(blocks))]
    await w.succeed(futures)
    for t, wanted in checks:
        assert torch.equal(t.cpu(), wanted)


async def test_s3_calls_queued_in_launch_order_keep_their_own_stream(world: Make) -> None:
    """Each operation has a stream of its own; the thread that continues the queue has another current stream."""
    size, count = 2, 12
    w = world(size, dawdle=5, seed=3)
    rng = random.Random(7)
    futures, checks = [], []
    for rank in range(size):
        slots = [w.group(rank).launch_order.take() for _ in range(count)]
        pending = list(range(count))
        rng.shuffle(pending)  # they come to their native call in any order, another one on each rank
        for number in pending:
            stream = torch.cuda.Stream(device=rank)
            host = values(torch.float32, 50, 10 * number + rank)
            with torch.cuda.stream(stream):
                t = host.to(w.device(rank), non_blocking=True).mul_(2)

            def enqueue(
                done: Done,
                rank: int = rank,
                t: Tensor = t,
                stream: torch.cuda.Stream = stream,
                slot: LaunchSlot = slots[number],
            ) -> None:
                with torch.cuda.stream(stream):
                    NcclNative(w.open(rank), slot).start(Primitive("allreduce", t, op=ReduceOp.MEAN), done)
                slot.release()

            futures.append(w.start(enqueue))
            checks.append((number, t, stream))
    await w.succeed(futures)
    for number, t, stream in checks:
        stream.synchronize()
        check(t, 2 * reduced([values(torch.float32, 50, 10 * number + rank) for rank in range(size)], ReduceOp.MEAN))


async def test_s3_a_mean_is_divided_behind_the_sum_though_nccl_is_slow_to_launch(world: Make) -> None:
    w = world(2, dawdle=50, seed=11)
    rounds = [[torch.full((8,), 3.0 * rank + k, device=w.device(rank)) for rank in range(2)] for k in range(6)]
    futures = [w.call(rank, step("allreduce", ts[rank], ReduceOp.MEAN)) for ts in rounds for rank in (0, 1)]
    await w.succeed(futures)
    assert [t.cpu()[0].item() for ts in rounds for t in ts] == [1.5 + k for k in range(6) for _ in range(2)]


@pytest.mark.parametrize("size", SIZES)
async def test_s3_alltoall_moves_every_kind_in_one_group_of_calls(world: Make, size: int) -> None:
    w = world(size, dawdle=5)
    futures, checks = [], []
    for seed, kind in enumerate(KINDS):
        counts = [[(3 * rank + 5 * to + seed) % 7 for to in range(size)] for rank in range(size)]
        blocks = [
            [values(kind, count, 1000 * seed + 10 * rank + to) for to, count in enumerate(counts[rank])]
            for rank in range(size)
        ]
        for rank in range(size):
            received = [counts[src][rank] for src in range(size)]
            out = torch.empty(sum(received), dtype=kind, device=w.device(rank))
            t = w.put(torch.cat(blocks[rank]), rank)
            futures.append(w.call(rank, step("alltoall", t, out, counts[rank], received)))
            checks.append((out, torch.cat([of[rank] for of in blocks])))
    await w.succeed(futures)
    for t, wanted in checks:
        assert torch.equal(t.cpu(), wanted)
    assert len(w.nccl.launches) <= size * len(KINDS)
    assert {"group", "send", "recv"} >= set(w.nccl.calls) - {"init"}


async def test_s3_an_exchange_is_called_by_those_that_have_a_part_in_it(world: Make) -> None:
    """Rank 0 sends two tensors to rank 1, and rank 2 nothing; what follows meets all three."""
    w = world(3, dawdle=3)
    given = [values(torch.float32, numel, numel) for numel in (5, 3)]
    came = [torch.empty(numel, device=w.device(1)) for numel in (5, 3)]
    sums = [w.put(torch.ones(4), rank) for rank in range(3)]
    sends = [(1, w.put(t, 0)) for t in given]
    parts = [(sends, []), ([], [(0, t) for t in came]), ([], [(0, torch.empty(0, device=w.device(2)))])]
    futures = []
    for rank, (out, into) in enumerate(parts):
        exchange = Exchange(sums[rank], out, into)
        futures.append(w.call(rank, partial(start_all, [exchange])))
        futures.append(w.call(rank, step("allreduce", sums[rank], ReduceOp.SUM)))
    await w.succeed(futures)
    assert [t.tolist() for t in came] == [t.tolist() for t in given]
    assert [t.tolist() for t in sums] == [[3.0] * 4] * 3
    assert sorted(w.nccl.launches) == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_s3_several_operations_are_launched_together(world: Make, size: int) -> None:
    w = world(size, dawdle=5)
    futures, checks = [], []
    given = [[values(torch.float32, numel, 10 * numel + rank) for numel in (7, 0, 5)] for rank in range(size)]
    for rank in range(size):
        ts = [w.put(t, rank) for t in given[rank]]
        gathered = torch.empty(sum(range(1, size + 1)), device=w.device(rank))
        several = [Primitive("allreduce", t, op=ReduceOp.MEAN) for t in ts]
        mine = w.put(torch.full((rank + 1,), float(rank)), rank)
        several.append(Primitive("allgather", mine, gathered, counts=range(1, size + 1)))
        futures.append(w.call(rank, partial(start_all, several)))
        checks += [(t, reduced([each[i] for each in given], ReduceOp.MEAN)) for i, t in enumerate(ts) if t.numel()]
        checks.append((gathered, torch.cat([torch.full((r + 1,), float(r)) for r in range(size)])))
    await w.succeed(futures)
    for t, wanted in checks:
        check(t, wanted)
    broadcasts = size if size > 1 else 1
    assert sorted(w.nccl.launches) == [(rank, 2 + broadcasts) for rank in range(size)]
