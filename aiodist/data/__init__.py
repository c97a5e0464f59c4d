"""Data for training: the next items are prepared while this one is used, and each rank reads its own part."""

from aiodist.data.prefetch import Prefetch, Prefetched, PrefetchedStatistics, prefetch
from aiodist.data.records import Chunk, RecordFile, Records, RecordWriter, records
from aiodist.data.shard_queue import ShardQueue
from aiodist.data.shards import IndexShards, Shards, ShardSampler, shard, shard_indices

__all__ = [
    "Chunk",
    "IndexShards",
    "Prefetch",
    "Prefetched",
    "PrefetchedStatistics",
    "RecordFile",
    "RecordWriter",
    "Records",
    "ShardQueue",
    "ShardSampler",
    "Shards",
    "prefetch",
    "records",
    "shard",
    "shard_indices",
]
