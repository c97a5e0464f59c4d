"""C2: operations that a lane runs from the call on, and those that a program continues since the ranks differ."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import BufferInFlight, Communicator, MismatchError, RemoteError
from aiodist.communicator import parts_of
from aiodist.handles import in_flight

pytestmark = pytest.mark.drawn(3)

processes = pytest.mark.ranks(2, 3, backend=("openmpi", "mpich", "gloo", "shm"))

SIZES = [1, 7, 1000, 300_000]


class Own(Tensor):
    """A class of the user's, which no lane takes."""


def value(rank: int, numel: int) -> Tensor:
    return torch.randint(-9, 9, (numel,), generator=torch.Generator().manual_seed(100 * numel + rank)).double()


async def every_kind(coll: Communicator, numel: int, mine: Callable[[Tensor], Tensor]) -> None:
    """Do each of them on what `mine` makes of this rank's tensor, in place, in new memory and into an `out`."""
    ranks, rank, root = coll.size, coll.rank, coll.size - 1
    all_values = [value(r, numel) for r in range(ranks)]
    total = torch.stack(all_values).sum(0)

    def t() -> Tensor:
        return mine(value(rank, numel))

    def untouched(given: Tensor) -> bool:
        return bool(given.eq(value(rank, numel)).all())

    assert (await coll.allreduce(t())).eq(total).all()
    assert (await coll.broadcast(t(), root)).eq(all_values[root]).all()
    assert (await coll.scan(t())).eq(torch.stack(all_values[: rank + 1]).sum(0)).all()
    reduced = await coll.reduce(t(), root=root)
    assert (reduced is None) == (rank != root)
    assert reduced is None or reduced.eq(total).all()
    for call in (coll.allreduce, coll.scan):
        given, out = t(), torch.empty(numel, dtype=torch.float64)
        assert await call(given, out=out) is out
        assert untouched(given)
        assert out.eq(total if call == coll.allreduce else torch.stack(all_values[: rank + 1]).sum(0)).all()
    given = t()
    out = torch.empty(numel, dtype=torch.float64)
    reduced = await coll.reduce(given, "max", root, out=out if rank == root else None)
    assert untouched(given)
    assert reduced is None or reduced.eq(torch.stack(all_values).max(0).values).all()

    rows = [numel // ranks + (r < numel % ranks) for r in range(ranks)]
    for made in (None, torch.empty(rows[rank], dtype=torch.float64)):
        given = t()
        block = await coll.reduce_scatter(given, out=made)
        assert untouched(given)
        assert block.eq(total.split(rows)[rank]).all()
    assert all(got.eq(one).all() for got, one in zip(await coll.allgather(t()), all_values, strict=True))
    whole = torch.empty(ranks * numel, dtype=torch.float64)
    assert await coll.allgather(t(), out=whole) is whole
    assert whole.eq(torch.cat(all_values)).all()
    own = whole.zero_().split(numel)[rank]
    own.copy_(value(rank, numel))
    assert (await coll.allgather(mine(own), out=whole)).eq(torch.cat(all_values)).all()
    sent = mine(torch.cat([value(rank * ranks + r, numel) for r in range(ranks)]))
    came = torch.cat([value(r * ranks + rank, numel) for r in range(ranks)])
    assert (await coll.alltoall_single(sent)).eq(came).all()
    assert (await coll.alltoall_single(sent, out=torch.empty_like(came))).eq(came).all()
    await coll.barrier()


@processes
@pytest.mark.parametrize("numel", SIZES)
async def test_c2_lanes_do_all_kinds(coll: Communicator, numel: int) -> None:
    await every_kind(coll, numel, lambda t: t)


@processes
@pytest.mark.parametrize("numel", SIZES)
async def test_c2_lanes_do_all_kinds_on_the_arena(coll: Communicator, numel: int) -> None:
    await every_kind(coll, numel, lambda t: coll.arena_empty(t.shape, dtype=t.dtype).copy_(t))


@processes
@pytest.mark.parametrize("numel", SIZES)
async def test_c10_one_rank_goes_the_general_way(coll: Communicator, numel: int) -> None:
    """Its tensors are of another class, so all ranks run a program for this operation."""
    await every_kind(coll, numel, lambda t: t.as_subclass(Own) if coll.rank == 1 else t)


@pytest.mark.drawn(3)
@processes
@pytest.mark.parametrize("numel", SIZES)
async def test_c10_gathered_tensors_of_different_shapes_among_others(coll: Communicator, numel: int) -> None:
    """Some of many in flight are alike and others are not; all end right, in every order."""
    of_others = len(in_flight)  # tests that gave a communicator up

    def shape(i: int, rank: int) -> tuple[int, ...]:
        return [(numel,), (numel + rank,), (numel, 1) if rank else (numel,), (numel * rank,)][i % 4]

    handles: list[Any] = []
    for i in range(24):
        handles.append(coll.allgather(torch.full(shape(i, coll.rank), float(coll.rank + i))))
        handles.append(coll.allreduce(torch.full((numel,), float(coll.rank + i))))
    results = await aiodist.gather(*handles)
    for i in range(24):
        blocks, total = results[2 * i], results[2 * i + 1]
        assert [tuple(block.shape) for block in blocks] == [shape(i, r) for r in range(coll.size)]
        assert all(block.eq(r + i).all() for r, block in enumerate(blocks))
        assert total.eq(sum(r + i for r in range(coll.size))).all()
    assert len(in_flight) <= of_others


@processes
async def test_h10_what_goes_on_owns_its_memory_until_it_is_over(coll: Communicator) -> None:
    of_others = len(in_flight)  # tests that gave a communicator up
    t = torch.full((100_000 + coll.rank,), float(coll.rank))
    await coll.barrier()
    if coll.rank > 0:
        await coll.recv_object(0)
    handle = coll.allgather(t)
    if coll.rank == 0:
        with pytest.raises(BufferInFlight, match="allgather"):
            coll.allreduce(t)
        await aiodist.gather(*[coll.send_object("refused", rank) for rank in range(1, coll.size)])
    blocks = await handle
    assert [len(block) for block in blocks] == [100_000 + r for r in range(coll.size)]
    assert len(in_flight) <= of_others


@processes
async def test_c10_ranks_that_differ_are_told_of_all_kinds(coll: Communicator) -> None:
    """Another kind, dtype, size or root is a mismatch on all ranks, and the next operation succeeds."""
    of_others = len(in_flight)  # tests that gave a communicator up
    first = coll.rank == 0
    pairs: list[Callable[[], Any]] = [
        lambda: coll.broadcast(torch.zeros(3 + coll.rank)),
        lambda: coll.broadcast(torch.zeros(3), 0 if first else 1),
        lambda: coll.allgather(torch.zeros(3, dtype=torch.float32 if first else torch.float64)),
        lambda: coll.allgather(torch.zeros(3)) if first else coll.broadcast(torch.zeros(3)),
        lambda: coll.reduce_scatter(torch.zeros(6)) if first else coll.barrier(),
        lambda: coll.scan(torch.zeros(3), "sum" if first else "max"),
        lambda: coll.alltoall_single(torch.zeros(6 if first else 12)),
        lambda: coll.reduce(torch.zeros(3), out=torch.zeros(3) if first else None, op="min" if first else "sum"),
    ]
    for call in pairs:
        with pytest.raises(MismatchError, match="ranks disagree"):
            await call()
        assert (await coll.allreduce(torch.ones(1))).item() == coll.size
    assert len(in_flight) <= of_others


@processes
async def test_h2_time_runs_out_in_the_general_way_too(coll: Communicator) -> None:
    """The last rank is late, and shapes differ, so all ranks continue with a program when it comes."""
    await coll.barrier()
    if coll.rank == coll.size - 1:
        await aiodist.gather(*[coll.recv_object(rank) for rank in range(coll.size - 1)])
        assert len(await coll.allgather(torch.zeros(2))) == coll.size
    else:
        handle = coll.allgather(torch.zeros(3 + coll.rank), timeout=0.1)
        with pytest.raises(aiodist.OperationTimeout):
            await handle
        await coll.send_object("raised", coll.size - 1)
        assert len(await handle) == coll.size
    await coll.barrier()


@pytest.mark.drawn(3)
@processes
@pytest.mark.parametrize("late", [False, True])
async def test_c10_an_error_of_one_rank_in_the_general_way(coll: Communicator, late: bool) -> None:
    """Its `out` cannot grow to the size of the others: that rank raises the error, and all others learn of it."""
    of_others = len(in_flight)  # tests that gave a communicator up
    out = torch.empty(coll.size * 3)[:] if coll.rank == 1 else None
    handle = coll.allgather(torch.zeros(3 + coll.rank), out=out)
    if late and coll.rank == 0:
        time.sleep(0.3)  # noqa: ASYNC251
    with pytest.raises(ValueError if coll.rank == 1 else RemoteError, match="cannot grow"):
        await handle
    assert (await coll.allreduce(torch.ones(1))).item() == coll.size
    assert len(in_flight) <= of_others


@pytest.mark.drawn(3)
@processes
async def test_h1_the_general_way_goes_on_while_the_loop_stands_still(coll: Communicator) -> None:
    """A thread waits on each rank, whose loop computes."""
    ours = await coll.dup(thread=True)
    await ours.barrier()

    def work() -> None:
        blocks = ours.allgather(torch.zeros(5 + ours.rank)).wait(30)
        ours.barrier().wait(30)  # all loops stand still until all threads are through
        seen.extend(len(block) for block in blocks)

    seen: list[int] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(40)
    assert seen == [5 + r for r in range(ours.size)]
    await ours.aclose()


@pytest.mark.ranks(2, backend=("local", "gloo"))
async def test_h7_an_error_while_others_are_told_of_an_operation_costs_none(
    coll: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation has its number by then: without it all others would wait for this rank."""
    told: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: told.append(unraisable.exc_value))

    def nobody_hears() -> None:
        raise RuntimeError("the channel is closed")

    log = parts_of(coll).dispatcher.oplog
    for _ in range(2):
        for call in (lambda: coll.allreduce(torch.ones(2)), lambda: coll.allgather_object(1)):
            if coll.rank == 0:
                log.awaited[log.seq] = nobody_hears
            await asyncio.wait_for(call(), 20)
    assert {str(error) for error in told} <= {"the channel is closed"}
    assert await coll.allreduce(len(told)) == 4
