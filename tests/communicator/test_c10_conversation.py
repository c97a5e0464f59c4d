"""C10: the conversation about a failed operation ends on every rank, with one verdict, in any order of the messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist.communicator.conversation import (
    Action,
    Ask,
    Cause,
    Clear,
    Conclude,
    Conversations,
    Drain,
    SendStatement,
    StartTimer,
    Statement,
    Verdict,
    judge,
)
from aiodist.communicator.oplog import LEFT

SUM, MAX, FAILED = Statement("allreduce sum at a:1", 1), Statement("allreduce max at a:2", 2), Cause.FAILED
LATER = Statement("barrier at a:0", issued=False)
BROKEN = SUM._replace(cause=FAILED, error="a connection broke")


class Rank:
    """One rank of the model: its machine, and the frames that wait for it from each other rank, in order."""

    def __init__(self, rank: int, size: int) -> None:
        self.machine = Conversations(rank, size)
        self.inbox: dict[int, deque[Any]] = {other: deque() for other in range(size) if other != rank}
        self.to_state: set[int] = set()
        self.to_expire: set[int] = set()
        self.verdicts: dict[int, Verdict] = {}
        self.drained: set[tuple[int, int]] = set()
        self.cleared: set[int] = set()
        self.alive = True

    def key(self) -> str:
        cases = {
            number: (sorted(case.statements), sorted(case.answered), sorted(case.silent), case.verdict)
            for number, case in sorted(self.machine.cases.items())
        }
        waiting = sorted(self.to_state), sorted(self.to_expire), tuple(self.machine.gone), sorted(self.drained)
        return repr((cases, self.inbox, waiting, self.verdicts, self.alive))

    def note(self, action: Action) -> None:
        match action:
            case Drain(number, other, _, _):
                assert (number, other) not in self.drained, "drained twice"
                self.drained.add((number, other))
            case Conclude(number, verdict):
                assert number not in self.verdicts, "two verdicts"
                self.verdicts[number] = verdict
            case Clear(number):
                assert number in self.verdicts
                self.cleared.add(number)


class World:
    """All ranks, and the knowledge of each about each operation: `script[number][rank]`."""

    def __init__(
        self,
        script: dict[int, list[Statement]],
        dies: Collection[int] = (),
        stopped: int | None = None,
    ) -> None:
        size = len(next(iter(script.values())))
        self.ranks = [Rank(rank, size) for rank in range(size)]
        self.script = script
        self.dies, self.stopped = dies, stopped
        self.dead: list[int] = []
        """The dead ranks, in the order in which each other rank learns of them."""
        for number, statements in script.items():
            for rank, statement in enumerate(statements):
                if statement.cause and rank != stopped:
                    self.ranks[rank].to_state.add(number)

    def steps(self) -> Iterator[tuple[Any, ...]]:
        """Yield what can happen next."""
        for i, rank in enumerate(self.ranks):
            if not rank.alive or i == self.stopped:
                continue
            yield from (("state", i, number) for number in sorted(rank.to_state))
            yield from (
                ("deliver", i, src)
                for src, frames in rank.inbox.items()
                if frames and (frames[0] is not None or src == self.next_exit(i))
            )
            if self.stopped is not None:
                yield from (("expire", i, number) for number in sorted(rank.to_expire))
        yield from (("die", i) for i in self.dies if self.ranks[i].alive)

    def next_exit(self, rank: int) -> int | None:
        """Return the dead rank whose exit this one takes next."""
        return next((dead for dead in self.dead if dead not in self.ranks[rank].machine.gone), None)

    def take(self, step: tuple[Any, ...]) -> None:
        match step:
            case "state", i, number:
                self.ranks[i].to_state.discard(number)
                self.perform(i, self.ranks[i].machine.state(number, self.script[number][i]))
            case "expire", i, number:
                self.ranks[i].to_expire.discard(number)
                self.perform(i, self.ranks[i].machine.expire(number))
            case "deliver", i, src:
                received = self.ranks[i].inbox[src].popleft()
                machine = self.ranks[i].machine
                self.perform(i, machine.leave(src) if received is None else machine.hear(src, *received, {}, {}))
            case "die", i:
                self.ranks[i].alive = False
                self.dead.append(i)
                for other in self.ranks:
                    if other.alive:
                        other.inbox[i].append(None)

    def perform(self, i: int, actions: list[Action]) -> None:
        rank = self.ranks[i]
        for action in actions:
            match action:
                case SendStatement(number, statement):
                    for j, other in enumerate(self.ranks):
                        if j != i:
                            other.inbox[i].append((number, statement))
                case Ask(number) if self.script[number][i].issued:
                    rank.to_state.add(number)  # as soon as the transport lock is free
                case Ask(number):
                    self.perform(i, rank.machine.state(number, self.script[number][i]))
                case StartTimer(number):
                    rank.to_expire.add(number)
                case _:
                    rank.note(action)

    def check(self) -> None:
        """Nothing can happen any more: every rank that is there has the same verdict, and its messages are drained."""
        there = [rank for i, rank in enumerate(self.ranks) if rank.alive and i != self.stopped]
        for number in self.script:
            verdicts = [alike(rank.verdicts.get(number)) for rank in there]
            assert all(verdict == verdicts[0] for verdict in verdicts), verdicts
            started = any(number in rank.machine.cases for rank in there)
            assert not started or verdicts[0] is not None, "a hang"
            if started and self.stopped is None:
                assert all(number in rank.cleared for rank in there)

    def resume(self) -> None:
        """The stopped process continues: it answers, and concludes."""
        assert self.stopped is not None
        late, self.stopped = self.ranks[self.stopped], None
        while step := next(iter(self.steps()), None):
            self.take(step)
        for number in self.script:
            if any(number in rank.machine.cases for rank in self.ranks):
                assert number in late.verdicts
                assert all(number in rank.cleared for rank in self.ranks if rank.alive)


def alike(verdict: Verdict | None) -> Verdict | None:
    """Return what all ranks know at the same time; they may hear of the mismatches before it later than of this one."""
    ordered = verdict is not None and verdict.since >= 0
    return verdict._replace(since=-1, abort=False) if ordered and verdict is not None else verdict


def ends(world: World) -> list[World]:
    """Return the world at the end of every order of steps."""
    seen: set[str] = set()
    found: dict[str, World] = {}
    left = [world]
    while left:
        now = left.pop()
        key = "|".join(rank.key() for rank in now.ranks)
        if key in seen:
            continue
        seen.add(key)
        steps = list(now.steps())
        if not steps:
            found[key] = now
        for step in steps:
            after = deepcopy(now)
            after.take(step)
            left.append(after)
    return list(found.values())


DIFFER = Cause.MISMATCH
CASES: dict[str, tuple[list[Statement], Cause, int]] = {
    "two differ": ([SUM._replace(cause=DIFFER), MAX._replace(cause=DIFFER)], DIFFER, -1),
    "one finds it": ([SUM, MAX._replace(cause=DIFFER)], DIFFER, -1),
    "a failure that is a mismatch": ([BROKEN, MAX], DIFFER, -1),
    "one fails": ([BROKEN, SUM], FAILED, 0),
    "both fail": ([BROKEN, BROKEN], FAILED, 0),
    "one has left": ([BROKEN, SUM._replace(cause=Cause.GONE, error="rank 2 has left"), SUM], Cause.GONE, 1),
    "not issued": ([LATER, BROKEN], FAILED, 1),
    "three differ": ([SUM._replace(cause=DIFFER), MAX, SUM], DIFFER, -1),
    "one of three has not issued it": ([SUM._replace(cause=DIFFER), MAX._replace(cause=DIFFER), LATER], DIFFER, -1),
    "one of three fails": ([SUM, BROKEN, LATER], FAILED, 1),
    "a program finds a mismatch": ([SUM, SUM._replace(cause=DIFFER, error="sizes differ"), BROKEN], DIFFER, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_c10_every_order_ends_with_the_same_verdict(name: str) -> None:
    statements, cause, rank = CASES[name]
    found = ends(World({5: statements}))
    assert found
    for world in found:
        world.check()
        verdict = world.ranks[0].verdicts[5]
        assert (verdict.cause, verdict.rank) == (cause, rank)


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_c10_a_rank_dies_at_any_moment(name: str, dies: int) -> None:
    """The survivors agree: it had made its statement, or they name it, unless the others show a mismatch."""
    statements, _, _ = CASES[name]
    for world in ends(World({5: statements}, dies=[dies])):
        world.check()
        for rank in world.ranks:
            if rank.alive and (verdict := rank.verdicts.get(5)) is not None and len(statements) == 2:
                assert verdict.rank in (-1, dies, 1 - dies)
                if dies not in rank.machine.cases[5].statements and verdict.cause is not DIFFER:
                    assert (verdict.cause, verdict.rank) == (Cause.LOST, dies)


@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_c10_a_stopped_rank_is_named_and_answers_later(name: str, stopped: int) -> None:
    """Others wait for it no longer than the bound, which here passes at any moment after their statements."""
    statements, _, _ = CASES[name]
    world = World({5: statements}, stopped=stopped)
    # The bound is much longer than messages take: it passes when only the stopped rank is missing.
    while step := next((step for step in world.steps() if step[0] != "expire"), None):
        world.take(step)
    for step in list(world.steps()):
        world.take(step)
    world.check()
    for i, rank in enumerate(world.ranks):
        if i != stopped and (verdict := rank.verdicts.get(5)) is not None:
            assert verdict.silent == (stopped,)
            assert verdict.cause > Cause.SILENT or verdict.rank == stopped
    world.resume()


def test_c10_a_verdict_waits_only_one_bound_for_a_silent_rank() -> None:
    """Operation 8 failed first and waits for 7: when the bound of 8 has passed, rank 2 counts as silent in both."""
    machine = Conversations(0, 3)
    machine.state(8, BROKEN)
    machine.hear(1, 8, SUM, {}, {})
    machine.state(7, BROKEN)
    machine.expire(8)
    assert machine.verdict(7) is None  # rank 1 may still answer
    machine.hear(1, 7, SUM, {}, {})
    for number in (7, 8):
        verdict = machine.verdict(number)
        assert verdict is not None
        assert (verdict.cause, verdict.silent) == (Cause.SILENT, (2,))


def test_c10_two_operations_fail_at_the_same_time() -> None:
    differ = [SUM._replace(cause=DIFFER), MAX]
    for world in ends(World({5: differ, 6: [LATER, BROKEN]})):
        world.check()
        assert world.ranks[0].verdicts[5].cause is DIFFER
        assert world.ranks[0].verdicts[6].cause is FAILED


@pytest.mark.parametrize("size", [2, 3, 4])
def test_c10_three_mismatches_in_a_row_abort_on_every_rank(size: int) -> None:
    @settings(max_examples=30, deadline=None)
    @given(st.randoms(use_true_random=False))
    def in_any_order(random: Any) -> None:
        rows = [SUM._replace(cause=DIFFER), *[MAX] * (size - 1)]
        world = World({number: list(rows) for number in (5, 6, 7)} | {9: list(rows)})
        while steps := list(world.steps()):
            world.take(random.choice(steps))
        world.check()
        for rank in world.ranks:
            assert any(rank.verdicts[number].abort for number in (5, 6, 7))
            assert rank.verdicts[9].since == 9
            assert not rank.verdicts[9].abort

    in_any_order()


@pytest.mark.parametrize("size", [2, 3])
def test_c10_mismatches_that_ranks_find_in_order_name_the_first(size: int) -> None:
    rows = [SUM._replace(cause=DIFFER), *[MAX] * (size - 1)]
    world = World({number: list(rows) for number in (5, 6, 7)})
    while step := next(world.steps(), None):
        world.take(step)
    for rank in world.ranks:
        assert [rank.verdicts[number].since for number in (5, 6, 7)] == [5, 5, 5]
        assert [rank.verdicts[number].abort for number in (5, 6, 7)] == [False, False, True]


STATEMENTS = st.sampled_from(
    [
        SUM,
        MAX,
        LATER,
        BROKEN,
        SUM._replace(cause=DIFFER),
        MAX._replace(cause=FAILED, error="it raised"),
        SUM._replace(cause=DIFFER, error="sizes differ"),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(0, 2))
def test_c10_whatever_ranks_know_and_whoever_dies(data: st.DataObject, size: int, deaths: int) -> None:
    numbers = data.draw(st.sampled_from([(5,), (5, 6), (5, 1 << 50)]))
    script = {number: data.draw(st.lists(STATEMENTS, min_size=size, max_size=size)) for number in numbers}
    world = World(script, dies=data.draw(st.permutations(range(size)))[: min(deaths, size - 1)])
    while steps := list(world.steps()):
        world.take(data.draw(st.sampled_from(steps)))
    world.check()
    for number, statements in script.items():
        if not deaths and any(statement.cause for statement in statements):
            expected = judge(dict(enumerate(statements)))
            assert all(rank.verdicts[number].cause == expected.cause for rank in world.ranks)


def test_c10_a_rank_that_ends_counts_as_lost_though_it_answers() -> None:
    """All ranks get the exit before the answer, in this order."""
    machine = Conversations(0, 2)
    machine.state(3, BROKEN)
    machine.leave(1)
    verdict = machine.verdict(3)
    assert verdict is not None
    assert (verdict.cause, verdict.rank) == (Cause.LOST, 1)
    machine = Conversations(0, 3)
    machine.state(3, BROKEN)
    machine.leave(1)
    machine.hear(1, 3, LATER, {}, {})
    assert machine.verdict(3) is None
    machine.hear(2, 3, LATER, {}, {})
    verdict = machine.verdict(3)
    assert verdict is not None
    assert (verdict.cause, verdict.rank) == (Cause.LOST, 1)


def test_c10_the_sides_of_a_mismatch() -> None:
    left = Statement(LEFT, 7)
    statements = {0: SUM, 1: MAX, 2: MAX, 3: LATER, 4: Statement(issued=False), 6: left}
    sides = judge(statements, silent=(5,), gone={7: True, 8: False}).sides
    assert sides == (
        "rank 0: allreduce sum at a:1; ranks 1, 2: allreduce max at a:2; "
        "rank 3: not issued, after barrier at a:0; rank 4: not issued; "
        "rank 5: did not answer within 2 s; ranks 6, 7: left; rank 8: lost"
    )
    edited = {0: SUM._replace(cause=DIFFER), 1: SUM._replace(word=3)}
    assert judge(edited).sides == "ranks 0, 1: allreduce sum at a:1, edited in different ways"


def test_c10_the_first_lost_rank_is_the_cause() -> None:
    """A rank that ends since another one was lost is no cause, even if it is lost before its answer."""
    machine = Conversations(0, 3)
    machine.state(5, BROKEN)
    machine.leave(2)
    machine.leave(1)
    verdict = machine.verdict(5)
    assert verdict is not None
    assert (verdict.cause, verdict.rank) == (Cause.LOST, 2)


def test_c10_a_lost_rank_whose_statement_reached_only_some_is_named_by_all() -> None:
    """Rank 1 is lost while it sends its statement, then rank 2: the first of them is the cause on both other ranks."""
    verdicts = []
    for rank, heard in ((0, (1, 3)), (3, (0,))):
        machine = Conversations(rank, 4)
        machine.state(5, SUM)
        for other in heard:
            machine.hear(other, 5, BROKEN if other == 1 else SUM, {}, {})
        machine.leave(1)
        machine.leave(2)
        verdicts.append(machine.verdict(5))
    assert verdicts[0] == verdicts[1]
    assert verdicts[0] is not None
    assert (verdicts[0].cause, verdicts[0].rank) == (Cause.LOST, 1)
