"""Data for training: the next items are prepared while this one is used, and each rank reads its own part."""

from aiodist.data.prefetch import Prefetch, Prefetched, PrefetchedStatistics, prefetch
from aiodist.data.recordio import Chunk, RecordFile, RecordWriter
from aiodist.data.records import Records, records
from aiodist.data.shards import ShardSampler, shard, shard_indices

__all__ = [
    "Chunk",
    "Prefetch",
    "Prefetched",
    "PrefetchedStatistics",
    "RecordFile",
    "RecordWriter",
    "Records",
    "ShardSampler",
    "prefetch",
    "records",
    "shard",
    "shard_indices",
]
