"""N6: the scheduler, one limit on the bytes that a loop has in flight."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import dataclass, field
from weakref import ref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiodist.handles import Lane, Permit, Scheduler

pytestmark = pytest.mark.timeout(60)


class Requests:
    """Asks for bytes and remembers, in order, what was granted."""

    def __init__(self) -> None:
        self.granted: list[str] = []

    def __call__(self, lane: Lane, name: str, nbytes: int) -> Permit:
        return lane.request(nbytes, lambda: self.granted.append(name))


@pytest.fixture
def scheduler() -> Scheduler:
    scheduler = Scheduler()
    scheduler.limit = 100
    return scheduler


@pytest.fixture
def request_() -> Requests:
    return Requests()


def test_n6_what_fits_is_granted_at_once(scheduler: Scheduler, request_: Requests) -> None:
    lane = scheduler.lane("a")
    permits = [request_(lane, str(i), 40) for i in range(3)]
    assert request_.granted == ["0", "1"]
    assert scheduler.in_flight == 80
    permits[0].release()
    assert request_.granted == ["0", "1", "2"]
    for permit in permits:
        permit.release()
        permit.release()
    assert scheduler.in_flight == 0
    assert (lane.granted, len(lane.waiting)) == (0, 0)


def test_n6_a_lane_keeps_its_order_though_a_later_one_would_fit(scheduler: Scheduler, request_: Requests) -> None:
    lane = scheduler.lane("a")
    first = request_(lane, "first", 60)
    request_(lane, "large", 90)
    request_(lane, "small", 1)
    assert request_.granted == ["first"]
    first.release()
    assert request_.granted == ["first", "large", "small"]


def test_n6_urgent_lanes_go_first(scheduler: Scheduler, request_: Requests) -> None:
    lanes = {name: scheduler.lane(name, priority) for name, priority in (("low", -10), ("mid", 0), ("high", 10))}
    held = [request_(lane, f"{name} 0", 30) for name, lane in lanes.items()]
    for name, lane in lanes.items():
        request_(lane, f"{name} 1", 30)
        request_(lane, f"{name} 2", 30)
    del request_.granted[:]
    scheduler.limit = 150
    assert request_.granted == ["high 1", "high 2"]
    scheduler.limit = 180
    assert request_.granted == ["high 1", "high 2", "mid 1"]
    held[0].release()  # now the low lane has nothing in flight
    assert request_.granted == ["high 1", "high 2", "mid 1", "mid 2", "low 1"]


def test_n6_equal_lanes_go_in_the_order_in_which_they_came(scheduler: Scheduler, request_: Requests) -> None:
    lanes = [scheduler.lane(str(i)) for i in range(3)]
    for lane in lanes:
        request_(lane, "first", 40)
    for lane in reversed(lanes):
        request_(lane, lane.name, 40)
    del request_.granted[:]
    scheduler.limit = 1000
    assert request_.granted == ["2", "1", "0"]


def test_n6_room_is_kept_for_the_more_urgent(scheduler: Scheduler, request_: Requests) -> None:
    low, high = scheduler.lane("low"), scheduler.lane("high", 10)
    request_(low, "low 0", 20)
    holding = request_(high, "high 0", 60)
    request_(high, "high 1", 90)
    request_(low, "low 1", 5)  # it would fit, and so would the next, and the next
    request_(low, "nothing", 0)
    assert request_.granted == ["low 0", "high 0"]
    holding.release()
    assert request_.granted == ["low 0", "high 0", "high 1"]  # the first of its lane


def test_n6_the_first_of_a_lane_is_always_granted(scheduler: Scheduler, request_: Requests) -> None:
    lanes = [scheduler.lane(str(i), i) for i in range(3)]
    permits = [request_(lane, lane.name, 1000) for lane in lanes]
    assert request_.granted == ["0", "1", "2"]
    assert scheduler.in_flight == 3000
    request_(lanes[0], "second", 0)
    assert "second" not in request_.granted
    permits[0].release()
    assert request_.granted[-1] == "second"


def test_n6_a_low_lane_goes_on_beside_one_that_never_ends(scheduler: Scheduler, request_: Requests) -> None:
    low, high = scheduler.lane("low"), scheduler.lane("high", 10)
    flood = [request_(high, "high", 50) for _ in range(200)]
    slow = [request_(low, f"low {i}", 50) for i in range(10)]
    for i in range(10):
        assert f"low {i}" in request_.granted  # one at a time
        flood[i].release()
        slow[i].release()


def test_n6_requests_can_be_withdrawn(scheduler: Scheduler, request_: Requests) -> None:
    lane = scheduler.lane("a")
    first = request_(lane, "first", 100)
    large, small = request_(lane, "large", 100), request_(lane, "small", 1)
    large.release()
    assert request_.granted == ["first"]
    first.release()
    assert request_.granted == ["first", "small"]
    large.release()
    small.release()
    assert scheduler.in_flight == 0


def test_n6_a_permit_can_be_resized(scheduler: Scheduler, request_: Requests) -> None:
    lane = scheduler.lane("a")
    first, second = request_(lane, "first", 80), request_(lane, "second", 80)
    first.resize(20)
    assert request_.granted == ["first", "second"]
    assert scheduler.in_flight == 100
    first.resize(200)  # it turned out to be larger
    assert scheduler.in_flight == 280
    third = request_(lane, "third", 500)
    third.resize(10)  # while it waits
    second.release()
    assert request_.granted == ["first", "second"]
    first.release()
    assert request_.granted == ["first", "second", "third"]
    assert scheduler.in_flight == 10
    first.resize(50)  # given back already
    assert scheduler.in_flight == 10


def test_n6_the_limit_can_be_changed(scheduler: Scheduler, request_: Requests) -> None:
    lane = scheduler.lane("a")
    permits = [request_(lane, str(i), 60) for i in range(4)]
    assert len(request_.granted) == 1
    scheduler.limit = 180
    assert len(request_.granted) == 3
    scheduler.limit = 1
    permits[0].release()
    permits[1].release()
    assert len(request_.granted) == 3
    permits[2].release()
    assert len(request_.granted) == 4
    with pytest.raises(ValueError, match="limit=0"):
        scheduler.limit = 0
    with pytest.raises(ValueError, match="nbytes=-1"):
        lane.request(-1, lambda: None)


def test_n6_what_is_granted_may_ask_and_give_back_in_turn(scheduler: Scheduler) -> None:
    lane = scheduler.lane("a")
    begun: list[int] = []

    def ask(i: int) -> None:
        def start() -> None:
            begun.append(i)
            if i < 50:
                ask(i + 1)

        permits[i] = lane.request(60, start)

    permits: dict[int, Permit] = {}
    ask(0)
    for i in range(51):
        permits[i].release()
    assert begun == list(range(51))
    assert scheduler.in_flight == 0


async def test_n6_acquire_waits_and_can_be_cancelled() -> None:
    scheduler = Scheduler.current()
    scheduler.limit = 10
    lane = scheduler.lane("a")
    with await lane.acquire(10) as first:
        assert scheduler.in_flight == 10
        waiting = [asyncio.create_task(lane.acquire(10)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        assert scheduler.in_flight == 10
        first.release()
        assert scheduler.in_flight == 10  # the second has it, though its task did not run yet
        waiting[1].cancel()
    async with asyncio.timeout(10):
        with pytest.raises(asyncio.CancelledError):
            await waiting[1]
        with await waiting[2]:
            assert scheduler.in_flight == 10
    assert scheduler.in_flight == 0


async def test_n6_a_loop_has_one_scheduler_for_as_long_as_it_lives() -> None:
    Scheduler.current().limit = 12345
    for _ in range(3):
        await asyncio.sleep(0)
        gc.collect()
    assert Scheduler.current().limit == 12345


def test_n6_a_scheduler_ends_with_its_loop() -> None:
    async def main() -> ref[Scheduler]:
        return ref(Scheduler.current())

    first = asyncio.run(main())
    second = asyncio.run(main())
    gc.collect()
    assert first() is None
    assert second() is None
    with pytest.raises(RuntimeError):
        Scheduler.current()


@dataclass
class Mine:
    """The model's state of one lane."""

    lane: Lane
    waiting: list[int] = field(default_factory=list)
    held: dict[int, tuple[Permit, int]] = field(default_factory=dict)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, withdrawals, resizes and limits in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler()
        self.scheduler.limit = 100
        self.lanes = [Mine(self.scheduler.lane(str(i), priority)) for i, priority in enumerate((10, 0, 0, -10))]
        self.permits: dict[int, Permit] = {}
        self.count = 0

    @rule(which=st.integers(0, 3), nbytes=st.integers(0, 150))
    def request(self, which: int, nbytes: int) -> None:
        mine, number = self.lanes[which], self.count
        self.count += 1
        mine.waiting.append(number)

        def start() -> None:
            assert mine.waiting[0] == number  # in the order in which they were made
            mine.waiting.pop(0)
            granted.append(True)
            if number in self.permits:
                mine.held[number] = (self.permits.pop(number), number)

        granted: list[bool] = []
        permit = mine.lane.request(nbytes, start)
        if granted:
            mine.held[number] = (permit, number)
        else:
            self.permits[number] = permit

    @precondition(lambda self: any(mine.held for mine in self.lanes))
    @rule(random=st.randoms(use_true_random=False))
    def release(self, random: object) -> None:
        mine = random.choice([mine for mine in self.lanes if mine.held])  # type: ignore[attr-defined]
        permit, number = random.choice(list(mine.held.values()))  # type: ignore[attr-defined]
        del mine.held[number]
        permit.release()

    @precondition(lambda self: self.permits)
    @rule(random=st.randoms(use_true_random=False))
    def withdraw(self, random: object) -> None:
        number = random.choice(list(self.permits))  # type: ignore[attr-defined]
        for mine in self.lanes:
            if number in mine.waiting:
                mine.waiting.remove(number)
        self.permits.pop(number).release()

    @precondition(lambda self: any(mine.held for mine in self.lanes))
    @rule(random=st.randoms(use_true_random=False), nbytes=st.integers(0, 150))
    def shrink(self, random: object, nbytes: int) -> None:
        mine = random.choice([mine for mine in self.lanes if mine.held])  # type: ignore[attr-defined]
        permit, _ = random.choice(list(mine.held.values()))  # type: ignore[attr-defined]
        permit.resize(min(nbytes, permit.nbytes))

    @rule(nbytes=st.integers(50, 200))
    def limit(self, nbytes: int) -> None:
        if nbytes >= self.scheduler.limit:  # what was granted under a larger one stays granted
            self.scheduler.limit = nbytes

    @invariant()
    def counts_agree(self) -> None:
        assert self.scheduler.in_flight == sum(p.nbytes for mine in self.lanes for p, _ in mine.held.values())
        for mine in self.lanes:
            assert mine.lane.granted == len(mine.held)
            assert len(mine.lane.waiting) == len(mine.waiting)

    @invariant()
    def the_limit_is_exceeded_only_by_the_first_of_each_lane(self) -> None:
        largest = sum(max((p.nbytes for p, _ in mine.held.values()), default=0) for mine in self.lanes)
        assert self.scheduler.in_flight <= self.scheduler.limit + largest

    @invariant()
    def nobody_waits_who_may_go(self) -> None:
        for mine in self.lanes:
            assert not mine.waiting or mine.held
        first = next((mine for mine in self.lanes if mine.waiting), None)
        if first is not None and first is self.lanes[0]:
            assert first.lane.waiting[0].nbytes > self.scheduler.limit - self.scheduler.in_flight

    def teardown(self) -> None:
        """The last to give back lets all others through."""
        for _ in range(self.count + 1):
            for mine in self.lanes:
                for permit, number in list(mine.held.values()):
                    del mine.held[number]
                    permit.release()
        assert not any(mine.waiting for mine in self.lanes)
        assert self.scheduler.in_flight == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(deadline=None, stateful_step_count=40)
