"""W3: a queue of shards continues in another world, and each record is used once; ranks are tasks of this process."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import Communicator, MismatchError, PeerError
from aiodist.data import IndexShards, ShardQueue, prefetch
from aiodist.data.shards import Shuffle
from aiodist.nn import DataParallel
from aiodist.testing import kill_rank, run_ranks
from tests.support.elastic import survivors

pytestmark = pytest.mark.timeout(100)

RECORDS, EPOCHS = 203, 2


class Tally(nn.Module):
    """How often each record was used in each epoch, which training by plain sums of gradients counts."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.zeros(EPOCHS, RECORDS))

    def forward(self, epoch: int, batch: list[int]) -> Tensor:
        return -self.times[epoch, torch.tensor(batch, dtype=torch.int64)].sum()


async def taken(queue: ShardQueue[int]) -> list[int]:
    return [record async for batch in queue for record in batch]


async def epoch_of(net: DataParallel, opt: Any, queue: ShardQueue[int], ahead: int) -> None:
    """Train on what is left of an epoch."""
    epoch = queue.epoch
    source: Any = prefetch(queue, depth=ahead) if ahead else aclosing(aiter(queue))
    times = net.module.get_parameter("times")
    async with source as batches:
        while True:
            batch: list[int] = await anext(batches, [])
            count = await queue.agree(net.steps_done)
            if not count:
                return
            before = times.detach().sum()
            await net.step(net, opt, epoch, batch)
            assert times.detach().sum() - before == count, "agree tells what the step uses"


async def train(module: Tally, seed: int, shuffle: Shuffle, ahead: int, grows_at: int | None) -> None:
    opt = torch.optim.SGD(module.parameters(), lr=1.0)
    net: DataParallel | None = None
    queue: ShardQueue[int] | None = None
    async with aiodist.init(elastic=True) as coll:
        while True:
            try:
                net = net or await DataParallel.create(module, coll, opt, op="sum")
                await net.rebind(coll, opt)
                if queue is None:
                    queue = ShardQueue(IndexShards(RECORDS, 16), coll, batch_size=5, shuffle=shuffle, seed=seed)
                await queue.rebind(coll, net.steps_done)
                await epoch_of(net, opt, queue, ahead)
                if grows_at == queue.epoch and coll.size < 4:
                    coll = await coll.grow()
                    continue
                if queue.epoch == EPOCHS - 1:
                    break
                queue.set_epoch(queue.epoch + 1)
            except PeerError:
                coll = await coll.shrink()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize(("shuffle", "ahead"), [(False, 0), (True, 3)])
def test_w3_each_record_is_trained_on_once_though_ranks_die_at_any_moment(
    seed: int, shuffle: Shuffle, ahead: int
) -> None:
    """The parameters are the counts. Two of four ranks are killed, also the first; one joins in the first epoch."""

    async def main(number: int) -> Any:
        module = Tally()
        with suppress(PeerError):  # of a rank that is killed while all close the world
            await train(module, seed, shuffle, ahead, 0 if seed % 2 else None)
        return module.times.detach().tolist()

    said = survivors(4, main, seed, within=2500)
    assert len(said) >= 2
    assert all(times == [[1.0] * RECORDS] * EPOCHS for times in said)


@pytest.mark.parametrize("dead", [0, 2])
def test_w3_without_steps_in_common_records_are_handed_on_and_those_that_were_told_are_not(dead: int) -> None:
    """A rank that dies has reported its used records to the first rank, unless that rank dies too."""

    async def main(number: int) -> Any:
        mine: list[int] = []
        async with aiodist.init(elastic=True) as coll:
            queue = ShardQueue(IndexShards(RECORDS, 16), coll, batch_size=4, shuffle=True)
            async with prefetch(queue, depth=2) as batches:
                for _ in range(3 + number):
                    mine += await anext(batches)
                await asyncio.sleep(1.0)  # used records are reported by now
                if number == dead:
                    given[dead] = mine
                    kill_rank()
                    await asyncio.sleep(0)
                with pytest.raises(PeerError):
                    await coll.barrier()
            coll = await coll.shrink()
            await queue.rebind(coll)
            mine += await taken(queue)
            assert await coll.allreduce(len(mine)) == RECORDS - (len(given[dead]) if dead else 0)
            return mine

    given: dict[int, list[int]] = {}
    records = [record for mine in run_ranks(3, main, elastic=(1, 3)) if mine is not None for record in mine]
    assert len(given[dead]) == 4 * (3 + dead)
    assert sorted([*records, *(given[dead] if dead else [])]) == list(range(RECORDS))


def test_w3_ranks_that_have_gone_different_ways_are_told() -> None:
    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            queue = ShardQueue(IndexShards(40, 8), coll, batch_size=4)
            queue.set_epoch(number)
            with pytest.raises(MismatchError, match=r"epoch of queue 'world/shards.*': rank 0: 0; rank 1: 1"):
                await queue.agree(0)
            assert len(await anext(aiter(queue))) == 4
            with pytest.raises(MismatchError, match="ranks disagree on the used records of queue 'world/shards"):
                await queue.rebind(coll)

    run_ranks(2, main, elastic=(1, 2))


@pytest.mark.ranks(3)
async def test_w3_a_queue_with_a_loaded_state_goes_on_from_that(coll: Communicator) -> None:
    """Also on another communicator of the same world, before and behind steps."""
    queue = ShardQueue(IndexShards(RECORDS, 16), coll, batch_size=4)
    queue.set_epoch(3)
    mine = await anext(aiter(queue))
    states = await coll.allgather_object(queue.state_dict())
    queue.load_state_dicts(states)
    await queue.rebind(await coll.dup(), 0)
    assert queue.epoch == 3
    batches = aiter(queue)
    mine += await anext(batches)
    assert await queue.agree(0) == 12
    await anext(batches)
    assert await queue.agree(1) == 12
    await queue.rebind(await coll.dup(), 1)  # that step was not made
    mine += await taken(queue)
    assert await queue.agree(1) == RECORDS - 24
    assert await queue.agree(1) == 0
    assert sorted(itertools.chain(*await coll.allgather_object(mine))) == list(range(RECORDS))
    queue.set_epoch(4)
    assert await queue.agree(2) == 0
    await queue.rebind(await coll.dup(), 2)
    assert (queue.epoch, await taken(queue)) == (3, []), "behind the last step"
    queue.set_epoch(4)
    again = await taken(queue)
    assert sorted(itertools.chain(*await coll.allgather_object(again))) == list(range(RECORDS))
