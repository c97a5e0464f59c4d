"""A1: the schedules of the other operations, and the form that all of them have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.schedules import MAX_LANES, SCHEDULES, Blocks, Copy, Recv, Schedule, Send
from benchmarks.schedule_costs import Cost, cost_of, lower_bound

if TYPE_CHECKING:
    from tests.schedules.conftest import Simulation


def names(operation: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", SCHEDULES[operation])


@pytest.mark.drawn(1)
@names("reduce")
def test_a1_reduce_to_any_root(simulate: Simulation, buffered: Simulation, name: str) -> None:
    cost = cost_of("reduce", name)
    for size in range(1, 38):
        for root in range(size):
            assert simulate.elementwise("reduce", name, size, 3, root) == cost(size, 3)
        for n in {0, 1, size - 1, size, size + 1, 2 * size + 3}:
            assert simulate.elementwise("reduce", name, size, n, size // 3) == cost(size, n)
        assert buffered.elementwise("reduce", name, size, 5, size // 2) == cost(size, 5)


@given(
    name=st.sampled_from(["tree", "chain"]),
    ranks=st.integers(1, 12).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1))),
    n=st.integers(0, 60),
    chunks=st.integers(1, 32),
)
def test_a1_reduce_in_chunks(simulate: Simulation, name: str, ranks: tuple[int, int], n: int, chunks: int) -> None:
    size, root = ranks
    cost = cost_of("reduce", name)(size, n, chunks=chunks)
    assert simulate.elementwise("reduce", name, size, n, root, chunks=chunks) == cost


@names("scan")
def test_a1_scan(simulate: Simulation, buffered: Simulation, name: str) -> None:
    found, cost = SCHEDULES["scan"][name], cost_of("scan", name)
    for size in range(1, 38):
        for n in {0, 1, size - 1, size, size + 1, 2 * size + 3}:
            assert simulate.elementwise("scan", name, size, n) == cost(size, n)
        assert buffered.elementwise("scan", name, size, 5) == cost(size, 5)
        if found.chunked:
            assert simulate.elementwise("scan", name, size, 9, chunks=4) == cost(size, 9, chunks=4)


def shares(size: int) -> Iterator[Blocks]:
    """Return none, fewer elements than ranks, and more; equal blocks, different ones, all with one rank."""
    yield Blocks.even(size - 1, size)
    if size <= 16:
        yield from (Blocks.even(n, size) for n in (0, 1, size + 1, 3 * size))
        yield Blocks([0] * (size - 1) + [5])
    yield Blocks([rank * 5 % 4 for rank in range(size)])


@names("allgather")
def test_a1_allgather(simulate: Simulation, buffered: Simulation, name: str) -> None:
    cost = cost_of("allgather", name)
    for size in range(1, 38):
        for blocks in shares(size):
            assert simulate.allgather(name, blocks) == cost(size, blocks), (size, blocks.counts())
    for size in (1, 2, 5, 8, 13):
        blocks = Blocks.even(size + 2, size)
        assert buffered.allgather(name, blocks) == cost(size, blocks)


@pytest.mark.drawn(1)
@names("reduce_scatter")
def test_a1_reduce_scatter(simulate: Simulation, buffered: Simulation, name: str) -> None:
    cost = cost_of("reduce_scatter", name)
    for size in range(1, 38):
        for blocks in shares(size):
            assert simulate.reduce_scatter(name, blocks) == cost(size, blocks), (size, blocks.counts())
    for size in (1, 2, 5, 8, 13):
        blocks = Blocks.even(size + 2, size)
        assert buffered.reduce_scatter(name, blocks) == cost(size, blocks)


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=12), chunks=st.integers(1, 6))
def test_a1_any_counts(simulate: Simulation, counts: list[int], chunks: int) -> None:
    size, blocks = len(counts), Blocks(counts)
    assert (blocks.counts(), blocks.total, blocks.largest) == (counts, sum(counts), max(counts))
    for operation, run in (("allgather", simulate.allgather), ("reduce_scatter", simulate.reduce_scatter)):
        for name, found in SCHEDULES[operation].items():
            extra = {"chunks": chunks} if found.chunked else {}
            assert run(name, blocks, **extra) == cost_of(operation, name)(size, blocks, **extra), (operation, name)


@names("alltoall")
def test_a1_alltoall_of_equal_blocks(simulate: Simulation, buffered: Simulation, name: str) -> None:
    cost = cost_of("alltoall", name)
    for size in range(1, 38):
        for count in (0, 1, 3) if size <= 16 else (2,):
            blocks = Blocks.even(size * count, size)
            assert simulate.alltoall(name, np.full((size, size), count)) == cost(size, blocks), (size, count)
    for size in (1, 2, 5, 8, 13):
        assert buffered.alltoall(name, np.full((size, size), 2)) == cost(size, Blocks.even(2 * size, size))


@given(size=st.integers(1, 9), seed=st.integers(0, 999))
def test_a1_alltoall_of_different_blocks(simulate: Simulation, size: int, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 4, (size, size))
    sent = counts.sum(axis=1) - counts.diagonal()
    assert simulate.alltoall("direct", counts).elements == sent.max()
    if len({*counts.flat}) > 1:
        with pytest.raises(ValueError, match="equal length"):
            simulate.alltoall("bruck", counts)


# --- the form ------------------------------------------------------------------------------------------------------


def every_plan(size: int, n: int, chunks: int) -> Iterator[tuple[str, int, Schedule, list[int], int]]:
    """Return operation, rank, schedule, the borders in the working buffer, and how much of it is only read."""
    even, blocks = Blocks.even(n, size), Blocks([(i * 7 + n) % 5 for i in range(size)])
    for rank in range(size):
        for operation, found in SCHEDULES.items():
            for name, one in found.items():
                extra = {"chunks": chunks} if one.chunked else {}
                what = f"{operation} {name}"
                if operation in ("allreduce", "scan"):
                    yield what, rank, one.plan(rank, size, n, **extra), [n], 0
                elif operation in ("broadcast", "reduce"):
                    root = size // 2
                    only_read = n if operation == "reduce" and rank != root else 0
                    yield what, rank, one.plan(rank, size, n, root, **extra), [n], only_read
                elif operation == "allgather":
                    yield what, rank, one.plan(rank, size, blocks, **extra), [blocks.total], 0
                elif operation == "reduce_scatter":
                    end = blocks.total
                    yield what, rank, one.plan(rank, size, blocks, **extra), [end, end + blocks.count(rank)], end
                else:
                    end = size * even.largest
                    equal = Blocks.even(end, size)
                    yield what, rank, one.plan(rank, size, equal, equal, **extra), [end, 2 * end], end


def within(borders: Sequence[int], start: int, stop: int) -> bool:
    return start < stop and not any(start < border < stop for border in borders)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 11, 23])
def test_a1_transfers_of_a_step_get_along(size: int) -> None:
    for n, chunks in ((0, 1), (size - 1, 2), (2 * size + 1, 3)):
        for what, rank, plan, borders, only_read in every_plan(size, n, chunks):
            touched: list[tuple[set[int], set[int]]] = []
            for lane in plan.lanes:
                read: set[int] = set()
                written: set[int] = set()
                for step in lane():
                    check_step(step, rank, size, [*borders, plan.room], read, written)
                assert not written & set(range(only_read)), what
                touched.append((read, written))
            assert plan.room >= borders[-1]
            assert len(plan.lanes) <= MAX_LANES
            for i, (_, written) in enumerate(touched):
                others = [a | b for j, (a, b) in enumerate(touched) if j != i]
                assert not written & set().union(*others), f"{what}: lanes meet"


def check_step(
    step: Sequence[Send | Recv | Copy], rank: int, size: int, borders: Sequence[int], read: set[int], written: set[int]
) -> None:
    """Check one step on one rank; note what it reads and writes."""
    going: set[int] = set()
    filled: set[int] = set()
    peers: list[tuple[type, int]] = []
    for move in step:
        span = set(range(move.start, move.stop))
        assert within(borders, move.start, move.stop)
        assert move.stop <= borders[-1]
        if isinstance(move, Copy):
            assert within(borders, move.to, move.to + len(span))
            read |= span
            written |= {*range(move.to, move.to + len(span))}
            continue
        assert move.peer != rank
        assert 0 <= move.peer < size
        peers.append((type(move), move.peer))
        if isinstance(move, Send):
            going |= span
            read |= span
        else:
            written |= span
            if not move.combine:
                assert not filled & span
                filled |= span
    assert not filled & going
    # Programs in lockstep share their tags: two messages of a step to one rank could change places with theirs.
    assert len(set(peers)) == len(peers)


@pytest.mark.parametrize("n", [0, 1, 12, 96])
def test_a1_no_schedule_undercuts_the_bound(n: int) -> None:
    for size in (1, 2, 3, 4, 7, 8, 12):
        blocks = Blocks.even(n, size)
        for operation, found in SCHEDULES.items():
            for name, one in found.items():
                if one.equal and n % size:
                    continue
                given = blocks if operation in ("allgather", "reduce_scatter", "alltoall") else n
                bound, cost = lower_bound(operation, size, n), cost_of(operation, name)(size, given)
                assert cost.elements >= bound.elements, (operation, name, size)
                if name == "ring" and n % size == 0:
                    assert cost.elements == bound.elements
                if name in ("doubling", "bruck") and n >= size and size & (size - 1) == 0:
                    assert cost.messages == bound.messages
    assert lower_bound("allreduce", 65_536, 65_536) == Cost(16, 2 * 65_535)


def test_a1_what_the_others_cost() -> None:
    even = Blocks.even(800, 8)
    assert cost_of("allgather", "ring")(8, even) == Cost(7, 700)
    assert cost_of("allgather", "bruck")(8, even) == Cost(3, 700)
    assert cost_of("allgather", "doubling")(8, even) == Cost(3, 700)
    assert cost_of("allgather", "direct")(8, even) == Cost(7, 700)
    assert cost_of("reduce_scatter", "ring")(8, even, chunks=2) == Cost(14, 700)
    assert cost_of("reduce_scatter", "halving")(8, even) == Cost(3, 700)
    assert cost_of("reduce_scatter", "halving")(9, Blocks.even(900, 9)) == Cost(4, 900)
    assert cost_of("alltoall", "bruck")(8, even) == Cost(3, 3 * 400)
    assert cost_of("alltoall", "direct")(8, even) == Cost(7, 700)
    assert cost_of("scan", "doubling")(9, 10) == Cost(4, 40)
    assert cost_of("scan", "chain")(9, 10) == Cost(1, 10)
    assert cost_of("reduce", "tree")(9, 10) == Cost(1, 10)
