"""`records`: each rank's part of the records of RecordIO files, epoch after epoch, for `prefetch`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Literal, overload

from aiodist.communicator import Communicator
from aiodist.data.order import EpochOrder, Shuffle, check_shuffle
from aiodist.data.recordio import PathLike, RecordFile, read_ahead
from aiodist.data.shard_queue import ShardQueue
from aiodist.data.shards import check_batch_size, check_natural


@overload
def records(
    paths: PathLike | Sequence[PathLike],
    coll: Communicator,
    *,
    batch_size: int | None = None,
    shuffle: Shuffle = False,
    seed: int = 0,
    dynamic: Literal[False] = False,
) -> Records: ...


@overload
def records(
    paths: PathLike | Sequence[PathLike],
    coll: Communicator,
    *,
    batch_size: int | None = None,
    shuffle: Shuffle = False,
    seed: int = 0,
    dynamic: Literal[True],
    wait: bool = False,
) -> ShardQueue[bytes]: ...


def records(
    paths: PathLike | Sequence[PathLike],
    coll: Communicator,
    *,
    batch_size: int | None = None,
    shuffle: Shuffle = False,
    seed: int = 0,
    dynamic: bool = False,
    wait: bool = False,
) -> Records | ShardQueue[bytes]:
    """Return `Records`, this rank's part of the records of one RecordIO file or several, in batches: lists of `bytes`.

    ```python
    batches = data.records("train.rec", coll, batch_size=32, shuffle=True)
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        async with data.prefetch(batches, transform=decode) as prepared:
            async for x, y in prepared: ...
    ```
    Without `batch_size` it gives single records. Each record belongs to exactly one rank; one rank has at most one
    record more than another, so a last batch may be short, or missing: that is for `net.join()`. A rank reads the
    chunks of its part only, which is contiguous, and checks them; the next two are read in threads meanwhile.

    With `dynamic=True` it returns a `ShardQueue` over the chunks: ranks take the next records when they have used up
    theirs, so a slow rank takes fewer. `wait` is an argument of that.

    With `shuffle` all ranks share the order of the chunks and of the records within each that `seed` and the epoch
    give, a new one for each epoch; with `shuffle="shards"` that of the chunks alone. The records of a batch then come
    from few chunks: write the file in another order than that of its labels, in chunks of many batches or of less than
    one.

    Raises `ValueError` for a wrong argument, what opening a `RecordFile` raises, and while it is iterated over the
    `ValueError` of a damaged chunk. Cost: about 0.3 us a record beside reading, checking and decompressing.
    """
    if wait and not dynamic:
        raise ValueError(
            "wait=True: expected dynamic=True beside it, since ranks with fixed parts have nothing to wait for"
        )
    check_batch_size(batch_size)
    check_natural("seed", seed)
    check_shuffle(shuffle)
    files = [RecordFile(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if dynamic:
        return ShardQueue(RecordShards(files), coll, batch_size=batch_size, shuffle=shuffle, seed=seed, wait=wait)
    return Records(files, coll.rank, coll.size, batch_size, shuffle, seed)


class Records:
    """What `records` returns: each iteration is one pass over this rank's part, as of `set_epoch`."""

    def __init__(
        self, files: Sequence[RecordFile], rank: int, size: int, batch_size: int | None, shuffle: Shuffle, seed: int
    ) -> None:
        self._shards = RecordShards(files)
        total = sum(map(len, files))
        self._start = rank * (total // size) + min(rank, total % size)
        self._stop = self._start + total // size + (rank < total % size)
        self._batch_size = batch_size
        self._shuffle: Shuffle = shuffle
        self._seed = seed
        self.epoch = 0
        """Chooses the order, together with the seed."""

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as for `epoch`, at least 0, from the next iteration on; every rank must say the same."""
        check_natural("epoch", epoch)
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        each = chain.from_iterable(self._parts())
        if self._batch_size is None:
            return each
        return iter(lambda: list(islice(each, self._batch_size)), [])

    def __len__(self) -> int:
        """Return how many batches this rank has, or records where there are no batches."""
        return -(-(self._stop - self._start) // (self._batch_size or 1))

    def _parts(self) -> Iterator[list[bytes]]:
        """Yield of each chunk what is this rank's."""
        order = EpochOrder(self._shards.sizes, self._shuffle, self._seed, self.epoch)
        mine = list(order.parts(self._start, self._stop))
        found = read_ahead(self._shards.chunks[part.shard] for part in mine)
        for part, read in zip(mine, found, strict=True):
            yield _picked(read, part.within)


class RecordShards:
    """The chunks of RecordIO files; those that were read last are kept, since a rank may be handed more of them."""

    threads = 2
    """So many may read, each other chunks: the checksums keep both busy."""

    def __init__(self, files: Sequence[RecordFile]) -> None:
        self.chunks = chunks = [(file, chunk.number) for file in files for chunk in file.chunks]
        self.sizes = [chunk.records for file in files for chunk in file.chunks]
        """How many records each chunk has."""

        @lru_cache(self.threads)
        def read(shard: int) -> list[bytes]:  # no method: its memory goes with the last reference to these shards
            file, number = chunks[shard]
            return file.chunk(number)

        self._read = read

    def read(self, shard: int, within: Sequence[int], /) -> list[bytes]:
        """Return the records at these places of a chunk, which is read and checked as a whole."""
        return _picked(self._read(shard), within)


def _picked(records: list[bytes], within: Sequence[int]) -> list[bytes]:
    """Return the records at these places; a range of them is one slice."""
    if isinstance(within, range):
        return records[within.start : within.stop]
    return [records[place] for place in within]
