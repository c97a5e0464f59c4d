"""The order of one epoch: shards one after another, shuffled by seed and epoch where that is wanted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

Shuffle = bool | Literal["shards"]
"""True: the shards and the records within each. "shards": the shards alone. False: nothing."""


class Part(NamedTuple):
    """Records of one shard, by their places in it."""

    shard: int
    within: Sequence[int]


class EpochOrder:
    """The order of all records in one epoch, the same on every rank: position 0, 1, ... up to the number of records.

    `sizes` are the numbers of records of each shard. Cost: one permutation of the shards; the records of a shard are
    permuted when a part of it is asked for.
    """

    def __init__(self, sizes: Sequence[int], shuffle: Shuffle, seed: int, epoch: int) -> None:
        self._sizes = sizes
        self._seeds = [seed, epoch]
        self._shuffles_within = shuffle is True
        self._shards: Sequence[int] = range(len(sizes))
        if shuffle:
            self._shards = np.random.default_rng(self._seeds).permutation(len(sizes)).tolist()
        self.ends = list(accumulate(sizes[shard] for shard in self._shards))
        """Positions behind the last record of each shard, in the order of the epoch."""

    def parts(self, start: int, stop: int) -> Iterator[Part]:
        """Yield what lies at the positions from `start` to before `stop`, shard by shard."""
        at = bisect_right(self.ends, start)
        while start < stop:
            shard = self._shards[at]
            first = self.ends[at] - self._sizes[shard]
            if start < (end := min(stop, self.ends[at])):
                yield Part(shard, self._within(shard)[start - first : end - first])
            start, at = end, at + 1

    def _within(self, shard: int) -> Sequence[int]:
        size = self._sizes[shard]
        if not self._shuffles_within:
            return range(size)
        places: list[int] = np.random.default_rng([*self._seeds, shard]).permutation(size).tolist()
        return places


def check_shuffle(shuffle: Shuffle) -> None:
    """Raise `ValueError` unless `shuffle` is one of the three."""
    if shuffle not in (True, False, "shards"):
        raise ValueError(f"shuffle={shuffle!r}: expected True, False or 'shards'")
