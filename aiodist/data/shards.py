"""Shards, the order of an epoch, and each rank's fixed part.

Rank r has the items r, r + size, r + 2 size, and so on. So the k-th batches of all ranks together are the k-th batch
of one process, `size` times as large, and an iterable needs no length. Every item belongs to exactly one rank; one rank
has at most one item more than another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import accumulate, islice
from operator import index
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from aiodist.communicator import Communicator

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
        """End position of each shard, in the order of the epoch."""

    def parts(self, start: int, stop: int) -> Iterator[Part]:
        """Yield the parts of shards at the positions from `start` to before `stop`."""
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


T = TypeVar("T")


def shard_indices(length: int, rank: int, size: int) -> range:
    """Return the indices of `rank` among `length` items; raise `ValueError` unless 0 <= rank < size.

    Examples:
        >>> [list(shard_indices(7, rank, 3)) for rank in range(3)]
        [[0, 3, 6], [1, 4], [2, 5]]
    """
    _check(rank, size)
    return range(rank, length, size)


def shard(items: Iterable[T], rank: int, size: int) -> Iterator[T]:
    """Return the items of `rank`; raise `ValueError` unless 0 <= rank < size.

    For iterables without an index: every rank reads all items, and skips those of the others.

    Examples:
        >>> list(shard("abcdefg", rank=1, size=3))
        ['b', 'e']
    """
    _check(rank, size)
    return islice(items, rank, None, size)


class ShardSampler(Sampler[int]):
    """The indices of this rank, for a `DataLoader`; each index belongs to one rank.

    Unlike torch's `DistributedSampler` it repeats no item, so sums over the ranks are sums over the data.

    Args:
        data: the dataset, or its length.
        coll: the communicator; its rank and size choose the indices.
        shuffle: True permutes the indices, alike on all ranks, differently in each epoch.
        seed: chooses the permutation, together with the epoch; the same on every rank.
        drop_last: True skips the last `length % size` indices, so all ranks have equally many. Otherwise some ranks
            have one more, for which `net.join()` is there.

    Raises:
        ValueError: on a rank outside of `coll`, or for a `seed` below 0.

    Example:
        ```python
        sampler = ShardSampler(dataset, coll, shuffle=True)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            ...
        ```
    """

    def __init__(
        self, data: Sized | int, coll: Communicator, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> None:
        rank, size = coll.rank, coll.size
        _check(rank, size)
        self._seed = checked_int("seed", seed)
        self._length = _length_of(data)
        self._kept = self._length - self._length % size if drop_last else self._length
        self._rank = rank
        self._size = size
        self._shuffle = shuffle
        self.epoch = 0
        """Chooses the permutation, together with `seed`."""

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for `epoch`, at least 0, from the next iteration; every rank gives the same number."""
        self.epoch = checked_int("epoch", epoch)

    def __iter__(self) -> Iterator[int]:
        mine = shard_indices(self._kept, self._rank, self._size)
        if not self._shuffle:
            return iter(mine)
        order = np.random.default_rng([self._seed, self.epoch]).permutation(self._length)
        return iter(order[mine.start : mine.stop : mine.step].tolist())

    def __len__(self) -> int:
        return len(shard_indices(self._kept, self._rank, self._size))


class Shards(Protocol[T]):
    """Data in shards, whose records a queue hands out: chunks of files, ranges of indices, row groups."""

    @property
    def sizes(self) -> Sequence[int]:
        """How many records each shard has; the same on every rank."""

    def read(self, shard: int, within: Sequence[int], /) -> list[T]:
        """Return the records at these places of a shard, in that order (on a thread of the queue).

        With an attribute `threads`, that number of threads calls it at the same time, each for other shards.
        """


class IndexShards:
    """The indices of a dataset, in shards of `shard_size` that follow one another; the last may be shorter.

    `data` is the dataset or its length. Raises `ValueError` for a length below 0 or a `shard_size` below 1.

    >>> shards = IndexShards(10, 4)
    >>> shards.sizes, shards.read(2, [1, 0])
    ([4, 4, 2], [9, 8])
    """

    def __init__(self, data: Sized | int, shard_size: int = 64) -> None:
        length = _length_of(data)
        self._shard_size = shard_size = checked_int("shard_size", shard_size, 1)
        self.sizes = [min(shard_size, length - first) for first in range(0, length, shard_size)]
        """How many indices each shard has."""

    def read(self, shard: int, within: Sequence[int], /) -> list[int]:
        """Return the indices at these places of a shard."""
        first = shard * self._shard_size
        return [first + place for place in within]


def _length_of(data: Sized | int) -> int:
    """Return the number of items of a dataset, or the number itself; raise ValueError for a number below 0."""
    length = data if isinstance(data, int) else len(data)
    if length < 0:
        raise ValueError(f"data={data}: expected a dataset, or how many items it has")
    return length


def _check(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank}, size={size}: expected 0 <= rank < size")


def checked_int(name: str, number: int, least: int = 0) -> int:
    """Return `number`, which may be of numpy, as a Python int, which can be sent to other ranks."""
    try:
        found = int(index(number))
    except TypeError:
        raise TypeError(f"{name}={number!r}: expected an integer, at least {least}") from None
    if found < least:
        raise ValueError(f"{name}={found}: expected at least {least}")
    return found


def check_order(batch_size: int | None, shuffle: Shuffle, seed: int) -> None:
    """Raise ValueError or TypeError for arguments that give no order of batches."""
    if batch_size is not None:
        checked_int("batch_size", batch_size, 1)
    checked_int("seed", seed)
    if shuffle not in (True, False, "shards"):
        raise ValueError(f"shuffle={shuffle!r}: expected True, False or 'shards'")
