"""N16: a queue of shards on several ranks: who gets what, who leaves, what is saved and loaded."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import AsyncIterable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import aiodist
from aiodist import Communicator
from aiodist.communicator import parts_of
from aiodist.data import IndexShards, RecordWriter, ShardQueue, prefetch, records
from aiodist.data.shards import Shuffle
from aiodist.errors import (
    CommunicatorAborted,
    CommunicatorClosed,
    MismatchError,
    OperationTimeout,
    PeerLost,
    RemoteError,
)
from aiodist.nn import DataParallel, assert_synchronized
from aiodist.testing import run_ranks

each_shuffle = pytest.mark.parametrize("shuffle", [False, True, "shards"])


def queue_of(coll: Communicator, length: int = 203, **options: Any) -> ShardQueue[int]:
    return ShardQueue(IndexShards(length, 16), coll, **options)


async def taken(source: AsyncIterable[Any], count: int | None = None) -> list[int]:
    """Return what is in the first `count` batches, or in all; then leave."""
    found: list[int] = []
    if count == 0:
        return found
    async with aclosing(aiter(source)) as batches:  # type: ignore[type-var]
        async for batch in batches:
            found += batch if isinstance(batch, list) else [batch]
            count = None if count is None else count - 1
            if count == 0:
                break
    return found


async def together(coll: Communicator, mine: Sequence[int]) -> list[int]:
    """Return what all ranks have, in order."""
    return sorted(itertools.chain(*await coll.allgather_object(list(mine))))


@pytest.mark.ranks(1, 2, 3, 7)
@each_shuffle
@pytest.mark.parametrize(("batch_size", "depth"), [(None, 0), (1, 3), (5, 0), (5, 3)])
async def test_n16_each_record_comes_once_in_each_epoch(
    coll: Communicator, shuffle: Shuffle, batch_size: int | None, depth: int
) -> None:
    queue = queue_of(coll, batch_size=batch_size, shuffle=shuffle, seed=coll.size)
    for epoch in range(3):
        queue.set_epoch(epoch)
        mine: list[int] = []
        if depth:
            async with prefetch(queue, depth=depth) as batches:
                async for batch in batches:
                    mine += batch if batch_size else [batch]
        else:
            mine = await taken(queue)
        assert await together(coll, mine) == list(range(203))


@pytest.mark.ranks(1)
async def test_n16_the_order_comes_from_seed_and_epoch(coll: Communicator) -> None:
    orders = {}
    for shuffle, seed, epoch in itertools.product([False, True, "shards"], range(2), range(2)):
        queue = queue_of(coll, shuffle=shuffle, seed=seed)
        queue.set_epoch(epoch)
        orders[shuffle, seed, epoch] = tuple(await taken(queue))
    assert all(orders[False, seed, epoch] == tuple(range(203)) for seed in range(2) for epoch in range(2))
    assert len(set(orders.values())) == 9
    by_shard = [list(found) for _, found in itertools.groupby(orders["shards", 1, 1], lambda index: index // 16)]
    assert len(by_shard) == 13
    assert all(found == sorted(found) for found in by_shard)


@pytest.mark.ranks(1)
async def test_n16_batches_are_full_but_the_last(coll: Communicator) -> None:
    sizes = [len(batch) async for batch in queue_of(coll, batch_size=30)]
    assert sizes == [30] * 6 + [23]
    assert [batch async for batch in ShardQueue(IndexShards(0), coll, batch_size=3)] == []
    assert await taken(ShardQueue(IndexShards(1), coll)) == [0]


@pytest.mark.ranks(2, 4)
async def test_n16_a_slow_rank_takes_fewer(coll: Communicator) -> None:
    """The last rank works on its first batch until the others have ended."""
    queue = queue_of(coll, 2000, batch_size=4)
    mine: list[int] = []
    slow = coll.rank == coll.size - 1
    async with prefetch(queue) as batches:
        async for batch in batches:
            mine += batch
            if slow and len(mine) == 4:
                await coll.barrier(name="the others")
    if not slow:
        await coll.barrier(name="the others")
    counts = await coll.allgather_object(len(mine))
    assert sum(counts) == 2000
    assert counts[-1] < 2000 / coll.size / 2


@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize("batch_size", [None, 7])
@pytest.mark.parametrize("count", [0, 3])
async def test_n16_others_get_what_a_rank_that_leaves_has_not_taken(
    coll: Communicator, ahead: int, batch_size: int | None, count: int
) -> None:
    """Also what lay ready in its prefetch; those that wait get it though nothing was left before."""
    queue = queue_of(coll, batch_size=batch_size, shuffle=True, wait=True)
    count = count if coll.rank == 1 else 10**9
    if ahead:
        mine: list[int] = []
        async with prefetch(queue, depth=ahead) as batches:
            while count and (batch := await anext(batches, None)) is not None:
                mine += batch if batch_size else [batch]
                count -= 1
    else:
        mine = await taken(queue, count)
    if coll.rank == 1:
        assert len(mine) <= 3 * (batch_size or 1)
    assert await together(coll, mine) == list(range(203))


@pytest.mark.thorough
@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(2, 4), st.data())
def test_n16_ranks_that_leave_at_any_time_lose_nothing(seed: int, size: int, data: st.DataObject) -> None:
    """All ranks but the last leave, by a `break`, an error or a cancellation, and the last one has the rest."""
    counts = data.draw(st.lists(st.integers(0, 12), min_size=size - 1, max_size=size - 1))
    ways = data.draw(st.lists(st.sampled_from(["break", "error", "cancel"]), min_size=size - 1, max_size=size - 1))

    async def read(queue: ShardQueue[int], count: int, way: str, mine: list[int]) -> None:
        async with prefetch(queue, depth=2) as batches:
            async for batch in batches:
                mine += batch
                count -= 1
                if count == 0 and way == "break":
                    return
                if count == 0 and way == "error":
                    raise KeyError(way)
                if count == 0 and way == "cancel":
                    await asyncio.Event().wait()

    async def main() -> list[int]:
        async with aiodist.init() as coll:
            queue = queue_of(coll, 150, batch_size=3, shuffle=True, seed=seed % 7, wait=True)
            mine: list[int] = []
            if coll.rank == size - 1:
                return await taken(queue)
            task = asyncio.create_task(read(queue, counts[coll.rank], ways[coll.rank], mine))
            if ways[coll.rank] == "cancel":
                await asyncio.wait([task], timeout=5)
                task.cancel()
            (end,) = await asyncio.gather(task, return_exceptions=True)
            assert end is None or isinstance(end, KeyError | asyncio.CancelledError)
            return mine

    assert sorted(itertools.chain(*run_ranks(size, main, seed))) == list(range(150))


@pytest.mark.ranks(3)
async def test_n16_without_wait_a_rank_ends_and_may_come_again(coll: Communicator) -> None:
    queue = queue_of(coll, 60, batch_size=4)
    mine: list[int] = []
    if coll.rank == 1:
        async with prefetch(queue) as batches:
            mine += await anext(batches)
            await coll.barrier(name="others ended")
        await coll.barrier(name="given back")
    else:
        mine += await taken(queue)
        await coll.barrier(name="others ended")
        with pytest.raises(RuntimeError, match=r"the pass over epoch 0 has ended: call set_epoch\(\)"):
            await taken(queue)
        await coll.barrier(name="given back")
        queue.set_epoch(0)
        mine += await taken(queue)
    assert await together(coll, mine) == list(range(60))


@pytest.mark.ranks(1, 3)
async def test_n16_another_pass_or_epoch_ends_the_one_before(coll: Communicator) -> None:
    queue = queue_of(coll, batch_size=5, wait=True)
    first = aiter(queue)
    mine = await anext(first)
    if coll.rank == 0:
        mine += await taken(queue)
        with pytest.raises(RuntimeError, match=r"was left before its end, by another pass, set_epoch\(\)"):
            await anext(first)
    else:
        mine += [index async for batch in first for index in batch]
    assert await together(coll, mine) == list(range(203))
    queue.set_epoch(1)
    async with prefetch(queue, depth=3) as batches:
        await anext(batches)
        await coll.barrier()
        queue.set_epoch(2)
        with pytest.raises(RuntimeError, match="was left before its end"):
            await anext(batches)
    assert await together(coll, await taken(queue)) == list(range(203))


@pytest.mark.ranks(2)
async def test_n16_an_error_of_reading_comes_in_its_place_and_the_rest_goes_to_others(coll: Communicator) -> None:
    class Damaged(IndexShards):
        def read(self, shard: int, within: Sequence[int], /) -> list[int]:
            if coll.rank == 0 and shard == 3:
                raise OSError("shard 3 cannot be read")
            return super().read(shard, within)

    queue = ShardQueue(Damaged(160, 16), coll, batch_size=4, wait=True)
    mine: list[int] = []
    try:
        async for batch in queue:
            mine += batch
    except OSError:
        assert coll.rank == 0
    assert await together(coll, mine) == list(range(160))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("count", [7, 9])
async def test_n16_shards_that_give_another_number_of_records_are_an_error(
    coll: Communicator, wait: bool, count: int
) -> None:
    """With too few ranks a queue once lost count of used records, and with `wait` no pass ended."""

    class Torn(IndexShards):
        def read(self, shard: int, within: Sequence[int], /) -> list[int]:
            return list(range(count)) if shard == 3 else super().read(shard, within)

    queue = ShardQueue(Torn(80, 8), coll, batch_size=2, wait=wait)
    mine: list[int] = []
    raised = ""
    async with asyncio.timeout(60):
        try:
            async for batch in queue:
                mine += batch
        except ValueError as error:
            raised = str(error)
    said = [each for each in await coll.allgather_object(raised) if each]
    assert said
    assert all(re.fullmatch(rf"shard 3 gave {count} records: expected \d, as asked for", each) for each in said)


@pytest.mark.ranks(2)
async def test_n16_a_queue_that_was_closed_is_forgotten(coll: Communicator) -> None:
    queue = queue_of(coll)
    known = weakref.ref(queue)
    await taken(queue)
    await queue.aclose()
    del queue
    gc.collect()
    assert known() is None


@pytest.mark.ranks(2)
async def test_n16_numbers_of_numpy_are_numbers(coll: Communicator) -> None:
    """The control channel cannot send such numbers, and all ranks once waited forever."""

    shards = IndexShards(7, 4)
    shards.sizes = np.array([4, 0, 3])  # type: ignore[assignment]
    options: dict[str, Any] = {"batch_size": np.int64(2), "seed": np.int32(3), "shuffle": np.bool_(True)}
    queue = ShardQueue(shards, coll, **options)
    queue.set_epoch(np.int64(1))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        mine = await taken(queue)
    assert len(await together(coll, mine)) == 7
    assert json.loads(json.dumps(queue.state_dict()))["seed"] == 3


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("fails", ["source", "transform"])
async def test_n16_what_was_ready_before_an_error_is_used_first(coll: Communicator, fails: str) -> None:
    """The consumer is so slow that the reader has long ended; the rest goes to others when it comes to the error."""

    class Damaged(IndexShards):
        def read(self, shard: int, within: Sequence[int], /) -> list[int]:
            if shard == 3 and fails == "source" and coll.rank == 0:
                raise OSError("shard 3 cannot be read")
            return super().read(shard, within)

    def checked(batch: list[int]) -> list[int]:
        if 48 in batch and coll.rank == 0:
            raise OSError("48 is no good")
        return batch

    queue = ShardQueue(Damaged(256, 16), coll, batch_size=4, wait=True)
    mine: list[int] = []
    if coll.rank == 0:
        async with prefetch(queue, depth=30, transform=checked) as batches:
            await asyncio.wait([task for task in asyncio.all_tasks() if task.get_name() == "aiodist-prefetch"])
            assert queue.state_dict()["used"] == []
            for _ in range(12):
                mine += await anext(batches)
            with pytest.raises(OSError, match="no good" if fails == "transform" else "cannot be read"):
                await anext(batches)
            assert mine == list(range(48))
            assert queue.state_dict()["used"] == [[0, 48]]
            await coll.barrier(name="given back")
    else:
        await coll.barrier(name="given back")
        mine = await taken(queue)
    if coll.size > 1:
        assert await together(coll, mine) == list(range(256))


@pytest.mark.ranks(1)
async def test_n16_shards_with_threads_are_read_on_several(coll: Communicator) -> None:
    meeting = threading.Barrier(2)
    readers: dict[int, int] = {}

    class Together(IndexShards):
        threads = 2

        def read(self, shard: int, within: Sequence[int], /) -> list[int]:
            if shard < 2:
                meeting.wait(20)
            assert readers.setdefault(shard, threading.get_ident()) == threading.get_ident()
            return super().read(shard, within)

    assert await taken(ShardQueue(Together(200, 16), coll, batch_size=7)) == list(range(200))
    assert len(set(readers.values())) == 2


@pytest.mark.ranks(4)
@each_shuffle
@pytest.mark.parametrize(("before", "after", "steps"), [(1, 1, 3), (1, 4, 0), (3, 2, 4), (2, 3, 1), (4, 1, 2)])
async def test_n16_another_number_of_ranks_goes_on(
    coll: Communicator, shuffle: Shuffle, before: int, after: int, steps: int
) -> None:
    """Ready items in the prefetch of a rank are not used, and come after the interruption."""
    mine: list[int] = []
    state: dict[str, Any] | None = None
    first = await coll.group(range(before))
    if coll.rank < before:
        queue = queue_of(first, batch_size=6, shuffle=shuffle, seed=5)
        queue.set_epoch(3)
        async with prefetch(queue, depth=4) as batches:
            for _ in range(steps):
                mine += await anext(batches)
            state = queue.state_dict()
    states = [told for told in json.loads(json.dumps(await coll.allgather_object(state))) if told is not None]
    assert [state["epoch"] for state in states] == [3] * before
    assert all(sum(stop - start for start, stop in state["used"]) == steps * 6 for state in states)
    second = await coll.group(range(4 - after, 4))
    if coll.rank >= 4 - after:
        queue = queue_of(second, batch_size=5, shuffle=shuffle, seed=5)
        queue.load_state_dicts(states)
        queue.set_epoch(queue.epoch)
        mine += await taken(queue)
        used = [range(*each) for state in await second.allgather_object(queue.state_dict()) for each in state["used"]]
        assert sorted(itertools.chain(*used)) == list(range(203))
        queue.set_epoch(4)
        again = await taken(queue)
        assert sorted(itertools.chain(*await second.allgather_object(again))) == list(range(203))
    assert await together(coll, mine) == list(range(203))


@pytest.mark.ranks(3)
async def test_n16_a_state_of_a_state(coll: Communicator) -> None:
    """Interrupted twice, and loaded into the same queue."""
    queue = queue_of(coll, batch_size=4, shuffle=True)
    mine: list[int] = []
    for _ in range(3):
        async with prefetch(queue) as batches:
            mine += await anext(batches)
            states = await coll.allgather_object(queue.state_dict())
        queue.load_state_dicts(states)
    assert await together(coll, mine + await taken(queue)) == list(range(203))


@pytest.mark.ranks(3)
async def test_n16_who_loads_first_waits_for_nobody(coll: Communicator) -> None:
    queue = queue_of(coll, batch_size=4)
    states = [{**queue.state_dict(), "used": [[10, 200]]}]
    if coll.rank == 0:
        await coll.barrier(name="the others have all")
        queue.load_state_dicts(states)
        mine = await taken(queue)
        assert mine == []
    else:
        queue.load_state_dicts(states)
        mine = await taken(queue)
        await coll.barrier(name="the others have all")
    assert await together(coll, mine) == [*range(10), 200, 201, 202]


@pytest.mark.ranks(2)
async def test_n16_ranks_that_loaded_different_states_are_told(coll: Communicator) -> None:
    queue = queue_of(coll, batch_size=4)
    queue.load_state_dicts([{**queue.state_dict(), "used": [[10, 200 + coll.rank]]}])
    if coll.rank == 0:
        assert await taken(queue) == [*range(10), 200, 201, 202]
        await coll.barrier()
    else:
        await coll.barrier()
        state = r"epoch 0 after 1 others, with the loaded state \w+"
        with pytest.raises(MismatchError, match=f"rank 1: {state}; another rank: {state}"):
            await taken(queue)


@pytest.mark.ranks(2)
async def test_n16_who_loaded_while_another_rank_went_on_is_told(coll: Communicator) -> None:
    queue = queue_of(coll, batch_size=4)
    states = await coll.allgather_object(queue.state_dict())
    if coll.rank == 1:
        queue.load_state_dicts(states)
        await coll.barrier()
        with pytest.raises(MismatchError, match="another rank: epoch 1 after 1 others"):
            await taken(queue)
    else:
        queue.set_epoch(1)
        assert sorted(await taken(queue)) == list(range(203))
        await coll.barrier()


@pytest.mark.ranks(2)
async def test_n16_who_took_of_a_loaded_state_and_left_gives_back(coll: Communicator) -> None:
    queue = queue_of(coll, batch_size=4, wait=True)
    states = await coll.allgather_object(queue.state_dict())
    if coll.rank == 1:
        queue.load_state_dicts(states)
        mine = await taken(queue, 2)
        await coll.barrier()
    else:
        await coll.barrier()
        queue.load_state_dicts(states)
        mine = await taken(queue)
    assert await together(coll, mine) == list(range(203))


@pytest.mark.ranks(2)
async def test_n16_ranks_in_different_epochs_are_told(coll: Communicator) -> None:
    queue = queue_of(coll)
    queue.set_epoch(2 + coll.rank)
    states = await coll.allgather_object(queue.state_dict())
    with pytest.raises(ValueError, match=r"states of ranks in epochs \[2, 3\]: expected those of one epoch"):
        queue.load_state_dicts(states)
    if coll.rank == 0:
        mine = await taken(queue)
        await coll.barrier()
        assert sorted(mine) == list(range(203))
    else:
        await coll.barrier()
        with pytest.raises(MismatchError, match="rank 1: epoch 3 after 1 others; another rank: epoch 2 after 1 o"):
            await taken(queue)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("other", [{"length": 204}, {"seed": 1}, {"shuffle": "shards"}], ids=str)
async def test_n16_ranks_with_different_queues_are_told(coll: Communicator, other: dict[str, Any]) -> None:
    queue = queue_of(coll, **(other if coll.rank else {}))
    if coll.rank:
        with pytest.raises(MismatchError, match=r"rank 0: records=203, shards=13.*; rank 1: records="):
            await taken(queue)
    else:
        assert await taken(queue) == list(range(203))


@pytest.mark.ranks(1)
async def test_n16_states_of_other_data_are_refused(coll: Communicator) -> None:
    queue = queue_of(coll, seed=2, shuffle=True)
    state = queue.state_dict()
    for name, length, options in (
        ("records", 202, {"seed": 2, "shuffle": True}),
        ("shuffle", 203, {"seed": 2, "shuffle": "shards"}),
        ("seed", 203, {"seed": 3, "shuffle": True}),
    ):
        with pytest.raises(ValueError, match=f"a state with {name}="):
            queue_of(coll, length, **options).load_state_dicts([state])
    for used in ([[0, 204]], [[-1, 3]], [[0, 3], [2, 5]], [[5, 2]]):
        with pytest.raises(ValueError, match="expected ranges of 203 records, each record once"):
            queue.load_state_dicts([{**state, "used": used}])
    with pytest.raises(ValueError, match="each record once"):
        queue.load_state_dicts([{**state, "used": [[0, 3]]}, {**state, "used": [[2, 5]]}])
    with pytest.raises(ValueError, match="a state with sizes_crc32="):
        ShardQueue(IndexShards(203, 17), coll, seed=2, shuffle=True).load_state_dicts([{**state, "shards": 12}])


@pytest.mark.ranks(1, 2, 3)
async def test_n16_uneven_passes_train_in_a_join_block(coll: Communicator) -> None:
    torch.manual_seed(0)
    net = await DataParallel.create(nn.Linear(1, 1).double(), coll)
    opt = torch.optim.SGD(net.parameters(), lr=1e-6)
    queue = queue_of(coll, 90, batch_size=4, shuffle=True)
    for epoch in range(2):
        queue.set_epoch(epoch)
        mine: list[int] = []
        async with net.join(), prefetch(queue, transform=lambda batch: torch.tensor(batch).double()) as batches:
            async for x in batches:
                await net.step(lambda: net(x[:, None]).square().mean(), opt)  # noqa: B023
                mine += x.int().tolist()
                if coll.rank == 1 and len(mine) == 12:
                    break  # it leaves, and others train on what it had
        assert await together(coll, mine) == list(range(90))
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(1, 3)
async def test_n16_the_first_rank_answers_until_all_have_closed(coll: Communicator) -> None:
    queue, other = queue_of(coll, wait=True), queue_of(coll, 50, batch_size=3)
    mine = [] if coll.rank == 0 and coll.size > 1 else await taken(queue)
    await queue.aclose()
    await queue.aclose()
    assert await together(coll, mine) == list(range(203))
    with pytest.raises(CommunicatorClosed, match=r"world/shards\d+ is closed"):
        await taken(queue)
    assert await together(coll, await taken(other)) == list(range(50))


@pytest.mark.ranks(3)
async def test_n16_a_program_that_ends_in_the_middle_gives_back(coll: Communicator) -> None:
    dup = await coll.dup()
    queue = queue_of(dup, batch_size=4, wait=True)
    mine: list[int] = []
    if coll.rank == 2:
        reading = aiter(queue)
        mine += await anext(reading)
        closing = asyncio.create_task(dup.aclose())
    else:
        mine += await taken(queue)
        closing = asyncio.create_task(dup.aclose())
    await closing
    assert await together(coll, mine) == list(range(203))


@pytest.mark.ranks(3)
async def test_n16_a_lost_rank_s_records_go_to_others(coll: Communicator) -> None:
    """Other ranks get its records, without those that it had reported as used."""
    dup = await coll.dup()
    queue = queue_of(dup, batch_size=4, wait=True)
    mine: list[int] = []
    if coll.rank == 2:
        reading = aiter(queue)
        mine += await anext(reading)
        mine += await anext(reading)
        await coll.barrier()
        await coll.barrier(name="over")
    else:
        await coll.barrier()
        reader = asyncio.create_task(taken(queue))
        await asyncio.wait([reader], timeout=1)
        assert not reader.done()
        for tell in list(parts_of(dup).dispatcher.lifetime.on_lost):
            tell(2, PeerLost("rank 2 left", lost=2))
        mine += await reader
        await coll.barrier(name="over")
    assert await together(coll, mine) == list(range(203))
    assert queue.epoch == 0


@pytest.mark.ranks(2)
async def test_n16_without_the_first_rank_there_is_no_queue(coll: Communicator) -> None:
    dup = await coll.dup()
    queue = queue_of(dup, batch_size=4, wait=True)
    if coll.rank == 0:
        first = aiter(queue)
        await anext(first)
        await coll.barrier()
        await coll.barrier()
    else:
        await coll.barrier()
        reader = asyncio.create_task(taken(queue))
        await asyncio.wait([reader], timeout=1)
        for tell in list(parts_of(dup).dispatcher.lifetime.on_lost):
            tell(0, PeerLost("rank 0 left", lost=0))
        with pytest.raises(PeerLost, match="rank 0 left"):
            await reader
        with pytest.raises(PeerLost):
            await taken(queue)
        await coll.barrier()
    dup.abort()


@pytest.mark.ranks(2)
async def test_n16_an_abort_ends_who_waits(coll: Communicator) -> None:
    dup = await coll.dup()
    queue = queue_of(dup, batch_size=4, wait=True)
    if coll.rank == 0:
        first = aiter(queue)
        await anext(first)
        await coll.barrier()
        dup.abort("enough")
        await coll.barrier()
    else:
        reader = asyncio.create_task(taken(queue))
        await coll.barrier()
        with pytest.raises(CommunicatorAborted, match="enough"):
            await reader
        await coll.barrier()


@pytest.mark.parametrize("traceback", ["", "Traceback: a slip"])
def test_n16_others_go_on_when_a_program_fails(traceback: str) -> None:
    """They lose the communicator, but not the queue."""

    async def main() -> list[int]:
        mine: list[int] = []
        async with aiodist.init() as coll:
            queue = queue_of(coll, batch_size=4, wait=True)
            reading = aiter(queue)
            mine += await anext(reading)
            await coll.barrier()
            if coll.rank == 2:
                registry = parts_of(coll).registry  # as the end of a program that raised
                registry.channel.fail("it slipped", traceback)
                await registry.abort(CommunicatorAborted("this rank failed"))
                return mine
            async for batch in reading:
                mine += batch
            with pytest.raises(RemoteError if traceback else PeerLost, match="it slipped"):
                await coll.barrier()
        return mine

    assert sorted(itertools.chain(*run_ranks(3, main))) == list(range(203))


def test_n16_a_long_wait_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with aiodist.init() as coll:
            queue = queue_of(coll, 40, batch_size=4, wait=True)
            if coll.rank == 1:
                first = aiter(queue)
                await anext(first)
                await coll.barrier(name="begun")
                await asyncio.sleep(75)
                await first.aclose()  # type: ignore[attr-defined]
            else:
                await coll.barrier(name="begun")
                await taken(queue)

    run_ranks(2, main)
    said = [line for line in caplog.messages if "has long waited for records" in line]
    assert len(said) == 2  # after 10 s, and a minute later
    assert re.fullmatch(r"rank 0 has long waited for records of world/shards1: rank 1 holds \d+ records", said[0])


def test_n16_a_wait_without_end_names_who_holds_the_records() -> None:
    async def main() -> None:
        async with aiodist.init(timeout=3) as coll:
            queue = queue_of(coll, 40, batch_size=4, wait=True)
            if coll.rank == 1:
                first = aiter(queue)
                await anext(first)
                await coll.barrier(name="begun")
                await coll.barrier(name="told", timeout=60)
                await first.aclose()  # type: ignore[attr-defined]
            else:
                await coll.barrier(name="begun")
                with pytest.raises(OperationTimeout, match=r"rank 1.*holds \d+ records") as caught:
                    await taken(queue)
                assert set(caught.value.late) == {1}
                await coll.barrier(name="told", timeout=60)
            await queue.aclose()

    run_ranks(2, main)


@pytest.mark.ranks(2, backend="shm")
async def test_n16_the_first_rank_answers_while_its_loop_stands_still(coll: Communicator) -> None:
    """Rank 0 blocks its loop's thread until rank 1 has used up all that rank 0 does not hold."""
    folder = Path(await coll.broadcast_object(tempfile.mkdtemp() if coll.rank == 0 else ""))
    pipe = folder / "pipe"
    if coll.rank == 0:
        os.mkfifo(pipe)
    queue = queue_of(coll, 3000, batch_size=8)
    await coll.barrier()
    if coll.rank == 0:
        pipe.read_bytes()
        shutil.rmtree(folder)
        mine: list[int] = []
    else:
        mine = await taken(queue)
        pipe.write_bytes(b"over")
    assert await together(coll, mine) == list(range(3000))


@pytest.mark.ranks(1)
async def test_n16_wrong_arguments_of_a_queue(coll: Communicator) -> None:
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: queue_of(coll, batch_size=0), "batch_size=0: expected at least 1"),
        (lambda: queue_of(coll, seed=-1), "seed=-1"),
        (lambda: queue_of(coll, shuffle="records"), "shuffle='records': expected True, False or 'shards'"),
        (lambda: IndexShards(-1), "data=-1"),
        (lambda: IndexShards(5, 0), "shard_size=0"),
        (lambda: queue_of(coll).set_epoch(-1), "epoch=-1"),
        (lambda: queue_of(coll, batch_size=1.5), "batch_size=1.5: expected an integer, at least 1"),
        (lambda: queue_of(coll).set_epoch("1"), "epoch='1': expected an integer"),  # type: ignore[arg-type]
        (lambda: records([], coll, wait=True), "wait=True: expected dynamic=True"),  # type: ignore[call-overload]
    ]
    for call, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def written(path: Path, items: Sequence[bytes], chunk_bytes: int) -> Path:
    with RecordWriter(path, chunk_bytes=chunk_bytes, compressor="gzip") as writer:
        for item in items:
            writer.write(item)
    return path


@pytest.mark.ranks(1, 2, 3)
@each_shuffle
async def test_n16_records_of_several_files_come_once(
    coll: Communicator, tmp_path_factory: pytest.TempPathFactory, shuffle: Shuffle
) -> None:
    folder = tmp_path_factory.mktemp("records")
    items = [f"{i}".encode() * (i % 5) + f" {i}".encode() for i in range(300)]
    paths = [written(folder / "a", items[:40], 1 << 20), written(folder / "b", items[40:], 150)]
    queue = records(paths, coll, batch_size=7, shuffle=shuffle, seed=1, dynamic=True, wait=True)
    for epoch in range(2):
        queue.set_epoch(epoch)
        mine: list[bytes] = []
        async with prefetch(queue) as batches:
            async for batch in batches:
                mine += batch
        everybody = list(itertools.chain(*await coll.allgather_object(mine)))
        assert sorted(everybody) == sorted(items)
        if coll.size == 1:
            assert (everybody == items) is (shuffle is False)


@pytest.mark.ranks(1)
async def test_n16_a_damaged_chunk_in_a_queue_names_itself(coll: Communicator, tmp_path: Path) -> None:
    path = tmp_path / "a"
    with RecordWriter(path, chunk_bytes=7) as writer:
        for item in (b"one", b"two", b"six"):
            writer.write(item)
    path.write_bytes(path.read_bytes().replace(b"two", b"tow"))
    async with prefetch(records(path, coll, dynamic=True)) as items:
        assert await anext(items) == b"one"
        with pytest.raises(ValueError, match="chunk 1 at byte 27"):
            await anext(items)
