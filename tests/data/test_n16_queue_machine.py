"""N16: random walks of the machine of a shard queue, with a model of the place of each record."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiodist.data.queue_machine import Hand, Hold, Instruction, QueueMachine, Range, Share
from aiodist.data.shards import EpochOrder, Shuffle

RANKS = st.integers(0, 4)
SIZES = st.lists(st.integers(0, 90), max_size=8)


def positions(*ranges: Range) -> list[int]:
    return [position for start, stop in ranges for position in range(start, stop)]


class QueueWalk(RuleBasedStateMachine):
    """Five ranks with random events."""

    @initialize(sizes=SIZES, least=st.integers(1, 9), before=st.sets(st.integers(0, 300)))
    def begin(self, sizes: list[int], least: int, before: set[int]) -> None:
        self.sizes, self.least = sizes, least
        self.total = sum(sizes)
        self.used = {position for position in before if position < self.total}
        ends = list(accumulate(sizes))
        self.machine = QueueMachine(ends, 5, least, [Range(position, position + 1) for position in self.used])
        self.free = set(range(self.total)) - self.used
        self.held: dict[int, list[int]] = {rank: [] for rank in range(5)}
        self.totals = dict.fromkeys(range(5), 0)
        self.waiting: dict[int, int] = {}
        self.asks = 0

    def told(self, instructions: list[Instruction]) -> None:
        for told in instructions:
            assert isinstance(told, Hand)
            assert self.waiting.pop(told.rank) == told.number
            self.handed(told)

    def handed(self, told: Hand) -> None:
        found = positions(*told.ranges)
        assert len(set(found)) == len(found)
        assert self.free.issuperset(found)
        assert bool(found) == bool(self.free)
        assert len(found) <= max(self.least, 64, -(-len(self.free) // 10))
        assert len(found) >= min(self.least, len(self.free))
        self.free.difference_update(found)
        self.held[told.rank] += found

    @rule(rank=RANKS, waits=st.booleans())
    def take(self, rank: int, waits: bool) -> None:
        if rank in self.waiting:
            return
        self.asks += 1
        (told,) = self.machine.take(rank, self.asks, waits)
        others = {holder: len(held) for holder, held in self.held.items() if held and holder != rank}
        if isinstance(told, Hold):
            assert waits
            assert not self.free
            assert told == (rank, self.asks, others)
            assert others
            self.waiting[rank] = self.asks
        else:
            assert (told.rank, told.number) == (rank, self.asks)
            assert self.free or not (waits and others)
            self.handed(told)

    def use(self, rank: int, part: float) -> None:
        count = round(part * len(self.held[rank]))
        self.used.update(self.held[rank][:count])
        del self.held[rank][:count]
        self.totals[rank] += count

    @rule(rank=RANKS, part=st.floats(0, 1))
    def uses(self, rank: int, part: float) -> None:
        self.use(rank, part)
        self.told(self.machine.use(rank, self.totals[rank]))

    @rule(rank=RANKS, part=st.floats(0, 1))
    def gives_back(self, rank: int, part: float) -> None:
        self.use(rank, part)
        self.leaves(rank)
        self.told(self.machine.hand_back(rank, self.totals[rank]))

    @rule(rank=RANKS)
    def is_lost(self, rank: int) -> None:
        self.leaves(rank)
        self.told(self.machine.hand_back(rank, None))

    def leaves(self, rank: int) -> None:
        self.waiting.pop(rank, None)
        self.free.update(self.held[rank])
        self.held[rank] = []

    @precondition(lambda self: self.total)
    @rule(rank=RANKS, gives_back=st.booleans())
    def says_too_much(self, rank: int, gives_back: bool) -> None:
        wrong = self.machine.hand_back if gives_back else self.machine.use
        for total in (self.totals[rank] - 1, self.totals[rank] + len(self.held[rank]) + 1):
            with pytest.raises(ValueError, match=f"{total} records used: expected from {self.totals[rank]} to"):
                wrong(rank, total)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "machine"):
            return
        assert set(positions(*self.machine.used)) == self.used
        assert self.machine.left == len(self.free)
        assert self.machine.holders == {rank: len(held) for rank, held in self.held.items() if held}
        assert not (self.waiting and self.free)
        for rank in self.waiting:  # another rank holds records
            assert any(held for holder, held in self.held.items() if holder != rank)

    def teardown(self) -> None:
        """All ranks continue to the end: each record is used once, and no rank waits."""
        if not hasattr(self, "machine"):
            return
        for rank in range(5):
            while self.free or self.held[rank]:
                self.uses(rank, 1.0)
                self.take(rank, waits=False)
        self.agrees()
        assert self.used == set(range(self.total))
        assert not self.waiting


TestQueueWalk = QueueWalk.TestCase
TestQueueWalk.settings = settings(stateful_step_count=40, deadline=None)


@given(SIZES, st.integers(1, 6), st.integers(1, 50))
def test_n16_hand_outs_become_small_and_stay_within_shards(sizes: list[int], ranks: int, least: int) -> None:
    ends = list(accumulate(sizes))
    machine = QueueMachine(ends, ranks, least)
    left, number = sum(sizes), 0
    while left:
        (told,) = machine.take(number % ranks, number)
        assert isinstance(told, Hand)
        found = positions(*told.ranges)
        want = max(least, -(-left // (2 * ranks)))
        assert len(found) <= max(want, least)
        last = max((end for end in ends if end <= found[-1]), default=0)  # where the last shard begins
        enough = max(least, 64, min(1024, left // (16 * ranks)))
        assert sum(1 for position in found if position < last) < enough  # what came before it was too little
        left -= len(found)
        number += 1
    assert machine.take(0, number, waits=ranks == 1) == [Hand(0, number, ())]


def test_n16_what_was_given_back_goes_out_first() -> None:
    machine = QueueMachine([100], 2, 10)
    assert machine.take(0, 0) == [Hand(0, 0, (Range(0, 25),))]
    assert machine.take(1, 0) == [Hand(1, 0, (Range(25, 44),))]
    assert machine.hand_back(0, 7) == []
    assert machine.take(1, 1) == [Hand(1, 1, (Range(7, 25), Range(44, 45)))]
    assert machine.use(1, 20) == []
    assert machine.used == [Range(0, 8), Range(25, 44)]
    assert machine.hand_back(1, None) == []
    assert machine.left == 100 - 27


def test_n16_a_share_knows_what_it_used() -> None:
    share = Share()
    share.held.extend([Range(0, 3), Range(10, 12)])
    share.use(4)
    assert share.used == [Range(0, 3), Range(10, 11)]
    assert share.hand_back() == [Range(11, 12)]
    assert (share.holds, share.total) == (0, 4)


@given(SIZES, st.sampled_from([False, True, "shards"]), st.integers(0, 9), st.integers(0, 9), st.data())
def test_n16_an_order_has_each_record_once_in_any_cuts(
    sizes: list[int], shuffle: Shuffle, seed: int, epoch: int, data: st.DataObject
) -> None:
    order = EpochOrder(sizes, shuffle, seed, epoch)
    total = sum(sizes)
    assert (order.ends or [0])[-1] == total
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=5))})
    parts = [part for pair in pairwise(cuts) for part in order.parts(*pair)]
    found = [(shard, place) for shard, within in parts for place in within]
    assert sorted(found) == [(shard, place) for shard, size in enumerate(sizes) for place in range(size)]
    assert found == [(s, p) for s, within in EpochOrder(sizes, shuffle, seed, epoch).parts(0, total) for p in within]
    if not shuffle:
        assert found == sorted(found)
    elif shuffle is not True:
        assert all(within == range(within[0], within[-1] + 1) for _, within in parts)
