"""Native calls keep, for any order of messages, the order of issue (S3)."""

from __future__ import annotations

import random
from functools import partial

import pytest

from aiodist.testing.seams.nccl import LaunchOrder, LaunchSlot


def test_s3_a_call_waits_for_the_slots_before() -> None:
    order = LaunchOrder()
    made: list[str] = []
    first, second = order.take(), order.take()
    second.run(lambda: made.append("second"))
    assert made == []
    first.run(lambda: made.append("first"))
    first.run(lambda: made.append("first again"))
    assert made == ["first", "first again"]
    first.release()
    assert made == ["first", "first again", "second"]
    second.run(lambda: made.append("second again"))
    assert made[-1] == "second again"
    assert len(order) == 1


def test_s3_a_slot_is_given_back_once_and_gives_no_more_calls() -> None:
    order = LaunchOrder()
    made: list[str] = []
    first, second, third = order.take(), order.take(), order.take()
    second.run(lambda: made.append("second"))
    second.release()
    second.release()
    with pytest.raises(RuntimeError, match="slot is released"):
        second.run(lambda: None)
    third.run(lambda: made.append("third"))
    assert made == []
    first.release()
    assert made == ["second", "third"]
    third.release()
    assert len(order) == 0


def test_s3_when_the_order_matters_no_more_everything_is_called_at_once() -> None:
    order = LaunchOrder()
    made: list[str] = []
    first, second = order.take(), order.take()
    second.run(lambda: made.append("second"))
    order.run_all()
    assert made == ["second"]
    first.run(lambda: made.append("first"))
    assert made == ["second", "first"]
    first.release()
    late = order.take()
    late.run(lambda: made.append("late"))
    assert made[-1] == "late"


def test_s3_what_a_call_adds_comes_after_it() -> None:
    order = LaunchOrder()
    made: list[str] = []
    first, second = order.take(), order.take()

    def call() -> None:
        second.run(lambda: made.append("second"))
        first.run(lambda: made.append("added"))
        first.release()
        order.take().run(lambda: made.append("third"))
        made.append("call")

    first.run(call)
    assert made == ["call", "added", "second"]
    second.release()
    assert made == ["call", "added", "second", "third"]


@pytest.mark.parametrize("seed", range(50))
def test_s3_any_interleaving_keeps_the_order_and_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    order = LaunchOrder()
    made: list[tuple[int, int]] = []
    expected: list[tuple[int, int]] = []
    steps: list[tuple[LaunchSlot, list[tuple[int, int]]]] = []  # of each slot, what it has still to call
    for number in range(rng.randrange(1, 12)):
        calls = [(number, k) for k in range(rng.randrange(4))]
        expected += calls
        steps.append((order.take(), calls))
    released = rng.random() < 0.2 and len(expected)
    while steps:
        slot, calls = rng.choice(steps)
        if calls:
            slot.run(partial(made.append, calls.pop(0)))
        else:
            slot.release()
            steps.remove((slot, calls))
        if released and rng.random() < 0.1:
            order.run_all()
    assert sorted(made) == sorted(expected)
    if not released:
        assert made == expected
    assert [k for k in made if k[0] == 0] == [k for k in expected if k[0] == 0]
    assert len(order) == 0
