"""Data in shards, as a queue hands it out, and the indices of a dataset as such."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Protocol, TypeVar

T = TypeVar("T")


class Shards(Protocol[T]):
    """Data in shards, of which a queue hands out records: chunks of files, ranges of indices, row groups."""

    @property
    def sizes(self) -> Sequence[int]:
        """How many records each shard has; the same on every rank."""

    def read(self, shard: int, within: Sequence[int], /) -> list[T]:
        """Return the records at these places of a shard, in that order; called on one thread of the queue's.

        Where there is an attribute `threads`, so many threads call it at a time, each for other shards.
        """


class IndexShards:
    """The indices of a dataset, in shards of `shard_size` that follow one another; the last may be shorter.

    `data` is the dataset or its length. Raises `ValueError` for a length below 0 or a `shard_size` below 1.

    >>> shards = IndexShards(10, 4)
    >>> shards.sizes, shards.read(2, [1, 0])
    ([4, 4, 2], [9, 8])
    """

    def __init__(self, data: Sized | int, shard_size: int = 64) -> None:
        length = data if isinstance(data, int) else len(data)
        if length < 0:
            raise ValueError(f"data={data}: expected a dataset, or how many items it has")
        if shard_size < 1:
            raise ValueError(f"shard_size={shard_size}: expected at least 1")
        self._shard_size = shard_size
        self.sizes = [min(shard_size, length - first) for first in range(0, length, shard_size)]
        """How many indices each shard has."""

    def read(self, shard: int, within: Sequence[int], /) -> list[int]:
        """Return the indices at these places of a shard."""
        first = shard * self._shard_size
        return [first + place for place in within]
