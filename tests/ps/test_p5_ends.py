"""P5: the end of a run, sync, barrier and pull, and barriers amid it, end under every policy, for uneven work too."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import Communicator
from aiodist.errors import MismatchError
from aiodist.ps import Asynchronous, Bounded, ParameterServer, Policy, Quorum, Synchronous
from aiodist.testing import run_ranks

pytestmark = pytest.mark.drawn(6)

SECONDS = 20.0
POLICIES: dict[str, Callable[[], Policy]] = {
    "asynchronous": Asynchronous,
    "together": lambda: Bounded(0),
    "bounded": lambda: Bounded(1),
    "sum": lambda: Synchronous("sum"),
    "mean": lambda: Synchronous("mean"),
    "accept": lambda: Quorum(2, "sum"),
    "drop": lambda: Quorum(2, "mean", stale="drop"),
    "scale": lambda: Quorum(2, "sum", stale="scale"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "symmetric": {},
    "first": {"servers": [0], "workers": [0, 1, 2]},
    "two": {"servers": [2, 0], "workers": [0, 1, 2]},
    "cut": {"split_bytes": 8},
    "apart": {"servers": [3], "workers": [0, 1, 2]},
    "two apart": {"servers": [4, 3], "workers": [0, 1, 2], "split_bytes": 8},
}
EVERYWHERE = pytest.mark.parametrize("policy", POLICIES)


def zeros(numel: int = 5) -> Tensor:
    return torch.zeros(numel, dtype=torch.float64)


async def counted(coll: Communicator, ps: ParameterServer, what: str) -> int:
    """Return one of the counts, over all ranks."""
    return int(await coll.allreduce(int(getattr(ps.statistics(), what))))


async def same_for_all(coll: Communicator, ps: ParameterServer, *names: str) -> list[Tensor]:
    """Pull after the barrier: no push is missing, and none comes later."""
    pulled = await ps.pull(list(names), [torch.empty_like(zeros()) for _ in names])
    for t in pulled:
        first, *others = await coll.allgather(t)
        assert all(torch.equal(first, other) for other in others)
    return [t.clone() for t in pulled]


def worked(layout: dict[str, Any], work: Callable[[Communicator, ParameterServer], Any], policy: Policy) -> None:
    """Run `work` on the workers; `run_ranks` raises Deadlock if no rank can continue."""

    async def main() -> None:
        async with aiodist.init() as coll:
            w = {"x": zeros(), "y": zeros(), "z": zeros(20_000)}
            async with ParameterServer(coll, w, consistency=policy, **layout) as ps:
                if ps.is_worker:
                    await work(coll, ps)

    size = max([2, *layout.get("servers", []), *layout.get("workers", [])]) + 1
    for seed in range(2):
        run_ranks(size, main, seed=seed)


# --- on real ranks -----------------------------------------------------------------------------------------------


@pytest.mark.drawn(2)
@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.ranks(2, backend=("mpi", "shm"))
@EVERYWHERE
async def test_p5_uneven_pushes_end(coll: Communicator, policy: str) -> None:
    """Rank 0 has most of one tensor, and the last rank of another, so each waits for pushes that never come."""
    w = {"x": zeros(), "y": zeros()}
    async with ParameterServer(coll, w, consistency=POLICIES[policy](), timeout=SECONDS) as ps:
        for name in "xy":
            first = coll.rank == 0 if name == "x" else coll.rank == coll.size - 1
            for _ in range(7 if first else 2):
                ps.push(name, zeros() + 1).add_done_callback(lambda done: done.result())
        await ps.sync()
        await ps.barrier()
        pulled = await same_for_all(coll, ps, "x", "y")
        if policy not in ("mean", "drop", "scale"):
            assert all(t[0] == 7 + 2 * (coll.size - 1) for t in pulled), "nothing is lost"
        if policy in ("sum", "mean", "together"):
            assert await counted(coll, ps, "incomplete") == 2 * 5


@pytest.mark.drawn(1)
@pytest.mark.ranks(3, backend=("gloo", "mpi"))
@EVERYWHERE
async def test_p5_training_continues_after_a_barrier(coll: Communicator, policy: str) -> None:
    async with ParameterServer(coll, {"x": zeros()}, consistency=POLICIES[policy](), timeout=SECONDS) as ps:
        for pushes in ([4, 1, 2], [0, 3, 0], [2, 2, 2]):
            for _ in range(pushes[coll.rank]):
                ps.push("x", zeros() + 1).add_done_callback(lambda done: done.result())
            await ps.barrier()
            await ps.barrier()
        await ps.sync()
        [x] = await same_for_all(coll, ps, "x")
        assert policy in ("mean", "drop", "scale") or x[0] == 7 + 3 + 6
        before = await counted(coll, ps, "incomplete")
        assert before == {"sum": 3 + 3, "mean": 3 + 3, "together": 3 + 3}.get(policy, before)


# --- one after another -------------------------------------------------------------------------------------------


@pytest.mark.drawn(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@EVERYWHERE
def test_p5_syncs_that_wait_for_one_another_end(policy: str, layout: str) -> None:
    async def work(coll: Communicator, ps: ParameterServer) -> None:
        for i, name in enumerate("xyz"):
            value = zeros(20_000 if name == "z" else 5) + 1
            for _ in range(4 if ps.rank == i else 1):
                ps.push(name, value).add_done_callback(lambda done: done.result())
        await ps.sync()
        await ps.pull("x")
        await ps.barrier()

    worked(LAYOUTS[layout], work, POLICIES[policy]())


@pytest.mark.drawn(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@EVERYWHERE
def test_p5_who_closes_or_comes_to_a_barrier_holds_nobody_up(policy: str, layout: str) -> None:
    async def work(coll: Communicator, ps: ParameterServer) -> None:
        for _ in range([1, 6, 3][ps.rank]):
            await ps.push("x", zeros() + 1)
            await ps.push("z", zeros(20_000) + 1)
        if ps.rank != 2:  # it closes
            await ps.sync()
            await ps.barrier()
            pulled = await ps.pull(["x", "z"])
            assert all((t == t[0]).all() for t in pulled)
            assert policy in ("mean", "drop", "scale") or [t[0] for t in pulled] == [10, 10]

    worked(LAYOUTS[layout], work, POLICIES[policy]())


@pytest.mark.drawn(3)
@pytest.mark.parametrize("layout", ["symmetric", "two", "cut", "apart"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_p5_who_pushes_again_after_a_barrier_is_in_step(layout: str, reduction: Any) -> None:
    """However the numbers differed before, a step after it has a push of each."""

    async def work(coll: Communicator, ps: ParameterServer) -> None:
        for _ in range(3 * ps.rank):
            await ps.push("x", zeros() + 1)
        await ps.barrier()
        begun = ps.pull("x", zeros())
        before = float((await begun)[0])
        for step in range(1, 6):
            await asyncio.sleep(float(ps.rank * (step % 2)))
            pulled = ps.push_pull("x", zeros() + ps.rank, zeros())
            assert float((await pulled)[0]) == before + step * (1.0 if reduction == "mean" else 3.0)
            assert pulled.version == (begun.version or 0) + step
        await ps.barrier()

    worked(LAYOUTS[layout], work, Synchronous(reduction))


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", [1, 3])
def test_p5_bounded_clocks_start_again_at_a_barrier(ahead: int) -> None:
    async def work(coll: Communicator, ps: ParameterServer) -> None:
        for _ in range(9 if ps.rank == 0 else 1):
            ps.push("x", zeros() + 1).add_done_callback(lambda done: done.result())
        await ps.barrier()
        await coll_of(coll, 0)
        if ps.rank == 2:  # the others do not wait for its missed pushes
            await asyncio.sleep(10.0)
        for _ in range(ahead):
            await ps.push("x", zeros() + 1, timeout=1.0)
        if ps.rank == 2:
            return
        with pytest.raises(aiodist.OperationTimeout):
            await ps.push("x", zeros() + 1, timeout=1.0)

    async def coll_of(coll: Communicator, value: int) -> None:
        await coll.allreduce(value)

    worked({"servers": [0], "workers": [0, 1, 2]}, work, Bounded(ahead))


def test_p5_all_that_was_accepted_before_a_barrier_is_there_after_it() -> None:
    """Also where another worker did not wait for its own, whose data are still to come."""

    async def work(coll: Communicator, ps: ParameterServer) -> None:
        value = zeros(20_000) + 1
        if ps.rank == 0:
            for _ in range(3):
                await ps.push("z", value)
        else:
            ps.push("z", value).add_done_callback(lambda done: done.result())
        await ps.barrier()
        assert (await ps.pull("z", zeros(20_000))).unique().tolist() == [5.0]

    for layout in ("first", "two", "cut", "two apart"):
        worked(LAYOUTS[layout], work, Synchronous("sum"))


@pytest.mark.drawn(1)
@EVERYWHERE
def test_p5_what_follows_a_barrier_that_nobody_awaits_comes_after_it(policy: str) -> None:
    async def work(coll: Communicator, ps: ParameterServer) -> None:
        met = []
        for _ in range(3):
            met.append(ps.barrier())
            for _ in range(ps.rank + 1):
                ps.push("x", zeros() + 1).add_done_callback(lambda done: done.result())
        await asyncio.gather(*met, ps.sync())
        await ps.barrier()
        x = await ps.pull("x")
        assert policy in ("mean", "drop", "scale") or x[0] == 3 * 6

    for layout in ("symmetric", "two apart"):
        worked(LAYOUTS[layout], work, POLICIES[policy]())


@pytest.mark.thorough
def test_p5_a_push_after_a_barrier_is_in_a_step_with_the_others_pushes() -> None:
    async def work(coll: Communicator, ps: ParameterServer) -> None:
        await asyncio.sleep(float(ps.rank))
        met, pushed = ps.barrier(), ps.push("x", zeros() + ps.rank)
        await met
        await pushed
        pulled = ps.pull("x", zeros())
        assert ((await pulled)[0], pulled.version) == (1.0, 1)

    for layout in LAYOUTS:
        worked(LAYOUTS[layout], work, Synchronous("mean"))


@pytest.mark.thorough
def test_p5_a_sync_of_some_takes_nobody_off_the_clock() -> None:
    """A worker that computes is waited for."""

    async def work(coll: Communicator, ps: ParameterServer) -> None:
        for step in range(1, 6):
            await asyncio.sleep(float(step % 3 == ps.rank))
            for name in "xy" if step % 2 else "yx":
                await ps.push(name, zeros() + ps.rank)
            await ps.sync()
            for t in await ps.pull(["x", "y"], [zeros(), zeros()]):
                assert t[0] >= step, "it saw its own step, of all"
        await ps.barrier()
        assert [t[0] for t in await ps.pull(["x", "y"])] == [5.0, 5.0]
        assert ps.statistics().incomplete == 0

    for layout in LAYOUTS:
        worked(LAYOUTS[layout], work, Synchronous("mean"))


# --- in any order ------------------------------------------------------------------------------------------------


async def wander(dice: random.Random, segments: int, stays: int, coll: Communicator, ps: ParameterServer) -> int:
    """Push, perhaps sync, and meet the others, several times; return the number of pushes."""
    count = 0
    for segment in range(segments):
        if segment == stays:
            return count
        for _ in range(dice.randrange(8)):
            name, large = dice.choice([("x", False), ("y", False), ("z", True)])
            ps.push(name, zeros(20_000 if large else 5) + 1).add_done_callback(lambda done: done.result())
            count += 1
            if dice.random() < 0.1:
                ps.prefetch(name).add_done_callback(lambda done: done.exception())
            if dice.random() < 0.2:
                await asyncio.sleep(dice.random())
            if dice.random() < 0.1:
                await ps.sync()
        if dice.random() < 0.7:
            await ps.sync()
        await ps.barrier()
    return count


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
@EVERYWHERE
def test_p5_any_pushes_of_workers_come_to_the_end(policy: str, layout: str) -> None:
    for seed in range(4):
        found: dict[int, tuple[int, list[float]]] = {}

        async def work(coll: Communicator, ps: ParameterServer, seed: int = seed, found: Any = found) -> None:
            dice = random.Random(1000 * seed + ps.rank)
            stays = dice.randrange(1, 4) if seed % 2 and ps.rank == 1 else 9
            count = await wander(dice, 3, stays, coll, ps)
            sums = [float(t[0]) for t in await ps.pull()] if stays == 9 else []
            found[ps.rank] = (count, sums)

        worked(LAYOUTS[layout], work, POLICIES[policy]())
        counts, sums = zip(*found.values(), strict=True)
        known = [each for each in sums if each]
        assert all(each == known[0] for each in known), "after a barrier all read the same"
        if policy in ("together", "bounded", "sum", "accept", "asynchronous"):
            assert all(sum(each) == sum(counts) for each in known), "nothing is lost, and nothing twice"


# --- who was refused ---------------------------------------------------------------------------------------------


@pytest.mark.drawn(1)
@pytest.mark.ranks(3)
@pytest.mark.ranks(3, backend="gloo")
async def test_p5_who_means_something_else_by_a_name_is_not_waited_for(coll: Communicator) -> None:
    async with ParameterServer(coll, consistency=Synchronous("sum"), timeout=SECONDS) as ps:
        if coll.rank == 2:
            await coll.barrier()
            with pytest.raises(MismatchError, match=r"shape \[5\].*shape \[4\]"):
                await ps.init("w", zeros(4))
        else:
            await ps.init("w", zeros())
            await coll.barrier()
            await ps.push("w", zeros() + 1)
            await ps.sync()
            assert (await ps.pull("w"))[0] == 2
        await ps.barrier()
        if coll.rank == 2:  # it stays off the clock of that tensor
            with pytest.raises(MismatchError, match=r"shape \[5\].*shape \[4\]"):
                await ps.init("w", zeros())
        else:
            assert float((await ps.push_pull("w", zeros() + 1))[0]) == 4
        await ps.barrier()
