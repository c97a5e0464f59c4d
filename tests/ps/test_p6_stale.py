"""P6: n of m, backup workers, stale gradients dropped or scaled, and counted; stragglers on a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

import pytest

from aiodist.ps import Asynchronous, Policy, Quorum, Synchronous, inverse_age
from aiodist.ps.machines import Apply, Drop, Part, Pull, Push, Serve
from tests.ps.held import waiting


def test_p6_n_of_any_workers() -> None:
    machine = Quorum(3, "mean").machine(range(5))
    assert machine.push(Push(4, 0)) == []
    assert machine.push(Push(4, 1)) == []
    assert waiting(machine) == ((Push(4, 0), Push(4, 1)), ())
    third = 1 / 3
    assert machine.push(Push(1, 7)) == [Apply(1, (Part(1, 7, third), Part(4, 0, third), Part(4, 1, third)))]
    assert machine.push(Push(0, 0)) == []  # stale by one, accepted
    machine.push(Push(2, 0, base=1))
    machine.push(Push(3, 0))
    assert machine.counts.staleness == {0: 4, 1: 2}
    assert machine.counts.dropped == machine.counts.scaled == 0


def test_p6_a_quorum_continues_after_a_kill() -> None:
    machine = Quorum(2, "sum").machine([0, 1, 2])
    machine.push(Push(0, 0))
    assert machine.leave(1) == []
    assert machine.push(Push(2, 0)) == [Apply(1, (Part(0, 0, 1.0), Part(2, 0, 1.0)))]
    assert machine.leave(0) == []
    assert machine.push(Push(2, 1, base=1)) == [Apply(2, (Part(2, 1, 1.0),))]  # as many as are left


def test_p6_a_quorum_needs_as_many_as_are_left() -> None:
    machine = Quorum(4, "mean", stale="drop").machine(range(4))
    machine.push(Push(1, 0))
    machine.push(Push(0, 0))
    machine.pull(Pull(0, 1))
    assert machine.leave(3) == []
    half = 0.5
    # the step waits for the worker that leaves, whose push counts
    assert machine.leave(1) == [Apply(1, (Part(0, 0, half), Part(1, 0, half))), Serve(0, 1, 1)]
    assert machine.push(Push(2, 0, 1)) == []
    assert machine.leave(2) == [Apply(2, (Part(2, 0, 1.0),))]
    assert machine.leave(0) == []


@pytest.mark.parametrize(("stale", "served"), [("accept", True), ("scale", True), ("drop", False)])
def test_p6_reads_wait_for_own_pushes_only_where_the_step_needs_no_other_tensor(stale: Any, served: bool) -> None:
    """Workers that each wait at another tensor for a step that lacks one push would wait for one another."""
    machine = Quorum(2, "mean", stale=stale).machine(range(3))
    machine.push(Push(0, 0))
    assert (machine.pull(Pull(0, 1)) == [Serve(0, 1, 0)]) is served


def test_p6_what_the_last_worker_left_comes_out() -> None:
    machine = Quorum(3, "sum").machine(range(3))
    machine.push(Push(2, 0))
    machine.pull(Pull(5, 0, wants=9))
    machine.pull(Pull(2, 1, wants=9))
    assert machine.leave(0) == []
    assert machine.leave(2) == [Apply(1, (Part(2, 0, 1.0),))]
    assert machine.leave(1) == [Serve(5, 0, 1), Serve(2, 1, 1)]


def test_p6_backup_workers_are_dropped_and_counted() -> None:
    machine = Quorum(2, "mean", stale="drop").machine(range(4))
    machine.push(Push(0, 0))
    assert machine.push(Push(3, 0)) == [Apply(1, (Part(0, 0, 0.5), Part(3, 0, 0.5)))]
    assert machine.push(Push(1, 0)) == [Drop(1, 0)]
    assert machine.push(Push(2, 0)) == [Drop(2, 0)]
    assert machine.pull(Pull(2, 1)) == [Serve(2, 1, 1)]  # nothing to wait for
    assert machine.push(Push(1, 1, base=1)) == []
    assert machine.push(Push(2, 2, base=1)) == [Apply(2, (Part(1, 1, 0.5), Part(2, 2, 0.5)))]
    assert (machine.counts.dropped, machine.counts.staleness) == (2, {0: 4})


def test_p6_a_quorum_scales_the_stale() -> None:
    machine = Quorum(2, "mean", stale="scale").machine(range(2))
    machine.push(Push(0, 0))
    machine.push(Push(1, 0))
    machine.push(Push(0, 1, base=1))
    assert machine.push(Push(1, 1, base=0)) == [Apply(2, (Part(0, 1, 0.5), Part(1, 1, 0.25)))]
    assert (machine.counts.scaled, machine.counts.staleness.total()) == (1, 4)


@pytest.mark.parametrize(("limit", "kept"), [(None, 6), (0, 1), (2, 3)])
def test_p6_asynchronous_drops_what_is_too_stale(limit: int | None, kept: int) -> None:
    machine = Asynchronous(limit).machine([0])
    for number in range(6):  # pushes without reading
        for action in machine.push(Push(0, number)):
            assert action == (Apply(number + 1, (Part(0, number, 1.0),)) if number < kept else Drop(0, number))
    assert (machine.version, machine.counts.dropped) == (kept, 6 - kept)


@pytest.mark.parametrize(
    ("policy", "weights"),
    [
        (Asynchronous(stale="scale"), [1, 1 / 2, 1 / 3, 1 / 4]),
        (Asynchronous(stale="scale", scale=lambda age: 0.5**age), [1, 1 / 2, 1 / 4, 1 / 8]),
        (Asynchronous(stale="scale", scale=lambda age: float(age < 2)), [1, 1, 0, 0]),
        (Asynchronous(stale="scale", scale=lambda age: 0.5 / (1 + age)), [1 / 2, 1 / 4, 1 / 6]),
    ],
    ids=repr,
)
def test_p6_asynchronous_scales_what_is_too_stale(policy: Policy, weights: list[float]) -> None:
    machine = policy.machine([0])
    for number, weight in enumerate(weights):
        assert machine.push(Push(0, number)) == [Apply(number + 1, (Part(0, number, weight),))]
    assert machine.counts.scaled == sum(weight != 1 for weight in weights)
    assert machine.counts.dropped == 0


def test_p6_a_scale_that_fails_late_changes_nothing() -> None:
    machine = Asynchronous(stale="scale", scale=lambda age: inverse_age(age) if age != 4 else float("nan")).machine([0])
    for number in range(4):
        machine.push(Push(0, number))
    with pytest.raises(ValueError, match=r"scale\(4\) is nan: expected a finite weight, not below 0"):
        machine.push(Push(0, 4))
    assert (machine.version, machine.counts.staleness.total()) == (4, 4)
    assert machine.push(Push(0, 4, base=4)) == [Apply(5, (Part(0, 4, 1.0),))]


# --- stragglers -------------------------------------------------------------------------------------------------

Delay = Callable[[random.Random], float]

STRAGGLERS: dict[str, Delay] = {
    "pareto": lambda dice: dice.paretovariate(1.5),
    "lognormal": lambda dice: dice.lognormvariate(0, 1.25),
    "one in twenty": lambda dice: dice.uniform(0.9, 1.1) * (20 if dice.random() < 0.05 else 1),
}


def step_seconds(policy: Policy, workers: int, delay: Delay, seed: int, steps: int = 400) -> tuple[float, float]:
    """Train on a simulated clock: read, compute for a random time, push, read. Return seconds and drops of a step."""
    machine = policy.machine(range(workers))
    dice = random.Random(seed)
    begun = dict.fromkeys(range(workers), 0)  # the version that each computes with
    ends = [(delay(dice), worker, 0) for worker in range(workers)]
    heapify(ends)
    now = 0.0
    while machine.version < steps:
        now, worker, number = heappop(ends)
        actions = machine.push(Push(worker, number, begun[worker]))
        actions += machine.pull(Pull(worker, number + 1))
        for action in actions:
            if isinstance(action, Serve):
                begun[action.client] = action.version
                heappush(ends, (now + delay(dice), action.client, action.number + 1))
    return now / steps, machine.counts.dropped / steps


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stragglers", STRAGGLERS)
def test_p6_four_backup_workers_halve_the_step(stragglers: str) -> None:
    delay = STRAGGLERS[stragglers]
    for seed in range(5):
        alone, none = step_seconds(Synchronous("mean"), 16, delay, seed)
        backed, dropped = step_seconds(Quorum(16, "mean", stale="drop"), 20, delay, seed)
        assert backed <= alone / 2
        assert none == 0
        assert 0 < dropped <= 4


def test_p6_without_stragglers_backups_win_next_to_nothing() -> None:
    """That is: the simulation does not favour them."""
    alone, _ = step_seconds(Synchronous("mean"), 16, lambda dice: dice.uniform(0.9, 1.1), 1)
    backed, _ = step_seconds(Quorum(16, "mean", stale="drop"), 20, lambda dice: dice.uniform(0.9, 1.1), 1)
    assert backed > 0.8 * alone
