"""Data for training: prefetching of the next items, and a part of the data for each rank."""

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
