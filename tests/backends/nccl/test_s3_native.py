"""NCCL's collectives and messages against float64, by a fake that queues its kernels on simulated streams (S3)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from aiodist.backends.base import DTYPES, Done
from aiodist.backends.nccl import NcclNative, Turn, supports
from aiodist.types import ReduceOp

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


def step(name: str, *args: object) -> Step:
    """Return what calls that method."""
    return lambda n, done: getattr(n, name)(*args, done)


def check(t: Tensor, expected: Tensor) -> None:
    """Compare a tensor of a device with what is known in more digits."""
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


@pytest.mark.parametrize("size", SIZES)
async def test_s3_alltoall_with_any_counts(world: Make, size: int) -> None:
    w = world(size, dawdle=5)
    parts = [[values(torch.int16, (2 * src + dst) % 5, 10 * src + dst) for dst in range(size)] for src in range(size)]
    outs = [[torch.empty_like(parts[src][rank], device=w.device(rank)) for src in range(size)] for rank in range(size)]
    futures = []
    for rank in range(size):
        given = [w.put(part, rank) for part in parts[rank]]
        futures.append(w.call(rank, step("alltoall", given, outs[rank])))
    await w.succeed(futures)
    for rank in range(size):
        assert all(torch.equal(outs[rank][src].cpu(), parts[src][rank]) for src in range(size))


async def test_s3_messages_and_grouped_calls_do_not_wait_for_one_another(world: Make) -> None:
    w = world(3, dawdle=5)
    gifts = [values(torch.float64, 33, rank).to(w.device(rank)) for rank in range(3)]
    taken = [torch.empty(33, dtype=torch.float64, device=w.device(rank)) for rank in range(3)]
    sums = [torch.full((4,), rank + 1.0, device=w.device(rank)) for rank in range(3)]
    ended: list[tuple[int, int]] = []

    def around(rank: int) -> Step:
        def step(n: NcclNative, done: Done) -> None:
            errors: list[BaseException | None] = []

            def one(number: int) -> Done:
                def tell(error: BaseException | None) -> None:
                    errors.append(error)
                    ended.append((rank, number))
                    if len(errors) == 3:
                        done(next((e for e in errors if e), None))

                return tell

            with n.grouped():
                # Everybody sends first: without the group each would wait for the next.
                n.send(gifts[rank], (rank + 1) % 3, one(0))
                n.recv(taken[rank], (rank - 1) % 3, one(1))
                n.allreduce(sums[rank], ReduceOp.MEAN, one(2))
                assert not [e for e in ended if e[0] == rank]  # nothing is enqueued before the end

        return step

    await w.succeed([w.call(rank, around(rank)) for rank in range(3)])
    for rank in range(3):
        assert torch.equal(taken[rank].cpu(), gifts[rank - 1].cpu())
        assert sums[rank].cpu().tolist() == [2.0] * 4
        assert [number for r, number in ended if r == rank] == [0, 1, 2]
    # One way only, and of no elements.
    empty = torch.empty(0, device=w.device(0))
    futures = [w.call(0, lambda n, done: n.send(gifts[0], 2, done)), w.call(0, lambda n, done: n.send(empty, 1, done))]
    futures += [w.call(2, lambda n, done: n.recv(taken[2], 0, done)), w.call(1, lambda n, done: n.recv(empty, 0, done))]
    await w.succeed(futures)
    assert torch.equal(taken[2].cpu(), gifts[0].cpu())


async def test_s3_grouped_within_grouped_is_an_error_and_an_empty_group_does_nothing(world: Make) -> None:
    w = world(1)

    def step(n: NcclNative, done: Done) -> None:
        with n.grouped():
            pass
        with n.grouped(), pytest.raises(RuntimeError, match="within"), n.grouped():
            pass
        n.scan(torch.empty(0), ReduceOp.SUM, done)

    (error,) = await w.done([w.call(0, step)])
    assert "no scan" in str(error)
    assert not [name for name in w.nccl.calls if name != "init"]


async def test_s3_calls_queued_for_their_turn_keep_their_own_stream(world: Make) -> None:
    """Each operation has a stream of its own; whoever lets the queue go on has another one current."""
    size, count = 2, 12
    w = world(size, dawdle=5, seed=3)
    rng = random.Random(7)
    futures, checks = [], []
    for rank in range(size):
        turns = [w.group(rank).turns.take() for _ in range(count)]
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
                turn: Turn = turns[number],
            ) -> None:
                with torch.cuda.stream(stream):
                    NcclNative(w.open(rank), turn).allreduce(t, ReduceOp.MEAN, done)
                turn.give_back()

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
