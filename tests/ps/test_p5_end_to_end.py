"""P5: who waits for whom, on a whole parameter server: ranks of different speed, ranks that leave early."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator
from aiodist.ps import Asynchronous, Bounded, ParameterServer, Quorum, Synchronous

LAYOUTS: dict[str, dict[str, Any]] = {
    "shared": {},
    "cut": {"split_bytes": 8},
    "apart": {"servers": 1},
    "apart and cut": {"servers": 2, "split_bytes": 8},
}


def ones(value: float = 1.0) -> Tensor:
    return torch.full((7,), float(value), dtype=torch.float64)


async def total(coll: Communicator, count: int) -> int:
    """Return the sum over all ranks."""
    return int(await coll.allreduce(count))


@pytest.mark.ranks(2)
async def test_p5_synchronous_a_pull_waits_for_the_step_of_its_push(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": ones(0)}, consistency=Synchronous("sum"), split_bytes=8) as ps:
        first = coll.rank == 0
        out = ones(-1)
        if first:
            await ps.push("w", ones(2))  # accepted
            await ps.sync()  # it is held there
            pulled = ps.pull("w", out)
            later = ps.pull("w", ones(), at_least=1)
        await coll.barrier()
        await coll.barrier()
        if first:
            assert [h.done() for h in (pulled, later)] == [False] * 2, "the other has not pushed"
            assert torch.equal(out, ones(-1))
        else:
            assert torch.equal(await ps.pull("w", out), ones(0)), "who has not pushed reads what there is"
        await coll.barrier()
        if not first:
            await ps.push("w", ones(3))
            await ps.sync()
        else:
            assert torch.equal(await pulled, ones(5))
            assert (pulled.version, (await later).tolist()) == (1, ones(5).tolist())


@pytest.mark.drawn(2)
@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_p5_synchronous_steps_equal_at_any_speed_of_the_workers(coll: Communicator, layout: str) -> None:
    async with ParameterServer(coll, {"w": ones(0)}, consistency=Synchronous("mean"), **LAYOUTS[layout]) as ps:
        if not ps.is_worker:
            return
        w = ones(0)
        for step in range(1, 9):
            await asyncio.sleep(coll.rank * (step % 3))  # of a clock that jumps
            handle = ps.push_pull("w", ones(step * (coll.rank + 1)), w)
            await handle
            mean = sum(rank + 1 for rank in ps.workers) / len(ps.workers)
            torch.testing.assert_close(w, ones(mean * step * (step + 1) / 2))
            assert handle.version == step


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
async def test_p5_synchronous_steps_continue_with_the_remaining_workers(
    coll: Communicator, layout: str, reduction: Any
) -> None:
    """Rank r does 2 r + 1 steps; no rank waits for one that has finished."""
    async with ParameterServer(coll, {"w": ones(0)}, consistency=Synchronous(reduction), **LAYOUTS[layout]) as ps:
        if not ps.is_worker:
            return
        expected, w = 0.0, ones(0)
        for step in range(2 * coll.rank + 1):
            there = [rank + 1 for rank in ps.workers if 2 * rank + 1 > step]
            expected += sum(there) / (len(there) if reduction == "mean" else 1)
            await ps.push_pull("w", ones(coll.rank + 1), w)
            torch.testing.assert_close(w, ones(expected))


@pytest.mark.thorough
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("policy", [Synchronous("sum"), Bounded(1), Quorum(2, "sum")], ids=repr)
async def test_p5_who_pushed_ahead_and_ends_holds_up_no_barrier(coll: Communicator, policy: Any) -> None:
    """Rank 0 leaves while its last pushes wait for those of others, who first meet at a barrier."""
    w = ones(0)
    async with ParameterServer(coll, {"w": w}, consistency=policy) as ps:
        for _ in range(3 if coll.rank == 0 else 1):
            await asyncio.sleep(coll.rank)
            ps.push("w", ones()).add_done_callback(lambda done: done.result())
        if coll.rank != 0:
            await ps.barrier()
            await asyncio.sleep(100.0)  # longer than anybody's patience
            assert 1 <= float((await ps.pull("w"))[0]) <= 3 + coll.size - 1
    assert coll.rank != 0 or torch.equal(w, ones(0))


@pytest.mark.ranks(2)
async def test_p5_synchronous_a_push_and_a_sync_are_done_when_accepted(coll: Communicator) -> None:
    async with ParameterServer(coll, {"a": ones(0), "b": ones(0)}, consistency=Synchronous("mean")) as ps:
        if coll.rank == 0:
            for step in range(5):  # ahead of the other by five steps
                value = ones(step)
                await ps.push(["a", "b"], [value, value])
                value.fill_(-100)  # it is the caller's again
            await ps.sync()
        await coll.barrier()
        if coll.rank == 1:
            for step in range(5):
                await ps.push(["a", "b"], [ones(step), ones(10 * step)])
        a, b = await ps.pull()
        assert (a.tolist(), b.tolist()) == (ones(10).tolist(), ones(55).tolist())


class Clocks:
    """A rule that keeps every state: element w of the shard is how many pushes of worker w were applied."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, shard: Tensor, value: Tensor) -> None:
        shard += value
        self.seen.append([int(clock) for clock in shard.tolist()])


def ahead(clocks: list[int], goals: list[int]) -> int:
    """Return how far the fastest is ahead of the slowest that may be there still."""
    there = [clock for clock, goal in zip(clocks, goals, strict=True) if clock < goal]
    return max(clocks) - min(there, default=max(clocks))


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("slack", [1, 3])
@pytest.mark.parametrize("how", ["one by one", "all at once"])
@pytest.mark.parametrize("finish", [False, True])
async def test_p5_bounded_nobody_is_more_than_that_ahead(
    coll: Communicator, clocks: Clocks, slack: int, how: str, finish: bool
) -> None:
    goals = [12, 5, 9] if finish else [9, 9, 9]
    mine = torch.zeros(coll.size)
    mine[coll.rank] = 1
    async with ParameterServer(coll, [torch.zeros(coll.size)], rule=clocks, consistency=Bounded(slack)) as ps:
        pushes = []
        for i in range(goals[coll.rank]):
            await asyncio.sleep(10.0 if coll.rank == 1 else i % 2)
            pushes.append(ps.push("0", mine))
            if how == "one by one":
                await pushes[-1]
                read = torch.zeros(coll.size)
                await ps.pull("0", read)
                assert int(read[coll.rank]) == i + 1, "a push that was applied is seen"
                assert ahead(read.int().tolist(), goals) <= slack
        await asyncio.gather(*pushes)  # no rank waits for one that leaves, whose pushes are still held
    if clocks.seen:  # one rank has it; in one process all share the list
        assert clocks.seen[-1] == goals
        assert max(ahead(seen, goals) for seen in clocks.seen) == slack


@pytest.mark.ranks(3)
async def test_p5_bounded_by_zero_moves_all_workers_together(coll: Communicator) -> None:
    w = torch.zeros(coll.size)
    async with ParameterServer(coll, {"w": w}, consistency=Bounded(0), split_bytes=4) as ps:
        for i in range(1, 6):
            await asyncio.sleep(coll.rank * 3.0)
            mine = torch.zeros(coll.size)
            mine[coll.rank] = 1
            await ps.push("w", mine)
            await ps.pull()
            assert w.tolist() in ([i, i, i], [i + 1] * 3)
        await ps.barrier()
        assert (await ps.pull())[0].tolist() == [5.0] * 3


@pytest.mark.ranks(3)
@pytest.mark.parametrize("layout", ["shared", "cut", "apart", "apart and cut"])
async def test_p5_asynchronous_everything_is_applied_and_nobody_waits(coll: Communicator, layout: str) -> None:
    async with ParameterServer(coll, {"w": ones(0)}, **LAYOUTS[layout]) as ps:
        if ps.is_worker:
            for i in range(50 if coll.rank else 1):  # others are ahead by any number
                await ps.push("w", ones(i % 3))
            await ps.sync()
            if coll.rank == ps.workers[-1]:
                pulled = ps.pull("w", ones(), at_least=50 * (len(ps.workers) - 1) + 1)
                expected = sum(i % 3 for i in range(50)) * (len(ps.workers) - 1)
                assert torch.equal(await pulled, ones(expected))
                assert pulled.version == 50 * (len(ps.workers) - 1) + 1
        await coll.barrier()
        counted = await total(coll, sum(ps.statistics().staleness.values()))
        assert counted == 50 * (len(ps.workers) - 1) + 1
        assert await total(coll, ps.statistics().dropped + ps.statistics().scaled) == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [8, 1 << 20])
@pytest.mark.parametrize(
    ("policy", "applied", "dropped", "scaled"),
    [
        (Asynchronous(max_staleness=2), 5.0, 1, 0),
        (Asynchronous(max_staleness=5), 5.0 + 6, 0, 0),
        (Asynchronous(stale="scale"), 5.0 + 6 / 6, 0, 1),
        (Asynchronous(stale="scale", scale=lambda age: 0.5 if age > 2 else 1), 5.0 + 3, 0, 1),
    ],
    ids=["drop", "keep", "scale", "scale old"],
)
async def test_p5_asynchronous_stale_pushes_are_counted(
    coll: Communicator, split: int, policy: Asynchronous, applied: float, dropped: int, scaled: int
) -> None:
    """Rank 0 pushes what it made from version 0 when five of the other's have been applied."""
    async with ParameterServer(coll, {"w": ones(0)}, consistency=policy, split_bytes=split) as ps:
        if coll.rank == 1:
            for _ in range(5):
                await ps.push_pull("w", ones(), ones())  # never stale
        await coll.barrier()
        if coll.rank == 0:
            await ps.push("w", ones(6))
            pulled = ps.pull("w", ones())
            assert torch.equal(await pulled, ones(applied))
            assert pulled.version == 6 - dropped
        await coll.barrier()
        statistics = ps.statistics()
        assert await total(coll, statistics.dropped) == dropped
        assert await total(coll, statistics.scaled) == scaled
        assert await total(coll, statistics.staleness[5]) == 1 - dropped
        assert await total(coll, statistics.staleness[0]) == 5


@pytest.mark.drawn(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", [Asynchronous(), Synchronous("mean"), Bounded(2), Quorum(1, "sum")], ids=repr)
async def test_p5_who_has_left_is_not_waited_for_however_long_it_takes(coll: Communicator, policy: Any) -> None:
    """The one that leaves waits for ten minutes, also where calls are given ten seconds."""
    async with ParameterServer(coll, {"w": ones(0)}, consistency=policy, timeout=10.0, split_bytes=8) as ps:
        if coll.rank == 1:
            for i in range(1, 11):
                await asyncio.sleep(60.0)
                w = ones()
                await ps.push_pull("w", ones(), w)
                assert torch.equal(w, ones(i))
