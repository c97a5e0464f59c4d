"""Data for training: the next items are prepared while this one is used, and each rank reads its own part."""

from aiodist.data.prefetch import Prefetch, Prefetched, PrefetchedStatistics, prefetch
from aiodist.data.shards import ShardSampler, shard, shard_indices

__all__ = ["Prefetch", "Prefetched", "PrefetchedStatistics", "ShardSampler", "prefetch", "shard", "shard_indices"]
