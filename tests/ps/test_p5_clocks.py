"""P5: synchronous, asynchronous, bounded staleness, by examples; what the dead and the finished leave behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import partial

import pytest

from aiodist.ps import Asynchronous, Bounded, Policy, Quorum, Synchronous, inverse_age
from aiodist.ps.machines import EXACT_STALENESS, Action, Apply, Drop, Machine, Part, Pull, Push, Serve
from tests.ps.held import waiting


def step(version: int, *pushes: tuple[int, int], weight: float = 1.0) -> Apply:
    return Apply(version, tuple(Part(worker, number, weight) for worker, number in pushes))


def fill(machine: Machine, *pushes: tuple[int, int]) -> list[Action]:
    """Push (worker, number) one after another; return all that comes out."""
    return [action for worker, number in pushes for action in machine.push(Push(worker, number))]


# --- synchronous ------------------------------------------------------------------------------------------------


def test_p5_synchronous_takes_one_of_each() -> None:
    machine = Synchronous("mean").machine([7, 2, 4])
    assert fill(machine, (4, 0), (7, 5)) == []
    assert waiting(machine) == ((Push(4, 0), Push(7, 5)), ())
    assert fill(machine, (2, 1)) == [step(1, (2, 1), (4, 0), (7, 5), weight=1 / 3)]
    assert machine.version == 1
    assert waiting(machine) == ((), ())
    assert fill(Synchronous("sum").machine([0, 1]), (1, 0), (0, 0)) == [step(1, (0, 0), (1, 0))]


def test_p5_synchronous_holds_who_runs_ahead() -> None:
    machine = Synchronous("sum").machine([0, 1])
    assert fill(machine, (0, 0), (0, 1), (0, 2)) == []
    assert fill(machine, (1, 0)) == [step(1, (0, 0), (1, 0))]
    assert waiting(machine)[0] == (Push(0, 1), Push(0, 2))
    assert fill(machine, (1, 9)) == [step(2, (0, 1), (1, 9))]
    assert machine.counts.staleness == {0: 2, 1: 2}  # without a read


def test_p5_synchronous_pull_waits_for_its_version() -> None:
    machine = Synchronous("sum").machine([0, 1])
    assert machine.pull(Pull(0, 0)) == [Serve(0, 0, 0)]
    fill(machine, (0, 1))
    assert machine.pull(Pull(0, 2)) == []
    assert machine.pull(Pull(1, 0)) == [Serve(1, 0, 0)]
    fill(machine, (0, 3))
    assert machine.pull(Pull(0, 4)) == []
    assert waiting(machine)[1] == (Pull(0, 2), Pull(0, 4))
    assert fill(machine, (1, 1)) == [step(1, (0, 1), (1, 1)), Serve(0, 2, 1)]
    assert fill(machine, (1, 2)) == [step(2, (0, 3), (1, 2)), Serve(0, 4, 2)]


def test_p5_synchronous_continues_without_a_worker_that_leaves() -> None:
    machine = Synchronous("mean").machine([0, 1, 2])
    fill(machine, (0, 0), (1, 0), (1, 1))
    assert machine.leave(2) == [step(1, (0, 0), (1, 0), weight=0.5)]
    assert machine.leave(1) == []  # what it pushed before still counts
    assert waiting(machine) == ((Push(1, 1),), ())
    assert fill(machine, (0, 1)) == [step(2, (0, 1), (1, 1), weight=0.5)]
    assert fill(machine, (0, 2)) == [step(3, (0, 2))]
    assert machine.leave(0) == []


def test_p5_synchronous_gives_out_all_when_the_last_leave() -> None:
    machine = Synchronous("mean").machine([0, 1, 2])
    fill(machine, (0, 0), (0, 1), (0, 2), (1, 0), (1, 1))
    machine.pull(Pull(0, 3))
    machine.pull(Pull(9, 0, wants=2))
    machine.pull(Pull(9, 1, wants=50))
    assert machine.leave(0) == []
    assert machine.leave(1) == []
    assert machine.leave(2) == [
        step(1, (0, 0), (1, 0), weight=0.5),
        step(2, (0, 1), (1, 1), weight=0.5),
        Serve(9, 0, 2),
        step(3, (0, 2)),
        Serve(0, 3, 3),
        Serve(9, 1, 3),
    ]
    assert waiting(machine) == ((), ())
    assert machine.pull(Pull(9, 2, wants=50)) == [Serve(9, 2, 3)]


@pytest.mark.parametrize("policy", [Synchronous("sum"), Asynchronous(), Bounded(2), Quorum(2, "sum")])
def test_p5_to_leave_twice_is_to_leave(policy: Policy) -> None:
    machine = policy.machine([0, 1])
    assert machine.leave(0) == []
    assert machine.leave(0) == []
    assert fill(machine, (1, 0)) == [step(1, (1, 0))]


@pytest.mark.parametrize("policy", [Synchronous("sum"), Asynchronous(), Bounded(2), Quorum(2, "sum")])
def test_p5_pushes_of_the_dead_that_come_later_are_dropped(policy: Policy) -> None:
    machine = policy.machine([0, 1])
    machine.leave(0)
    assert machine.push(Push(0, 3)) == [Drop(0, 3)]
    assert machine.push(Push(0, 3)) == [Drop(0, 3)]  # it came again
    assert (machine.counts.dropped, machine.version) == (1, 0)
    assert machine.pull(Pull(0, 4)) == [Serve(0, 4, 0)]  # it reads on


@pytest.mark.parametrize("policy", [Synchronous("sum"), Asynchronous(), Bounded(0), Bounded(1), Quorum(2, "sum")])
def test_p5_a_repeated_push_is_ignored(policy: Policy) -> None:
    machine = policy.machine([0, 1])
    seen = fill(machine, (0, 4), (0, 4), (0, 3), (1, 0), (1, 0), (0, 4))
    assert sorted(part[:2] for action in seen if isinstance(action, Apply) for part in action.parts) == [(0, 4), (1, 0)]
    assert machine.counts.staleness.total() == 2


def test_p5_a_pull_waits_for_no_later_push() -> None:
    """It came late: of its own pushes only those before it count."""
    machine = Synchronous("sum").machine([0, 1])
    fill(machine, (0, 0), (0, 7))
    assert machine.pull(Pull(0, 3)) == []
    assert fill(machine, (1, 0)) == [step(1, (0, 0), (1, 0)), Serve(0, 3, 1)]
    assert machine.pull(Pull(0, 5)) == [Serve(0, 5, 1)]


def test_p5_a_pull_waits_for_its_pushes_and_then_for_its_version() -> None:
    machine = Quorum(2, "sum").machine([0, 1])
    fill(machine, (0, 0))
    assert machine.pull(Pull(0, 1, wants=2)) == []
    assert fill(machine, (1, 0)) == [step(1, (0, 0), (1, 0))]
    assert fill(machine, (1, 1), (1, 2)) == [step(2, (1, 1), (1, 2)), Serve(0, 1, 2)]


# --- asynchronous -----------------------------------------------------------------------------------------------


def test_p5_asynchronous_makes_a_version_of_each() -> None:
    machine = Asynchronous().machine([0, 1])
    assert fill(machine, (1, 0), (1, 1), (0, 0)) == [step(1, (1, 0)), step(2, (1, 1)), step(3, (0, 0))]
    assert machine.pull(Pull(1, 2)) == [Serve(1, 2, 3)]
    assert machine.push(Push(1, 3, base=3)) == [step(4, (1, 3))]
    assert machine.counts.staleness == {0: 2, 1: 1, 2: 1}
    assert machine.pull(Pull(0, 1, wants=6)) == []
    assert waiting(machine) == ((), (Pull(0, 1, 6),))
    assert fill(machine, (1, 4), (1, 5), (1, 6)) == [step(5, (1, 4)), step(6, (1, 5)), Serve(0, 1, 6), step(7, (1, 6))]


def test_p5_the_histogram_of_staleness_stays_small() -> None:
    machine = Asynchronous().machine([0])
    many = 3 * EXACT_STALENESS
    fill(machine, *((0, number) for number in range(many)))
    assert machine.counts.staleness.total() == many
    assert machine.counts.staleness[EXACT_STALENESS - 1] == 1
    assert machine.counts.staleness[EXACT_STALENESS] == EXACT_STALENESS
    assert machine.counts.staleness[2 * EXACT_STALENESS] == EXACT_STALENESS
    assert len(machine.counts.staleness) == EXACT_STALENESS + 2


# --- bounded staleness ------------------------------------------------------------------------------------------


def test_p5_bounded_holds_who_is_too_far_ahead() -> None:
    machine = Bounded(2).machine([0, 1, 2])
    assert fill(machine, (0, 0), (0, 1)) == [step(1, (0, 0)), step(2, (0, 1))]
    assert fill(machine, (0, 2), (0, 3)) == []
    assert fill(machine, (1, 0)) == [step(3, (1, 0))]
    assert waiting(machine) == ((Push(0, 2), Push(0, 3)), ())
    assert machine.pull(Pull(0, 4)) == []
    assert fill(machine, (2, 0)) == [step(4, (2, 0)), step(5, (0, 2))]
    assert fill(machine, (2, 1)) == [step(6, (2, 1))]
    assert fill(machine, (1, 1)) == [step(7, (1, 1)), step(8, (0, 3)), Serve(0, 4, 8)]


def test_p5_bounded_releases_the_slowest_worker_first() -> None:
    machine = Bounded(1).machine([0, 1, 2])
    assert fill(machine, (2, 0), (1, 0)) == [step(1, (2, 0)), step(2, (1, 0))]
    assert fill(machine, (2, 1), (1, 1), (2, 2), (1, 2)) == []
    # 0 leaves at clock 0: the others are free to make one step each, then each other's next, in turn
    assert machine.leave(0) == [step(3, (1, 1)), step(4, (2, 1)), step(5, (1, 2)), step(6, (2, 2))]
    assert waiting(machine) == ((), ())

    machine = Bounded(2).machine([0, 1, 2])
    fill(machine, (1, 0), (1, 1), (2, 0), (2, 1))
    assert fill(machine, (2, 2), (2, 3), (1, 2), (2, 4)) == []
    # now two steps each
    assert machine.leave(0) == [step(5, (1, 2)), step(6, (2, 2)), step(7, (2, 3)), step(8, (2, 4))]


def test_p5_bounded_keeps_to_the_clock_for_what_a_leaver_left() -> None:
    machine = Bounded(1).machine([0, 1])
    assert fill(machine, (0, 0), (0, 1), (0, 2)) == [step(1, (0, 0))]
    assert machine.leave(0) == []
    assert fill(machine, (1, 0)) == [step(2, (1, 0)), step(3, (0, 1))]
    assert machine.leave(1) == [step(4, (0, 2))]


def test_p5_bounded_by_zero_moves_all_workers_together() -> None:
    machine = Bounded(0).machine([0, 1, 2])
    assert fill(machine, (2, 0), (0, 0), (2, 1)) == []
    assert fill(machine, (1, 0)) == [step(1, (0, 0), (1, 0), (2, 0))]
    assert machine.leave(0) == []
    assert fill(machine, (1, 1)) == [step(2, (1, 1), (2, 1))]


# --- rests ------------------------------------------------------------------------------------------------------


def test_p5_who_rests_is_not_waited_for_and_comes_back_in_step() -> None:
    machine = Synchronous("mean").machine([0, 1])
    fill(machine, (0, 0), (0, 1), (0, 2), (1, 0))
    assert machine.rest(1) == [step(2, (0, 1)), step(3, (0, 2))]
    assert fill(machine, (0, 3)) == [step(4, (0, 3))]
    assert machine.counts.incomplete == 3
    assert machine.rest(0) == []
    machine.resume([0, 1])
    assert fill(machine, (1, 1)) == []  # the clocks are even: both are waited for
    assert fill(machine, (0, 4)) == [step(5, (0, 4), (1, 1), weight=0.5)]
    assert machine.counts.incomplete == 3


def test_p5_a_quorum_takes_what_there_is_when_the_others_rest() -> None:
    machine = Quorum(2, "mean").machine(range(3))
    fill(machine, (0, 0))
    assert machine.rest(1) == []
    assert machine.rest(2) == [step(1, (0, 0))]
    assert machine.counts.incomplete == 1
    assert machine.rest(0) == []
    machine.resume(range(3))
    assert fill(machine, (0, 1)) == []
    assert fill(machine, (2, 1)) == [step(2, (0, 1), (2, 1), weight=0.5)]


@pytest.mark.parametrize("ahead", [1, 2])
def test_p5_bounded_clocks_are_even_after_a_barrier(ahead: int) -> None:
    machine = Bounded(ahead).machine([0, 1])
    fill(machine, *((0, number) for number in range(8)), (1, 0))
    assert machine.version == ahead + 2
    assert len(machine.rest(1)) == 8 - ahead - 1
    assert machine.rest(0) == []
    machine.resume([0, 1])
    assert len(fill(machine, *((0, number) for number in range(10, 14)))) == ahead  # no further ahead than before
    assert len(fill(machine, *((1, number) for number in range(10, 14)))) == 8 - ahead


def test_p5_reads_of_versions_to_come_outlast_a_rest_of_all() -> None:
    machine = Synchronous("sum").machine([0, 1])
    machine.pull(Pull(9, 0, wants=1))
    machine.rest(0)
    assert machine.rest(1) == []
    assert waiting(machine) == ((), (Pull(9, 0, 1),))
    machine.resume([0])
    assert fill(machine, (0, 0)) == [step(1, (0, 0)), Serve(9, 0, 1)]
    machine.pull(Pull(9, 1, wants=7))
    assert machine.leave(0) == []
    assert machine.leave(1) == [Serve(9, 1, 1)], "nobody is left, who rested has left too"


def test_p5_who_pushes_while_it_rests_is_back() -> None:
    machine = Synchronous("sum").machine([0, 1])
    machine.rest(0)
    assert fill(machine, (0, 0)) == []
    assert machine.rest(1) == [step(1, (0, 0))]
    assert fill(machine, (0, 1)) == [step(2, (0, 1))]


# --- policies ---------------------------------------------------------------------------------------------------


def halve(staleness: int) -> float:
    return 0.5**staleness


def power(exponent: float, staleness: int) -> float:
    return float((1 + staleness) ** -exponent)


class Power:
    def __init__(self, exponent: float) -> None:
        self.exponent = exponent

    def __call__(self, staleness: int) -> float:
        return power(self.exponent, staleness)


def test_p5_policies_say_what_they_are() -> None:
    assert repr(Synchronous("mean")) == "Synchronous(reduction='mean')"
    assert repr(Asynchronous()) == "Asynchronous(max_staleness=None, stale='drop', scale=None)"
    assert repr(Bounded(4)) == "Bounded(staleness=4)"
    assert repr(Quorum(3, "sum", stale="drop")) == "Quorum(n=3, reduction='sum', stale='drop', scale=None)"
    with pytest.raises(FrozenInstanceError):
        Bounded(4).staleness = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    "make",
    [
        lambda exponent: lambda staleness: (1 + staleness) ** -exponent,
        lambda exponent: partial(power, exponent),
        Power,
    ],
    ids=["closure", "partial", "object"],
)
def test_p5_a_policy_with_a_function_has_a_repr_that_ranks_can_compare(
    make: Callable[[float], Callable[[int], float]],
) -> None:
    shown = [repr(Asynchronous(stale="scale", scale=make(exponent))) for exponent in (0.5, 0.5, 0.6)]
    assert shown[0] == shown[1]  # two functions at two addresses
    assert shown[0] != shown[2]  # that do something else
    assert "0x" not in shown[0]
    assert repr(Asynchronous(None, "scale", halve)) == (
        "Asynchronous(max_staleness=None, stale='scale', scale=halve[1.0, 0.5, 0.25, 0.125, 0.03125, 0.0009765625, "
        "7.888609052210118e-31])"
    )


@pytest.mark.parametrize(
    ("policy", "accepts", "scales"),
    [
        (Synchronous("mean"), True, True),
        (Synchronous("sum"), True, False),
        (Asynchronous(3), False, False),
        (Asynchronous(None, "scale"), False, True),
        (Bounded(1), False, False),
        (Quorum(1, "sum"), True, False),
        (Quorum(1, "sum", "drop"), True, False),
        (Quorum(1, "sum", "scale"), True, True),
        (Quorum(1, "mean"), True, True),
    ],
    ids=repr,
)
def test_p5_policies_say_what_they_do(policy: Policy, accepts: bool, scales: bool) -> None:
    assert policy.accepts is accepts
    assert policy.scales is scales


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Synchronous("max"), "reduction='max': expected one of 'mean', 'sum'"),  # type: ignore[arg-type]
        (lambda: Quorum(2, "avg"), "reduction='avg': expected one of 'mean', 'sum'"),  # type: ignore[arg-type]
        (lambda: Quorum(0, "sum"), "n=0: expected at least 1"),
        (lambda: Quorum(1.5, "sum"), "n is float: expected an int"),  # type: ignore[arg-type]
        (lambda: Quorum(1, "sum", "keep"), "stale='keep': expected one of 'accept', 'drop', 'scale'"),  # type: ignore[arg-type]
        (lambda: Quorum(1, "sum", "drop", halve), "scale is given, but stale is 'drop': expected 'scale'"),
        (lambda: Asynchronous(-1), "max_staleness=-1: expected at least 0"),
        (lambda: Asynchronous(stale="accept"), "stale='accept': expected one of 'drop', 'scale'"),  # type: ignore[arg-type]
        (lambda: Asynchronous(stale="scale", scale=lambda age: -age), r"scale\(1\) is -1.0: expected a finite weight"),
        (lambda: Bounded(-1), "staleness=-1: expected at least 0"),
        (lambda: Bounded(True), "staleness is bool: expected an int"),
        (lambda: Asynchronous(1, "scale"), "max_staleness is given, but stale is 'scale'"),
        (lambda: Quorum(1, "sum", scale=inverse_age), "scale is given, but stale is 'accept'"),
    ],
)
def test_p5_policies_that_make_no_sense(make: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()
