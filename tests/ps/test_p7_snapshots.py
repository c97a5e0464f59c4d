"""P7: shards that follow the orders of one machine never mix versions in a read, however late orders and data come."""

from __future__ import annotations

import random
from collections import deque

import pytest

from aiodist.ps import Asynchronous, Bounded, Policy, Quorum, Synchronous
from aiodist.ps.machines import Action, Apply, Drop, Pull, Push, Serve

READER = 99
SHARDS = 4  # the first one leads


class Shard:
    """Applies and serves in the order of the leader, each step after the arrival of its data."""

    def __init__(self) -> None:
        self.version = 0
        self.value = 0.0
        self.data: dict[tuple[int, int], float] = {}
        self.orders: deque[Action] = deque()
        self.answers: dict[tuple[int, int], tuple[int, float]] = {}

    def go_on(self) -> None:
        while self.orders:
            order = self.orders[0]
            if isinstance(order, Apply):
                if not all(part[:2] in self.data for part in order.parts):
                    return
                self.value += sum(self.data.pop((worker, number)) * weight for worker, number, weight in order.parts)
                self.version = order.version
            elif isinstance(order, Serve):
                assert order.version == self.version
                self.answers[order.client, order.number] = self.version, self.value
            elif order[:2] not in self.data:
                return
            else:
                del self.data[order[:2]]
            self.orders.popleft()


class World:
    """A leader's machine, shards, and messages in flight: in order from one sender to one shard."""

    def __init__(self, policy: Policy, workers: int, seed: int) -> None:
        self.dice = random.Random(seed)
        self.machine = policy.machine(range(workers))
        self.shards = [Shard() for _ in range(SHARDS)]
        self.data: dict[tuple[int, int], deque[Push]] = {
            (worker, shard): deque() for worker in range(workers) for shard in range(SHARDS)
        }
        self.orders: list[deque[Action]] = [deque() for _ in self.shards]
        self.lock_free: list[list[int]] = []
        self.reading: list[tuple[list[int], int]] = []  # versions that a lock-free read has seen, shards to come

    def push(self, push: Push) -> None:
        for shard in range(SHARDS):
            self.data[push.worker, shard].append(push)

    def order(self, actions: list[Action]) -> None:
        for line in self.orders:
            line.extend(actions)

    def on_its_way(self) -> list[tuple[int, int]]:
        """Return what can arrive next: (worker or -1 for the leader's orders, shard)."""
        data = [key for key, line in self.data.items() if line]
        return data + [(-1, shard) for shard, line in enumerate(self.orders) if line]

    def arrive(self, sender: int, shard: int) -> None:
        if sender < 0:
            self.shards[shard].orders.append(self.orders[shard].popleft())
        else:
            push = self.data[sender, shard].popleft()
            self.shards[shard].data[push[:2]] = value(push)
            if shard == 0:
                self.order(self.machine.push(push))
        self.shards[shard].go_on()


def value(push: Push) -> float:
    return float(push.worker * 1000 + push.number)


POLICIES: list[Policy] = [
    Asynchronous(),
    Asynchronous(3),
    Bounded(1),
    Bounded(0),
    Synchronous("mean"),
    Quorum(2, "sum", "drop"),
    Quorum(2, "mean", "scale"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_p7_no_read_of_300_mixes_versions(policy: Policy) -> None:
    mixed = reads = asked = 0
    for seed in range(10):
        world = World(policy, workers=3, seed=seed)
        dice = world.dice
        for number in range(300):
            if number % 10 == 0:
                asked += 1
                world.order(world.machine.pull(Pull(READER, number, wants=world.machine.version + dice.randrange(2))))
            else:
                base = max(0, world.machine.version - dice.randrange(3))
                world.push(Push(dice.randrange(3), number, base))
            for _ in range(dice.randrange(8)):
                if way := world.on_its_way():
                    world.arrive(*dice.choice(way))
            # a lock-free read takes the current values of each shard
            mixed += len({shard.version for shard in world.shards}) > 1
        while way := world.on_its_way():
            world.arrive(*dice.choice(way))
        for worker in range(3):
            world.order(world.machine.leave(worker))
        while way := world.on_its_way():
            world.arrive(*dice.choice(way))
        first = world.shards[0]
        reads += len(first.answers)
        for shard in world.shards:
            assert shard.answers == first.answers
            assert shard.value == first.value
            assert not shard.data
            assert not shard.orders
    assert reads == asked == 300
    assert mixed > 30  # so there was something to mix


def test_p7_a_read_shows_whole_steps() -> None:
    """A read is the sum of exactly the steps up to its version."""
    world = World(Asynchronous(), workers=4, seed=3)
    steps: list[Action] = []
    for number in range(200):
        push = Push(number % 4, number)
        world.push(push)
        for way in [(push.worker, shard) for shard in range(SHARDS)]:
            world.arrive(*way)
        steps += world.orders[0]
        if number % 7 == 0:
            world.order(world.machine.pull(Pull(READER, number)))
        while way_of_order := world.on_its_way():
            world.arrive(*world.dice.choice(way_of_order))
    applied = [step for step in steps if isinstance(step, Apply)]
    assert len(applied) == 200
    for version, seen in world.shards[-1].answers.values():
        assert seen == sum(value(Push(*part[:2])) * part.weight for step in applied[:version] for part in step.parts)
    assert not any(isinstance(step, Drop) for step in steps)
