"""W3: a rank is killed, and the others shrink, continue and grow back; ranks are tasks of this process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator, CommunicatorAborted, LaunchError, MismatchError, OperationTimeout, PeerLost
from aiodist.communicator import parts_of
from aiodist.testing import kill_rank, run_ranks

pytestmark = pytest.mark.timeout(60)


async def total(coll: Communicator, t: torch.Tensor | None = None) -> float:
    """Return the sum of 10 to the power of each rank, in a tensor that may have been used before."""
    t = torch.empty(3) if t is None else t
    await coll.allreduce(t.fill_(10.0**coll.rank))
    return t[0].item()


async def lost(coll: Communicator) -> PeerLost:
    """Return what operations raise once a rank is lost."""
    while True:
        try:
            await coll.allreduce(torch.ones(2))
        except PeerLost as error:
            return error


@pytest.mark.parametrize("dead", [[0], [1], [3], [0, 2], [1, 2, 3]])
@pytest.mark.parametrize("seed", [0, 1])
def test_w3_those_who_live_go_on_in_their_old_order(dead: list[int], seed: int) -> None:
    async def main(number: int) -> Any:
        async with aiodist.init(elastic=True) as coll:
            assert (coll.generation, coll.previous) == (0, (None,) * 4)
            mine = torch.empty(3)
            assert await total(coll, mine) == 1111
            if number in dead:
                kill_rank()
            assert (await lost(coll)).lost in dead
            coll = await coll.shrink()
            while coll.size > 4 - len(dead):  # those that died a little later
                await lost(coll)
                coll = await coll.shrink()
            left = tuple(rank for rank in range(4) if rank not in dead)
            assert (coll.rank, coll.size) == (left.index(number), len(left))
            assert await total(coll, mine) == sum(10**rank for rank in range(len(left)))
            return coll.previous if len(dead) == 1 else coll.size

    left = [rank for rank in range(4) if rank not in dead]
    expected = tuple(left) if len(dead) == 1 else len(left)
    assert run_ranks(4, main, seed, elastic=(1, 4)) == [expected if r in left else None for r in range(4)]


def test_w3_everything_of_the_old_world_raises_and_what_was_pending_has_the_lost_rank() -> None:
    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            twin, pair = await coll.dup(), await coll.group([0, 1])
            pending: list[aiodist.Handle[Any]] = []
            if number != 2:
                pending += [coll.allreduce(torch.ones(2)), twin.barrier(), coll.recv(src=(number + 1) % 3, tag=7)]
            await asyncio.sleep(1)
            if number == 2:
                kill_rank()
                await asyncio.sleep(1)
            for handle in pending:
                with pytest.raises(PeerLost, match="rank 2 left: it was killed") as caught:
                    await handle
                assert caught.value.lost == 2
            await pair.barrier()  # the lost rank has no part in it
            new = await coll.shrink()
            for old in (coll, twin, pair):
                with pytest.raises(CommunicatorAborted, match="continue in another one"):
                    old.barrier()
            with pytest.raises(CommunicatorAborted, match="continue in another one"):
                coll.shrink()
            assert await total(new) == 11
            assert await total(await new.dup()) == 11

    run_ranks(3, main, elastic=(1, 3))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("turns", range(0, 240, 20))
def test_w3_nobody_waits_in_a_group_of_a_world_that_others_have_left(turns: int) -> None:
    """The group of ranks 1 and 3 may have been made on one of them alone when rank 0 dies."""

    async def die() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        kill_rank()

    async def meet_in_groups(coll: Communicator) -> None:
        while True:
            half = await coll.split(coll.rank % 2)
            await half.allreduce(torch.ones(2))
            await half.aclose()

    async def main(number: int) -> float:
        async with aiodist.init(elastic=True, report_after=None) as coll:
            dying = asyncio.create_task(die()) if number == 0 else None
            with pytest.raises(PeerLost, match="rank 0 left"):
                await meet_in_groups(coll)
            del dying
            return await total(await coll.shrink())

    assert run_ranks(4, main, turns, elastic=(1, 4)) == [None, 111, 111, 111]


@pytest.mark.parametrize("waits", [True, False])
def test_w3_what_is_being_made_of_a_world_is_given_up_with_it(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """A library may wait for the lost rank without end, or fail before the loss is known."""

    async def split(*_: object) -> Any:
        if waits:
            await asyncio.sleep(1e6)
        raise aiodist.BackendError("the other side has closed its connection")

    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            monkeypatch.setattr(type(parts_of(coll).transport), "split", split)
            twin = coll.dup()
            await coll.barrier()
            if number == 1:
                kill_rank()
            with pytest.raises(PeerLost, match="rank 1 left"):
                await twin
            await coll.shrink()

    run_ranks(3, main, elastic=(1, 3))


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_w3_a_rank_that_is_lost_while_all_close_is_no_error_to_the_others(turns: int, how: str) -> None:
    failing: list[asyncio.Task[None]] = []

    async def fail() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        if how == "killed":
            kill_rank()
        raise ValueError("it has had enough")

    async def main(number: int) -> str:
        with contextlib.suppress(ValueError):
            async with aiodist.init(elastic=True) as coll:
                twin = await coll.dup()
                await twin.barrier()
                if number == 1 and how == "killed":
                    failing.append(asyncio.create_task(fail()))
                elif number == 1:
                    await fail()
        return "closed"

    closed = run_ranks(3, main, turns, elastic=(1, 3))
    assert closed[0] == closed[2] == "closed"


def test_w3_closing_raises_what_follows_from_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    async def part(*_: object) -> None:
        raise aiodist.BackendError("it broke")

    async def main() -> None:
        async with aiodist.init(elastic=True) as coll:
            await coll.barrier()
            monkeypatch.setattr(parts_of(coll).messenger, "part", part)

    with pytest.raises(aiodist.BackendError, match="it broke"):
        run_ranks(2, main, elastic=(1, 2))


def test_w3_what_was_to_be_made_of_a_communicator_that_is_given_up_at_once_raises() -> None:
    async def main() -> None:
        async with aiodist.init() as coll:
            twin = await coll.dup()
            making = twin.dup()
            twin.abort()
            with pytest.raises(CommunicatorAborted):
                await making

    run_ranks(2, main)


@pytest.mark.parametrize("seed", range(12))
def test_w3_a_death_at_any_moment_of_a_shrink_starts_it_over(seed: int) -> None:
    """Rank 3 dies, and later rank 1, after its call of shrink() and a number of steps of the loop."""

    async def main(number: int) -> Any:
        async with aiodist.init(elastic=True) as coll:
            if number == 3:
                kill_rank()
            await lost(coll)
            handle = coll.shrink()
            if number == 1:
                for _ in range(seed * 4):
                    await asyncio.sleep(0)
                kill_rank()
            coll = await handle
            while coll.size > 2:
                await lost(coll)
                coll = await coll.shrink()
            return coll.rank, await total(coll)

    assert run_ranks(4, main, seed, elastic=(1, 4)) == [(0, 11), None, (1, 11), None]


def test_w3_when_one_rank_shrinks_the_others_are_told_and_are_to_come() -> None:
    async def main(number: int) -> Any:
        async with aiodist.init(elastic=True) as coll:
            if number == 1:
                handle = coll.shrink(timeout=5)
                with pytest.raises(OperationTimeout, match="shrink") as late:
                    await handle
                assert sorted(late.value.late) == [0, 2]
                assert "has not asked" in late.value.late[0]
                with pytest.raises(aiodist.CommunicatorError, match="is in flight"):
                    coll.shrink()
                new = await handle  # it goes on
            else:
                with pytest.raises(CommunicatorAborted, match=r"rank 1 called shrink\(\)"):
                    await coll.barrier()
                await asyncio.sleep(60)
                new = await coll.shrink()
            return new.size, await total(new)

    assert run_ranks(3, main, elastic=(1, 3)) == [(3, 111)] * 3


def test_w3_calls_that_make_no_sense_raise_at_once() -> None:
    async def plain() -> None:
        async with aiodist.init() as coll:
            for call in (coll.shrink, coll.grow):
                with pytest.raises(aiodist.ConfigError, match=r"not elastic: expected aiodist.init\(elastic=True\)"):
                    call()

    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            twin = await coll.dup()
            with pytest.raises(aiodist.CommunicatorError, match=r"is for the world: 'world/dup1\.0' is a part of it"):
                twin.shrink()
            with pytest.raises(ValueError, match=r"grow\(2\) of 3 ranks: the job may have 4"):
                coll.grow(2)
            with pytest.raises(ValueError, match="at least 1"):
                coll.grow(0)
            with pytest.raises(TypeError, match="expected an int"):
                coll.grow(True)
            other: list[BaseException] = []

            def call() -> None:
                try:
                    coll.shrink()
                except RuntimeError as error:
                    other.append(error)

            await asyncio.to_thread(call)
            assert "belongs to another thread or event loop" in str(other[0])
            assert await total(coll) == 111, "nothing has changed"

    run_ranks(2, plain)
    run_ranks(3, main, elastic=(2, 4))
    with pytest.raises(aiodist.ConfigError, match="the job is not elastic: expected aiodist run --elastic"):
        run_ranks(2, lambda: main(0))


@pytest.mark.parametrize("seed", range(3))
def test_w3_a_rank_that_joins_finds_itself_in_the_grown_world(seed: int) -> None:
    async def main(number: int) -> Any:
        async with aiodist.init(elastic=True) as coll:
            state = torch.tensor([40.0 + coll.rank])
            if coll.generation:
                assert (number, coll.rank, coll.previous) == (number, number, (0, 1, None, None))
            else:
                pending = coll.allreduce(torch.ones(2))  # it ends before the world grows
                new = await coll.grow(2)
                assert (await pending).tolist() == [2, 2]
                with pytest.raises(CommunicatorAborted, match="it grew to generation 1"):
                    coll.barrier()
                coll = new
            await coll.broadcast(state)
            return coll.generation, coll.rank, state.item(), await total(coll)

    expected = [(1, rank, 40, 1111) for rank in range(4)]
    assert run_ranks(2, main, seed, elastic=(1, 4)) == expected


@pytest.mark.parametrize("steps", [0, 3, 10, 30])
def test_w3_where_a_joiner_dies_the_world_goes_on_as_it_was(steps: int) -> None:
    async def main(number: int) -> Any:
        if number == 2:
            for _ in range(steps):
                await asyncio.sleep(0)
            kill_rank()
            await asyncio.sleep(1)
        async with aiodist.init(elastic=True) as coll:
            if coll.generation == 0:
                with pytest.raises(LaunchError, match="rank 2 of the next generation left: it was killed"):
                    await coll.grow()
                assert await total(coll) == 11
                coll = await coll.grow()
            assert coll.generation == 2
            return await total(coll)

    assert run_ranks(2, main, elastic=(1, 3)) == [111, 111, None, 111]


@pytest.mark.parametrize("seed", range(12))
def test_w3_where_a_member_dies_at_any_moment_of_a_grow_the_others_shrink(seed: int) -> None:
    async def main(number: int) -> Any:
        async with aiodist.init(elastic=True) as coll:
            if coll.generation == 0:
                handle = coll.grow()
                if number == 1:
                    for _ in range(seed * 5):
                        await asyncio.sleep(0)
                    kill_rank()
                try:
                    coll = await handle
                except PeerLost:
                    coll = await coll.shrink()
            while coll.size > 3 or (1 in (coll.previous[coll.rank], *coll.previous[: coll.rank]) and number != 1):
                try:
                    for _ in range(20):
                        await coll.barrier()
                    break
                except PeerLost:
                    coll = await coll.shrink()
            return await total(coll)

    said = run_ranks(3, main, seed, elastic=(1, 4))
    assert said[1] is None
    assert said[0] == said[2]
    assert said[0] in (11, 111)  # with the one that joined, or without


def test_w3_ranks_that_want_to_grow_differently_are_told() -> None:
    async def main(number: int) -> Any:
        async with aiodist.init(elastic=True) as coll:
            with pytest.raises(MismatchError, match="number of new ranks: rank 0: 1; rank 1: 2"):
                await coll.grow(1 + number)
            return await total(coll)

    assert run_ranks(2, main, elastic=(1, 4)) == [11, 11]


def test_w3_the_job_ends_when_fewer_ranks_live_than_it_needs() -> None:
    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            if number:
                kill_rank()
            await lost(coll)
            await coll.shrink()
            await asyncio.sleep(1000)

    with pytest.raises(LaunchError, match="1 of at least 2 ranks are left: 1, 2 were killed"):
        run_ranks(3, main, elastic=(2, 3))


def test_w3_a_world_that_is_left_while_it_shrinks_is_an_error() -> None:
    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            coll.shrink().detach()

    with pytest.raises(aiodist.CommunicatorError, match=r"shrink.* was in flight"):
        run_ranks(2, main, elastic=(1, 2))


async def rounds(count: int, seen: list[tuple[int, ...]]) -> int:
    """Let a rank of three die and another join repeatedly, and note the counts of all resources."""
    async with aiodist.init(elastic=True) as coll:
        done = torch.zeros(1)
        await coll.broadcast(done)
        while done < count:
            try:
                assert await total(coll) == (111 if coll.size == 3 else 11)
                if coll.size == 3 and coll.rank == int(done) % 3:
                    kill_rank()
                if coll.size == 3:
                    await coll.barrier()  # to which the one that was killed does not come
                coll = await coll.grow()
                done += 1
                await asyncio.sleep(3)  # of a clock that jumps: what waits for a time ends
                await coll.broadcast(done)
                if coll.rank == 0 and int(done) % (count // 4) == 0:
                    gc.collect()
                    seen.append((len(gc.get_objects()), len(os.listdir("/proc/self/fd")), threading.active_count()))
            except PeerLost:
                coll = await coll.shrink()
        return coll.generation


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=[pytest.mark.thorough, pytest.mark.timeout(300)])])
def test_w3_shrinking_and_growing_a_thousand_times_leaves_nothing(count: int) -> None:
    seen: list[tuple[int, ...]] = []
    left = [generation for generation in run_ranks(3, lambda: rounds(count, seen), elastic=(1, 3)) if generation]
    assert left == [2 * count] * 3
    (objects, *others), *_, (objects_last, *others_last) = seen
    assert others == others_last
    assert objects_last - objects < 40 * count, "a world has some 5,000"
