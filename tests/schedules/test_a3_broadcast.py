"""A3: broadcast by a tree, a chain or directly, from any root."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.schedules import SCHEDULES, Recv, Send
from benchmarks.schedule_costs import Cost, cost_of

if TYPE_CHECKING:
    from tests.schedules.conftest import Simulation

names = pytest.mark.parametrize("name", SCHEDULES["broadcast"])


@pytest.mark.drawn(2)
@names
def test_a3_any_root(simulate: Simulation, name: str) -> None:
    for size in range(1, 38):
        for root in range(size):
            assert simulate.elementwise("broadcast", name, size, 3, root) == cost_of("broadcast", name)(size, 3)


@names
def test_a3_any_length(simulate: Simulation, buffered: Simulation, name: str) -> None:
    for size in range(1, 38):
        for n in {0, 1, size - 1, size, size + 1, 2 * size + 3}:
            for root in {0, size // 3, size - 1}:
                cost = cost_of("broadcast", name)(size, n)
                assert simulate.elementwise("broadcast", name, size, n, root) == cost
        assert buffered.elementwise("broadcast", name, size, 5, size // 2) == cost_of("broadcast", name)(size, 5)


@given(
    name=st.sampled_from(["tree", "chain"]),
    ranks=st.integers(1, 12).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1))),
    n=st.integers(0, 99),
    chunks=st.integers(1, 32),
)
def test_a3_any_number_of_chunks(simulate: Simulation, name: str, ranks: tuple[int, int], n: int, chunks: int) -> None:
    size, root = ranks
    cost = cost_of("broadcast", name)(size, n, chunks=chunks)
    assert simulate.elementwise("broadcast", name, size, n, root, chunks=chunks) == cost


def test_a3_what_broadcast_costs() -> None:
    costs = {name: cost_of("broadcast", name) for name in SCHEDULES["broadcast"]}
    assert costs["tree"](37, 100) == Cost(6, 600)
    assert costs["chain"](37, 100) == Cost(1, 100)
    assert costs["chain"](37, 100, chunks=50) == Cost(50, 100)
    assert costs["direct"](37, 100) == Cost(36, 3600)
    assert [costs["tree"](size, 1).messages for size in (1, 2, 3, 4, 5, 8, 9, 65_536)] == [0, 1, 2, 2, 3, 3, 4, 16]


def test_a3_a_chain_sends_while_it_receives() -> None:
    """Chunks follow one another: with c of them, the last of p ranks has all after p - 1 + c - 1 steps."""
    plan = SCHEDULES["broadcast"]["chain"].plan(3, 8, 100, 0, chunks=4)
    steps = list(plan.lanes[0]())
    assert [len(step) for step in steps] == [1, 2, 2, 2, 1]


def test_a3_the_child_with_most_below_it_comes_first() -> None:
    assert list(SCHEDULES["broadcast"]["tree"].plan(2, 8, 5, 2).lanes[0]()) == [
        (Send(6, 0, 5), Send(4, 0, 5), Send(3, 0, 5))
    ]
    assert list(SCHEDULES["broadcast"]["tree"].plan(6, 8, 5, 2).lanes[0]()) == [
        (Recv(2, 0, 5),),
        (Send(0, 0, 5), Send(7, 0, 5)),
    ]
