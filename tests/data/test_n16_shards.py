"""N16: static shards, each rank's part by (rank, size) alone."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from aiodist import Communicator
from aiodist.data import ShardSampler, prefetch, shard, shard_indices
from tests.support.place import place

lengths = st.integers(0, 500)
sizes = st.integers(1, 37)


@given(lengths, sizes)
def test_n16_each_index_belongs_to_one_rank_and_ranks_differ_by_one_at_most(length: int, size: int) -> None:
    shards = [list(shard_indices(length, rank, size)) for rank in range(size)]
    assert sorted(itertools.chain(*shards)) == list(range(length))
    counts = [len(mine) for mine in shards]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)  # the first ranks have one more
    assert [list(shard(range(length), rank, size)) for rank in range(size)] == shards


@given(lengths, sizes, st.integers(1, 8))
def test_n16_the_batches_of_all_ranks_are_one_process_s_batch(length: int, size: int, batch: int) -> None:
    shards = [shard_indices(length, rank, size) for rank in range(size)]
    for k in range(-(-length // (batch * size))):
        together = sorted(i for mine in shards for i in mine[k * batch : (k + 1) * batch])
        assert together == list(range(k * batch * size, min(length, (k + 1) * batch * size)))


@given(lengths, sizes, st.booleans(), st.booleans(), st.integers(0, 2**32), st.integers(0, 100))
def test_n16_the_sampler_covers_the_data(
    length: int, size: int, shuffle: bool, drop_last: bool, seed: int, epoch: int
) -> None:
    places = [place(rank, size) for rank in range(size)]
    samplers = [ShardSampler(length, each, shuffle=shuffle, seed=seed, drop_last=drop_last) for each in places]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    shards = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(mine) for mine in shards]
    indices = list(itertools.chain(*shards))
    assert all(type(index) is int for index in indices)
    assert len(set(indices)) == len(indices)
    if drop_last:
        assert {len(mine) for mine in shards} == {length // size}
        assert set(indices) <= set(range(length))
    else:
        assert sorted(indices) == list(range(length))
    if not shuffle:
        assert shards == [list(shard_indices(len(indices), rank, size)) for rank in range(size)]


def test_n16_the_permutation_comes_from_seed_and_epoch() -> None:
    def order(seed: int, epoch: int, size: int = 1) -> list[int]:
        """The order of all ranks together."""
        samplers = [ShardSampler(100, place(rank, size), shuffle=True, seed=seed) for rank in range(size)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        rows = itertools.zip_longest(*samplers)
        return [index for row in rows for index in row if index is not None]

    orders = {(seed, epoch): order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert all(sorted(found) == list(range(100)) for found in orders.values())
    assert len({tuple(found) for found in orders.values()}) == 9  # (0, 1) and (1, 0) differ too
    assert order(1, 2) == orders[1, 2]
    assert order(1, 2, size=3) == orders[1, 2]  # for any number of ranks
    sampler = ShardSampler(100, place(0, 1), shuffle=True)
    assert list(sampler) == list(sampler) == orders[0, 0]


def test_n16_what_drop_last_leaves_out_changes_with_the_epoch() -> None:
    samplers = [ShardSampler(10, place(rank, 4), shuffle=True, drop_last=True) for rank in range(4)]
    seen: set[int] = set()
    for epoch in range(10):
        for sampler in samplers:
            sampler.set_epoch(epoch)
            seen |= set(sampler)
    assert seen == set(range(10))


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0), (0, -1)])
def test_n16_a_rank_outside_is_told(rank: int, size: int) -> None:
    for call in (
        lambda: shard_indices(5, rank, size),
        lambda: shard([1], rank, size),
        lambda: ShardSampler(5, place(rank, size)),
    ):
        with pytest.raises(ValueError, match=f"rank={rank}, size={size}"):
            call()


def test_n16_other_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="seed=-1"):
        ShardSampler(5, place(0, 1), seed=-1)
    with pytest.raises(ValueError, match="data=-5"):
        ShardSampler(-5, place(0, 1))
    with pytest.raises(ValueError, match="epoch=-1"):
        ShardSampler(5, place(0, 1)).set_epoch(-1)


def test_n16_shard_reads_no_further_than_it_must() -> None:
    counter = itertools.count()
    mine = shard(counter, 1, 3)
    assert list(itertools.islice(mine, 3)) == [1, 4, 7]
    assert next(counter) == 8


@pytest.mark.ranks(1, 3)
async def test_n16_a_data_loader_over_shards(coll: Communicator) -> None:
    data = TensorDataset(torch.arange(11))
    sampler = ShardSampler(data, coll, shuffle=True, seed=3)
    assert list(pickle.loads(pickle.dumps(sampler))) == list(sampler)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    seen = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        mine: list[int] = []
        async with prefetch(loader) as batches:
            async for (batch,) in batches:
                mine += batch.tolist()
        everybody = await coll.allgather_object(mine)
        assert sorted(itertools.chain(*everybody)) == list(range(11))
        seen.append(mine)
    assert seen[0] != seen[1]
