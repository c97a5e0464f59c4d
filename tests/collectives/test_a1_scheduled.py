"""A1 to A3: every schedule on tensors, over messages between ranks, exactly as a loop over the ranks says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate, permutations, product

import pytest
import torch
from torch import Tensor

from aiodist import Communicator, ReduceOp
from aiodist.backends.arithmetic import combine
from aiodist.collectives.endpoint import LANE_TAGS
from aiodist.communicator import parts_of
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.operation import CommunicatorOperation
from aiodist.schedules import MAX_LANES, SCHEDULES
from aiodist.testing.seams.algorithms import Endpoint, Program, Scheduled
from aiodist.testing.seams.carriers import LocalHub, LocalTransport
from aiodist.testing.seams.progress import run
from aiodist.testing.seams.transport import Done, Primitive, Wanted

every = pytest.mark.ranks(1, 2, 3, 5, backend="local")
KINDS = (torch.float32, torch.int64, torch.float64)
OPS = (ReduceOp.SUM, ReduceOp.MAX)
KINDS_AND_OPS = ((torch.float32, ReduceOp.SUM), (torch.int64, ReduceOp.BXOR), (torch.float64, ReduceOp.MAX))
CHUNKS = {"ring": (1, 3), "tree": (2,), "chain": (1, 3, 100), "direct": (2,)}


async def perform(coll: Communicator, make: Callable[[Endpoint], Program[object]], tag: int = 1 << 21) -> None:
    """Run the program that `make` makes of an endpoint as the next operation of all ranks."""
    ep = Endpoint(parts_of(coll).transport, tag)
    await parts_of(coll).dispatcher.issue(CommunicatorOperation(), Fingerprint("scheduled"), lambda _: make(ep))


def all_of(operation: str) -> Iterator[Scheduled]:
    for name, algorithm in SCHEDULES[operation].items():
        yield Scheduled(name)
        if algorithm.chunked:
            yield from (Scheduled(name, chunks) for chunks in CHUNKS[name])


def inputs(size: int, n: int, kind: torch.dtype) -> list[Tensor]:
    """Return what each rank has: small whole numbers, so that every order gives the same."""
    made = torch.Generator().manual_seed(n)
    return [torch.randint(-9, 9, (n,), generator=made).to(kind) for _ in range(size)]


def reduced(parts: list[Tensor], op: ReduceOp) -> list[Tensor]:
    """Return the results of a scan; the last is that of a reduction."""

    def both(a: Tensor, b: Tensor) -> Tensor:
        total = a.clone()
        combine(total, b, op)
        return total

    return list(accumulate(parts, both))


def lengths(size: int) -> tuple[int, ...]:
    return (0, 1, size - 1, size + 1, 23)


@every
async def test_a1_allreduce(coll: Communicator) -> None:
    for how, n, (kind, op) in product(all_of("allreduce"), lengths(coll.size), KINDS_AND_OPS):
        parts = inputs(coll.size, n, kind)
        t = parts[coll.rank].clone()
        await perform(coll, lambda ep: how.run(ep, [Primitive("allreduce", t, op=op)]))  # noqa: B023
        assert torch.equal(t, reduced(parts, op)[-1]), (how.name, how.chunks, n, kind, op)


@every
async def test_a1_allreduce_is_the_same_to_the_bit_on_all_ranks(coll: Communicator) -> None:
    """With sums that are rounded, and with the maximum of 0 and -0, which depends on the order of the two."""
    for how in all_of("allreduce"):
        for op in OPS:
            t = torch.rand(40, generator=torch.Generator().manual_seed(coll.rank)).log()
            t[:5] = 0.0 if coll.rank % 2 else -0.0
            await perform(coll, lambda ep: how.run(ep, [Primitive("allreduce", t, op=op)]))  # noqa: B023
            everywhere = await coll.allgather(t.view(torch.int32))
            assert all(torch.equal(one, everywhere[0]) for one in everywhere), (how.name, how.chunks, op)


@every
async def test_a1_direct_reduces_in_rank_order(coll: Communicator) -> None:
    parts = [torch.rand(9, generator=torch.Generator().manual_seed(rank)).log() for rank in range(coll.size)]
    expected = reduced(parts, ReduceOp.SUM)[-1]
    for root in range(coll.size):
        t = parts[coll.rank].clone()
        await perform(coll, lambda ep: Scheduled("direct").run(ep, [Primitive("reduce", t, root=root)]))  # noqa: B023
        assert torch.equal(t, expected if coll.rank == root else parts[coll.rank])


@every
async def test_a3_broadcast(coll: Communicator) -> None:
    for how, n, root in product(all_of("broadcast"), lengths(coll.size), range(coll.size)):
        kind = KINDS[root % 3]
        parts = inputs(coll.size, n, kind)
        t = parts[coll.rank].clone()
        await perform(coll, lambda ep: how.run(ep, [Primitive("broadcast", t, root=root)]))  # noqa: B023
        assert torch.equal(t, parts[root]), (how.name, how.chunks, n, kind, root)


@every
async def test_a1_reduce_leaves_the_tensors_of_others_alone(coll: Communicator) -> None:
    for how, n, root in product(all_of("reduce"), lengths(coll.size), range(coll.size)):
        kind = KINDS[root % 3]
        parts = inputs(coll.size, n, kind)
        t = parts[coll.rank].clone()
        await perform(coll, lambda ep: how.run(ep, [Primitive("reduce", t, root=root)]))  # noqa: B023
        expected = reduced(parts, ReduceOp.SUM)[-1] if coll.rank == root else parts[coll.rank]
        assert torch.equal(t, expected), (how.name, how.chunks, n, kind, root)


def shares(size: int) -> Iterator[list[int]]:
    """Return counts per rank: equal, different, some and all of them none."""
    yield [4] * size
    yield [rank * 5 % 7 for rank in range(size)]
    yield [0] * (size - 1) + [11]
    yield [0] * size


@every
async def test_a1_allgather(coll: Communicator) -> None:
    for how, counts, kind, in_place in product(all_of("allgather"), shares(coll.size), KINDS, (True, False)):
        parts = [part[:count] for part, count in zip(inputs(coll.size, 11, kind), counts, strict=True)]
        out = torch.full((sum(counts),), 77, dtype=kind)
        t = out.split(counts)[coll.rank].copy_(parts[coll.rank]) if in_place else parts[coll.rank].clone()
        await perform(coll, lambda ep: how.run(ep, [Primitive("allgather", t, out, counts=counts)]))  # noqa: B023
        assert torch.equal(out, torch.cat(parts)), (how.name, how.chunks, counts, kind)
        assert torch.equal(t, parts[coll.rank])


@every
async def test_a1_reduce_scatter_only_reads_its_input(coll: Communicator) -> None:
    for how, counts, (kind, op) in product(all_of("reduce_scatter"), shares(coll.size), KINDS_AND_OPS):
        parts = inputs(coll.size, sum(counts), kind)
        t, out = parts[coll.rank].clone(), torch.empty(counts[coll.rank], dtype=kind)
        await perform(coll, lambda ep: how.run(ep, [Primitive("reduce_scatter", t, out, counts=counts, op=op)]))  # noqa: B023
        assert torch.equal(out, reduced(parts, op)[-1].split(counts)[coll.rank]), (how.name, how.chunks, counts, kind)
        assert torch.equal(t, parts[coll.rank])


@every
async def test_a1_reduce_scatter_into_my_block_of_the_input(coll: Communicator) -> None:
    for how, counts in product(all_of("reduce_scatter"), shares(coll.size)):
        parts = inputs(coll.size, sum(counts), torch.float32)
        t = parts[coll.rank].clone()
        block = t.split(counts)[coll.rank]
        await perform(coll, lambda ep: how.run(ep, [Primitive("reduce_scatter", t, block, counts=counts)]))  # noqa: B023
        assert torch.equal(block, reduced(parts, ReduceOp.SUM)[-1].split(counts)[coll.rank]), (how.name, counts)


@every
async def test_a1_scan(coll: Communicator) -> None:
    for how, n, (kind, op) in product(all_of("scan"), lengths(coll.size), KINDS_AND_OPS):
        parts = inputs(coll.size, n, kind)
        t = parts[coll.rank].clone()
        await perform(coll, lambda ep: how.run(ep, [Primitive("scan", t, op=op)]))  # noqa: B023
        assert torch.equal(t, reduced(parts, op)[coll.rank]), (how.name, how.chunks, n, kind, op)


@every
async def test_a1_alltoall(coll: Communicator) -> None:
    size, rank = coll.size, coll.rank
    for how, count, kind in product(all_of("alltoall"), (0, 1, 4), KINDS):
        parts = inputs(size, count * size, kind)
        t, out, even = parts[rank].clone(), torch.empty(count * size, dtype=kind), [count] * size
        await perform(coll, lambda ep: how.run(ep, [Primitive("alltoall", t, out, counts=even, received=even)]))  # noqa: B023
        expected = torch.cat([part[rank * count : (rank + 1) * count] for part in parts])
        assert torch.equal(out, expected), (how.name, count, kind)
    counts = [[(src + 2 * dst) % 4 for dst in range(size)] for src in range(size)]
    wholes = [torch.arange(sum(row)) + 100 * src for src, row in enumerate(counts)]
    receives = [row[rank] for row in counts]
    out = torch.empty(sum(receives), dtype=torch.int64)
    await perform(
        coll,
        lambda ep: Scheduled("direct").run(
            ep, [Primitive("alltoall", wholes[rank], out, counts=counts[rank], received=receives)]
        ),
    )
    assert torch.equal(out, torch.cat([t.split(row)[rank] for t, row in zip(wholes, counts, strict=True)]))


# --- some of the ranks, and several at once ------------------------------------------------------------------------


@pytest.mark.ranks(4, 5, backend="local")
async def test_a1_groups_of_ranks_run_schedules_of_their_own(coll: Communicator) -> None:
    """Both halves at once; then, with the same tag, among those of equal place: as hierarchies do."""
    size, rank = coll.size, coll.rank
    halves = [list(range(size // 2)), list(range(size - 1, size // 2 - 1, -1))]
    mine = next(half for half in halves if rank in half)
    for name, op in product(SCHEDULES["allreduce"], OPS):
        parts = inputs(size, 10, torch.float32)
        t = parts[rank].clone()
        how = Scheduled(name, 2 if SCHEDULES["allreduce"][name].chunked else None)

        async def program(ep: Endpoint) -> None:
            group = ep.among(mine)
            assert (group.rank, group.size) == (mine.index(rank), len(mine))
            await how.run(group, [Primitive("allreduce", t, op=op)])  # noqa: B023
            lead = [half[0] for half in halves]
            if rank in lead:
                await how.run(ep.among(lead), [Primitive("allreduce", t, op=op)])  # noqa: B023
            within = ep.among(mine).among(range(len(mine)))
            await Scheduled("tree").run(within, [Primitive("broadcast", t)])  # noqa: B023

        await perform(coll, program)
        assert torch.equal(t, reduced(parts, op)[-1]), (name, op)


@every
async def test_a1_lists_in_lockstep_share_a_tag(coll: Communicator) -> None:
    """Tensors of different lengths, some of them none: each message meets its receive."""
    for name in SCHEDULES["allreduce"]:
        wholes = [inputs(coll.size, n, torch.int64) for n in (7, 0, 1, coll.size - 1, 30)]
        ts = [parts[coll.rank].clone() for parts in wholes]
        how = Scheduled(name, 1)
        await perform(coll, lambda ep: how.run(ep, [Primitive("allreduce", t) for t in ts]))  # noqa: B023
        assert all(torch.equal(t, reduced(parts, ReduceOp.SUM)[-1]) for t, parts in zip(ts, wholes, strict=True)), name
    for root in range(coll.size):
        ts = [torch.arange(n) * (1 + coll.rank) for n in (30, 1, 9)]
        how = Scheduled("chain", 4)
        await perform(coll, lambda ep: how.run(ep, [Primitive("broadcast", t, root=root) for t in ts]))  # noqa: B023
        assert [t.tolist() for t in ts] == [[i * (1 + root) for i in range(n)] for n in (30, 1, 9)]


@pytest.mark.ranks(3, 5, 6, backend="local")
@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "reduce", "scan"])
async def test_a1_lists_by_two_schedules_do_not_mix(coll: Communicator, kind: str) -> None:
    """The ranks of two schedules take different steps, one schedule after the other with the same tag."""
    root, me = coll.size - 1, coll.rank
    for short, long in permutations(SCHEDULES[kind], 2):
        wholes = [inputs(coll.size, n, torch.int64) for n in (7, 40, 1, 23)]
        ts = [parts[me].clone() for parts in wholes]

        async def program(ep: Endpoint) -> None:
            for name, some in ((short, ts[::2]), (long, ts[1::2])):  # noqa: B023
                await Scheduled(name, 1).run(ep, [Primitive(kind, t, root=root) for t in some])

        await perform(coll, program)
        for t, parts in zip(ts, wholes, strict=True):
            sums = reduced(parts, ReduceOp.SUM)
            total = sums[-1] if kind == "allreduce" or me == root else parts[me]
            expected = {"scan": sums[me], "broadcast": parts[root]}.get(kind, total)
            assert torch.equal(t, expected), (short, long, t.numel())


@pytest.mark.ranks(3, backend="local")
async def test_a2_as_many_lanes_as_there_may_be(coll: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a tag of its own, also in the last operation before numbers start again, and MPICH has 2^28 of them."""
    last = (1 << 22) - 1
    tags: set[int] = set()
    isend = LocalTransport.isend

    def noting(transport: LocalTransport, t: Tensor, dst: int, tag: int, done: Done) -> None:
        tags.add(tag)
        isend(transport, t, dst, tag, done)

    monkeypatch.setattr(LocalTransport, "isend", noting)
    parts = inputs(coll.size, 3001, torch.float64)
    for name in ("ring", "tree"):
        t = parts[coll.rank].clone()
        how = Scheduled(name, MAX_LANES)
        tags.clear()
        await perform(coll, lambda ep: how.run(ep, [Primitive("allreduce", t)]), last)  # noqa: B023
        assert torch.equal(t, reduced(parts, ReduceOp.SUM)[-1])
        assert {last + lane * LANE_TAGS for lane in range(MAX_LANES)} <= tags
        assert max(tags) < 1 << 28


# --- torch's modes -------------------------------------------------------------------------------------------------


def at_once(size: int, make: Callable[[Endpoint], Program[None]]) -> None:
    """Run a program on all ranks here and now."""
    hub, over = LocalHub(), [False] * size

    def finish(rank: int, _: object, error: BaseException | None) -> None:
        assert error is None
        over[rank] = True

    for rank in range(size):
        run(make(Endpoint(LocalTransport(hub, rank, size), 5)), partial(finish, rank))
    assert all(over)


@pytest.mark.parametrize("mode", [partial(torch.device, "meta"), torch.inference_mode, nullcontext])
@pytest.mark.parametrize("made_in", [torch.inference_mode, nullcontext])
def test_a1_scratch_is_of_the_kind_of_the_tensors(
    mode: Callable[[], AbstractContextManager[object]], made_in: Callable[[], AbstractContextManager[object]]
) -> None:
    """For any default device, and any thread that made the tensors or takes the next step."""
    with made_in():
        wholes = {how: [torch.full((6,), 1.0 + rank) for rank in range(3)] for how in all_of("allreduce")}
        blocks = {how: [torch.zeros(2) for _ in range(3)] for how in all_of("reduce_scatter")}
        t = torch.ones(6)
    with mode():
        for how, ts in wholes.items():
            at_once(3, lambda ep: how.run(ep, [Primitive("allreduce", ts[ep.rank])]))  # noqa: B023
        for how, outs in blocks.items():
            at_once(3, lambda ep: how.run(ep, [Primitive("reduce_scatter", t, outs[ep.rank], counts=[2, 2, 2])]))  # noqa: B023
    assert all(t.tolist() == [6.0] * 6 for ts in wholes.values() for t in ts)
    assert all(out.tolist() == [3.0] * 2 for outs in blocks.values() for out in outs)


# --- what it refuses -----------------------------------------------------------------------------------------------


def test_a1_mistakes_are_named() -> None:
    assert Scheduled("bruck").lacks(Wanted("alltoall", torch.float32, None, 1)) is None
    assert Scheduled("bruck").lacks(Wanted("allreduce", torch.float32, ReduceOp.SUM, 1)) == (
        "there is no schedule 'bruck' of allreduce, only ring, doubling, halving, tree, direct"
    )
    ep = Endpoint(LocalTransport(LocalHub(), 1, 4), 5)
    with pytest.raises(ValueError, match=r"rank 1 is not among \[0, 2\]"):
        ep.among([0, 2])
