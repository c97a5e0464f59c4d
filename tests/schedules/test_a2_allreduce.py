"""A2: rings, and the other schedules of allreduce, of any size and length; what they cost, counted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.schedules import MAX_LANES, SCHEDULES, Recv, Send
from aiodist.schedules.direct import LONG
from benchmarks.schedule_costs import Cost, cost_of

if TYPE_CHECKING:
    from tests.schedules.conftest import Simulation

names = pytest.mark.parametrize("name", SCHEDULES["allreduce"])


def lengths(size: int) -> Iterator[int]:
    """Return none, fewer than ranks, and more; the longer ones take too long for many ranks."""
    yield from {0, 1, size - 1, size + 1}
    if size <= 16:
        yield from (size, 2 * size + 3)


@pytest.mark.drawn(3)
@names
def test_a2_any_number_of_ranks_and_elements(simulate: Simulation, name: str) -> None:
    """Sums are right, results equal to the bit everywhere, and those in the fixed order in that one: see `simulate`."""
    for size in range(1, 38):
        for n in lengths(size):
            assert simulate.elementwise("allreduce", name, size, n) == cost_of("allreduce", name)(size, n)


@names
def test_a2_sends_that_are_over_at_once(buffered: Simulation, name: str) -> None:
    for size in (*range(1, 10), 16, 17, 37):
        assert buffered.elementwise("allreduce", name, size, 11) == cost_of("allreduce", name)(size, 11)


@pytest.mark.parametrize("operation", ["allreduce", "reduce"])
def test_a2_long_tensors_in_blocks(simulate: Simulation, operation: str) -> None:
    """Each rank combines a block, in the same order as a rank that combines all; in chunks too."""
    for size, n, chunks in ((1, LONG, 1), (2, LONG + 1, 3), (3, LONG, 1), (5, LONG + 3, 4), (21, LONG, 2)):
        for root in [None] if operation == "allreduce" else {0, size // 2, size - 1}:
            cost = cost_of(operation, "direct")(size, n, chunks=chunks)
            assert simulate.elementwise(operation, "direct", size, n, root, chunks=chunks) == cost


@pytest.mark.parametrize("operation", ["allreduce", "reduce"])
def test_a2_lists_join_short_and_long_tensors(operation: str) -> None:
    """Both sides have a message in the same step, so messages of joined schedules match by their order."""
    for size, n, root in product((1, 2, 5, 16, 17, 40), (3, LONG), (0, 1)):
        given = (size, n) if operation == "allreduce" else (size, n, root % size)
        sent, received = set(), set()
        for rank in range(size):
            (lane,) = SCHEDULES[operation]["direct"].plan(rank, *given).lanes
            for i, step in enumerate(lane()):
                sent |= {(i, rank, move.peer) for move in step if isinstance(move, Send)}
                received |= {(i, move.peer, rank) for move in step if isinstance(move, Recv)}
        assert sent == received, given


@pytest.mark.parametrize("name", ["ring", "tree"])
def test_a2_chunks_for_any_number_of_ranks(simulate: Simulation, name: str) -> None:
    for size in range(1, 38):
        for n, chunks in ((size + 2, 2),) if size > 10 else ((0, 4), (size - 1, 2), (2 * size + 5, 3)):
            cost = cost_of("allreduce", name)(size, n, chunks=chunks)
            assert simulate.elementwise("allreduce", name, size, n, chunks=chunks) == cost


@given(name=st.sampled_from(["ring", "tree"]), size=st.integers(1, 9), n=st.integers(0, 99), chunks=st.integers(1, 32))
def test_a2_any_number_of_chunks(simulate: Simulation, name: str, size: int, n: int, chunks: int) -> None:
    cost = cost_of("allreduce", name)(size, n, chunks=chunks)
    assert simulate.elementwise("allreduce", name, size, n, chunks=chunks) == cost


def test_a2_a_ring_in_chunks_has_a_lane_for_each() -> None:
    plan = SCHEDULES["allreduce"]["ring"].plan
    assert [len(plan(1, 4, n, chunks=5).lanes) for n in (0, 1, 4, 5, 100)] == [0, 1, 4, 5, 5]
    assert len(plan(1, 4, 100, chunks=MAX_LANES).lanes) == MAX_LANES
    with pytest.raises(ValueError, match="33 chunks at once: expected at most 32"):
        plan(1, 4, 100, chunks=33)
    with pytest.raises(ValueError, match="0 chunks: expected at least 1"):
        plan(1, 4, 100, chunks=0)


def test_a2_what_allreduce_costs() -> None:
    """The figures that the docstrings state, for 8 and for 65,536 ranks, which no plan has to run for."""
    costs = {name: cost_of("allreduce", name) for name in SCHEDULES["allreduce"]}
    assert costs["ring"](8, 800) == Cost(2 * 7, 2 * 7 * 100)
    assert costs["ring"](8, 800, chunks=4) == Cost(4 * 2 * 7, 2 * 7 * 100)
    assert costs["halving"](8, 800) == Cost(2 * 3, 2 * 7 * 100)
    assert costs["halving"](9, 800) == Cost(2 * 3 + 1, 2 * 7 * 100 + 800)
    assert costs["doubling"](8, 800) == Cost(3, 3 * 800)
    assert costs["doubling"](9, 800) == Cost(4, 4 * 800)
    assert costs["tree"](8, 800) == Cost(3, 3 * 800)
    assert costs["direct"](8, 800) == Cost(7, 7 * 800)
    many, n = 1 << 16, 1 << 20
    assert costs["ring"](many, n) == Cost(2 * (many - 1), 2 * n // many * (many - 1))
    assert costs["doubling"](many, n) == Cost(16, 16 * n)
    steps = SCHEDULES["allreduce"]["ring"].plan(40_000, many, n).lanes[0]()
    assert next(steps) == (Send(40_001, 39_999 * 16, 40_000 * 16), Recv(39_999, 39_998 * 16, 39_999 * 16, True))
