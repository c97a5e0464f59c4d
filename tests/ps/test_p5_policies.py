"""P5, P6: all calls of workers, in any order, under any policy: no push is lost or doubled, and no wait is endless."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.ps import Asynchronous, Bounded, Policy, Quorum, Synchronous
from aiodist.ps.machines import Action, Apply, Drop, Machine, Part, Pull, Push, Serve
from tests.ps.held import waiting

READER = 1000


def pushed(policy: Policy, machine: Machine, push: Push) -> list[Action]:
    """Return the actions of a push, and check that `step` changes the machine in the same way, or not at all."""
    quick, before = deepcopy(machine), deepcopy(machine)
    alone = quick.step(*push)
    actions = machine.push(push)
    assert vars(quick) == vars(machine if alone else before)
    if alone:
        assert actions == [Apply(machine.version, (Part(push.worker, push.number, 1.0),))]
    elif policy == Asynchronous() and not machine.reads and push.worker in before.present:
        assert not any(isinstance(action, Apply) for action in actions), "`step` must make this step"
    return actions


class Watched:
    """A machine with a slow model of its rules, which checks every event."""

    def __init__(self, policy: Policy, workers: int) -> None:
        self.policy = policy
        self.machine: Machine = policy.machine(range(workers))
        self.present = set(range(workers))
        self.resting: set[int] = set()
        self.version = 0
        self.last = dict.fromkeys(range(workers), -1)
        self.open: dict[tuple[int, int], int] = {}  # pushes that are neither applied nor dropped, with their base
        self.clocks: Counter[int] = Counter()
        self.done: set[tuple[int, int]] = set()
        self.dropped = self.repeated = self.scaled = self.incomplete = 0
        match policy:
            case Synchronous() | Bounded(staleness=0):
                self.full = workers
            case Quorum(n=n):
                self.full = n
            case _:
                self.full = 1
        self.staleness: Counter[int] = Counter()
        self.pulls: dict[tuple[int, int], int] = {}
        self.serves: list[Serve] = []

    def push(self, worker: int, number: int, base: int) -> list[Action]:
        if number <= self.last[worker]:
            self.repeated += 1
            assert pushed(self.policy, self.machine, Push(worker, number, base)) == [Drop(worker, number)]
            return []
        else:
            self.back({worker})
            self.open[worker, number] = base
        self.last[worker] = number
        return self.follow(pushed(self.policy, self.machine, Push(worker, number, base)))

    def pull(self, client: int, number: int, wants: int) -> list[Action]:
        self.pulls[client, number] = wants
        return self.follow(self.machine.pull(Pull(client, number, wants)))

    def leave(self, worker: int) -> list[Action]:
        self.present.discard(worker)
        self.resting.discard(worker)
        return self.follow(self.machine.leave(worker))

    def rest(self, worker: int) -> list[Action]:
        if worker in self.present:
            self.resting.add(worker)
        self.present.discard(worker)
        return self.follow(self.machine.rest(worker))

    def resume(self, *workers: int) -> None:
        self.machine.resume(workers)
        self.back(set(workers))
        self.settled()

    def back(self, workers: set[int]) -> None:
        start = min((self.clocks[worker] for worker in self.present), default=max(self.clocks.values(), default=0))
        for worker in workers & self.resting:
            self.present.add(worker)
            self.resting.remove(worker)
            if worker not in {worker for worker, _ in self.open}:
                self.clocks[worker] = start

    def follow(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Apply):
                self.applied(action)
            elif isinstance(action, Drop):
                self.drop(action)
            else:
                self.served(action)
        self.settled()
        return actions

    def applied(self, step: Apply) -> None:
        # Served one step later than it could have been? Only what this very call brings may be servable now.
        assert not any(self.servable(*pull) for pull in self.pulls)
        assert step.version == self.version + 1
        assert step.parts
        assert list(step.parts) == sorted(step.parts)
        for part in step.parts:
            of_worker = [number for worker, number in self.open if worker == part.worker]
            assert part.number >= min(of_worker)
            base = self.open.pop((part.worker, part.number))  # neither unknown nor applied before
            self.done.add((part.worker, part.number))
            self.clocks[part.worker] += 1
            staleness = self.version - base
            self.staleness[staleness] += 1
            factor = self.factor(staleness)
            self.scaled += factor != 1
            assert part.weight == pytest.approx(factor / (len(step.parts) if self.mean else 1))
        self.version += 1
        self.incomplete += len(step.parts) < self.full
        self.of_step(step)

    @property
    def mean(self) -> bool:
        return getattr(self.policy, "reduction", "sum") == "mean"

    def factor(self, staleness: int) -> float:
        return 1 / (1 + staleness) if getattr(self.policy, "stale", None) == "scale" else 1.0

    def of_step(self, step: Apply) -> None:
        workers = [part.worker for part in step.parts]
        match self.policy:
            case Synchronous() | Bounded(staleness=0):
                assert len(set(workers)) == len(workers)
                assert self.present <= set(workers)
            case Quorum(n=n, stale=stale):
                # more, or the last few, only after a leave
                assert len(workers) == n or len(self.present) < n
                assert stale != "drop" or not any(staleness for staleness in self.staleness)
            case Bounded(staleness=ahead):
                assert len(workers) == 1
            case _:
                assert len(workers) == 1
        if isinstance(self.policy, Bounded) and self.present:
            ahead = self.policy.staleness
            assert max(self.clocks.values()) <= min(self.clocks[worker] for worker in self.present) + ahead

    def drop(self, action: Drop) -> None:
        base = self.open.pop((action.worker, action.number))
        self.dropped += 1
        limit = {Asynchronous: getattr(self.policy, "max_staleness", None), Quorum: 0}.get(type(self.policy))
        droppable = getattr(self.policy, "stale", None) == "drop" and limit is not None and self.version - base > limit
        assert droppable or action.worker not in self.present | self.resting

    def served(self, action: Serve) -> None:
        assert action.version == self.version
        assert self.servable(action.client, action.number)
        del self.pulls[action.client, action.number]
        self.serves.append(action)

    def servable(self, client: int, number: int) -> bool:
        waits = not (isinstance(self.policy, Quorum) and self.policy.stale != "drop")
        own = waits and any(worker == client and pushed < number for worker, pushed in self.open)
        over = not self.present | self.resting and not self.open  # there will be no other version
        return not own and (over or self.version >= self.pulls[client, number])

    def far(self) -> tuple[int, ...]:
        return self.version, self.dropped, self.repeated, len(self.serves), len(self.present), sum(self.last.values())

    def settled(self) -> None:
        """No request is held that could continue."""
        assert not any(self.servable(*pull) for pull in self.pulls)
        waits = {worker for worker, _ in self.open}
        slowest = min((self.clocks[worker] for worker in self.present), default=0)
        match self.policy:
            case Synchronous() | Bounded(staleness=0):
                assert not self.open or self.present - waits
            case Quorum(n=n):
                assert len(self.open) < max(1, min(n, len(self.present)))
            case Bounded(staleness=ahead):
                assert all(self.present and self.clocks[worker] >= slowest + ahead for worker in waits)
            case _:
                assert not self.open
        pushes, pulls = waiting(self.machine)
        assert {(push.worker, push.number): push.base for push in pushes} == self.open
        assert {(pull.client, pull.number): pull.wants for pull in pulls} == self.pulls
        counts = self.machine.counts
        assert (self.machine.version, counts.dropped) == (self.version, self.dropped)
        assert (counts.scaled, counts.staleness) == (self.scaled, self.staleness)
        assert counts.incomplete == self.incomplete


@st.composite
def policies(draw: st.DrawFn, workers: int) -> Policy:
    some = st.sampled_from(["mean", "sum"])
    n = st.integers(1, workers)
    return draw(
        st.one_of(
            st.builds(Synchronous, some),
            st.builds(Asynchronous, st.none() | st.integers(0, 4)),
            st.just(Asynchronous(stale="scale")),
            st.builds(Bounded, st.integers(0, 3)),
            st.builds(Quorum, n, some, st.sampled_from(["accept", "drop", "scale"])),
        )
    )


@st.composite
def runs(draw: st.DrawFn) -> tuple[Policy, int, list[tuple[str, int, int]]]:
    workers = draw(st.integers(1, 8))
    what = st.sampled_from([*3 * ["push"], *2 * ["fresh"], *2 * ["rest"], "resume", "pull", "read", "again", "leave"])
    event = st.tuples(what, st.integers(0, workers - 1), st.integers(0, 5))
    return draw(policies(workers)), workers, draw(st.lists(event, max_size=60))


@given(run=runs(), leavers=st.randoms(use_true_random=False))
def test_p5_any_events_under_any_policy(
    run: tuple[Policy, int, list[tuple[str, int, int]]], leavers: random.Random
) -> None:
    policy, workers, events = run
    watched = Watched(policy, workers)
    for number, (what, worker, x) in enumerate(events):
        if what == "push":
            watched.push(worker, number, max(0, watched.version - x))
        elif what == "fresh":
            watched.push(worker, number, watched.version)
        elif what == "again":
            assert watched.push(worker, watched.last[worker], 0) == []
        elif what == "leave":
            watched.leave(worker)
        elif what == "rest":
            watched.rest(worker)
        elif what == "resume":
            watched.resume(worker, x)
        else:
            watched.pull(worker if what == "pull" else READER, number, max(0, watched.version + x - 3))
    for worker in leavers.sample(range(workers), workers):
        watched.leave(worker)
    assert watched.open == {}
    assert watched.pulls == {}
    assert waiting(watched.machine) == ((), ())
    assert len(watched.done) + watched.dropped == sum(what in ("push", "fresh") for what, _, _ in events)


Waits = Generator[None, None, None]  # a worker: yields while it waits


def worker(watched: Watched, me: int, pushes: int, dice: random.Random) -> Waits:
    """Push several times, perhaps without a read, and wait as the policy asks; then leave."""
    base = number = 0
    for _ in range(pushes):
        for _ in range(dice.choice([1, 1, 1, 3])):
            number += 1
            watched.push(me, number, base)
        while not watched.policy.accepts and (me, number) in watched.open:
            yield
        if dice.random() < 0.8:
            number += 1
            watched.pull(me, number, 0)
            while (me, number) in watched.pulls:
                yield
            base = next(serve.version for serve in watched.serves if serve[:2] == (me, number))
        yield
    watched.leave(me)


@given(
    chosen=st.integers(1, 8).flatmap(lambda workers: st.tuples(policies(workers), st.just(workers))),
    dice=st.randoms(use_true_random=False),
    killed=st.integers(0, 8),
)
def test_p5_all_come_to_an_end(chosen: tuple[Policy, int], dice: random.Random, killed: int) -> None:
    policy, workers = chosen
    watched = Watched(policy, workers)
    going = {me: worker(watched, me, dice.randrange(6), dice) for me in range(workers)}
    before, idle = watched.far(), 0
    while going:
        for me in dice.sample(sorted(going), len(going)):
            if killed and dice.random() < 0.1:
                killed -= 1
                going.pop(me).close()
                watched.leave(me)
            elif next(going[me], "ended") == "ended":
                del going[me]
        # A worker may yield once between two pushes; then every worker that is left waits.
        before, idle = watched.far(), idle + 1 if watched.far() == before else 0
        assert idle < 3, f"{policy}: nobody goes on, held: {waiting(watched.machine)}"
    assert waiting(watched.machine) == ((), ())


def training(watched: Watched, me: int, segments: list[list[int]], dice: random.Random) -> Waits:
    """Push uneven numbers, wait for them, and meet the others at a barrier, several times; then leave, or only read."""
    number = 0
    for pushes in segments:
        for _ in range(pushes[me]):
            number += 1
            watched.push(me, number, dice.randint(0, watched.version))
            yield
        while dice.random() < 0.5 and any(worker == me for worker, _ in watched.open):
            yield  # some wait for a while in a sync
        watched.rest(me)
        while me in watched.resting:
            yield
    watched.pull(me, number + 1, 0)
    while (me, number + 1) in watched.pulls:
        yield


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Policy, int, list[list[int]]]:
    workers = draw(st.integers(1, 5))
    segments = st.lists(st.integers(0, 6), min_size=workers, max_size=workers)
    return draw(policies(workers)), workers, draw(st.lists(segments, min_size=1, max_size=3))


@pytest.mark.thorough
@given(trained=trainings(), dice=st.randoms(use_true_random=False), killed=st.integers(0, 2))
def test_p5_who_meets_at_barriers_ends_however_uneven_the_pushes(
    trained: tuple[Policy, int, list[list[int]]], dice: random.Random, killed: int
) -> None:
    policy, workers, segments = trained
    watched = Watched(policy, workers)
    going = {me: training(watched, me, segments, dice) for me in range(workers)}
    idle = 0
    while going:
        before = watched.far()
        for me in dice.sample(sorted(going), len(going)):
            if killed and dice.random() < 0.05:
                killed -= 1
                going.pop(me).close()
                watched.leave(me)
            elif next(going[me], "ended") == "ended":
                del going[me]
        if watched.resting and not watched.present:
            assert not watched.open, "at the end of a barrier all is applied"
            watched.resume(*watched.resting)
        # An unlucky worker waits at its sync; the dice let it go to the barrier in the end.
        idle = idle + 1 if watched.far() == before else 0
        assert idle < 60, f"{policy}: nobody goes on, held: {waiting(watched.machine)}"
    assert waiting(watched.machine) == ((), ())
    if isinstance(policy, Synchronous) and watched.present:  # those left are in step
        first, *others = sorted(watched.present)
        assert watched.push(first, 1000, watched.version) == [] or not others
        assert sum(len(watched.push(me, 1000, watched.version)) for me in others) == bool(others)


@pytest.mark.parametrize("workers", [[], [1, 2, 1]])
@pytest.mark.parametrize("policy", [Synchronous("sum"), Asynchronous(), Bounded(0), Bounded(2), Quorum(1, "mean")])
def test_p5_who_works_is_said_once(policy: Policy, workers: list[int]) -> None:
    with pytest.raises(ValueError, match="workers"):
        policy.machine(workers)


@pytest.mark.parametrize(
    "policy", [Synchronous("sum"), Asynchronous(), Bounded(0), Bounded(2), Quorum(2, "mean"), Quorum(2, "sum", "drop")]
)
def test_p5_what_makes_no_sense_changes_nothing(policy: Policy) -> None:
    machine = policy.machine([3, 5])
    machine.push(Push(3, 0, 0))
    before = (machine.version, str(machine.counts), waiting(machine))
    with pytest.raises(ValueError, match=r"client 4 is no worker: expected one of \[3, 5\]"):
        machine.push(Push(4, 1, 0))
    with pytest.raises(ValueError, match="client 4 is no worker"):
        machine.leave(4)
    with pytest.raises(ValueError, match=f"push 7 of worker 5 is based on version 9: expected 0..{machine.version}"):
        machine.push(Push(5, 7, 9))
    with pytest.raises(ValueError, match="based on version -1"):
        machine.push(Push(5, 7, -1))
    assert (machine.version, str(machine.counts), waiting(machine)) == before
    machine.push(Push(5, 7, 0))  # the number is still free
    machine.leave(3)
    assert machine.counts.staleness.total() + machine.counts.dropped == 2
