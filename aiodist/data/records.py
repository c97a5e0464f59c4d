"""`records`: each rank's part of the records of RecordIO files, epoch after epoch, for `prefetch`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from aiodist.communicator import Communicator
from aiodist.data.recordio import PathLike, RecordFile, read_ahead
from aiodist.data.shards import check_natural


def records(
    paths: PathLike | Sequence[PathLike],
    coll: Communicator,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
) -> Records:
    """Return this rank's part of the records of one RecordIO file or several, in batches: lists of `bytes`.

    ```python
    batches = data.records("train.rec", coll, batch_size=32, shuffle=True)
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        async with data.prefetch(batches, transform=decode) as prepared:
            async for x, y in prepared: ...
    ```
    Without `batch_size` it gives single records. Each record belongs to exactly one rank; one rank has at most one
    record more than another, so a last batch may be short, or missing: that is for `net.join()`. A rank reads the
    chunks of its part only, which is contiguous, and checks them; the next chunk is read in a thread meanwhile.

    With `shuffle` all ranks share the order of the chunks and of the records within each that `seed` and the epoch
    give, a new one for each epoch. The records of a batch then come from few chunks: write the file in another order
    than that of its labels, in chunks of many batches or of less than one.

    Raises `ValueError` for a wrong argument, what opening a `RecordFile` raises, and while it is iterated over the
    `ValueError` of a damaged chunk. Cost: about 0.3 us a record beside reading, checking and decompressing.
    """
    paths = [paths] if isinstance(paths, str | os.PathLike) else paths
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: expected at least 1, or None")
    check_natural("seed", seed)
    return Records([RecordFile(path) for path in paths], coll.rank, coll.size, batch_size, seed if shuffle else None)


class Records:
    """What `records` returns: each iteration is one pass over this rank's part, as of `set_epoch`."""

    def __init__(
        self, files: Sequence[RecordFile], rank: int, size: int, batch_size: int | None, seed: int | None
    ) -> None:
        self._chunks = [(file, chunk) for file in files for chunk in file.chunks]
        total = sum(map(len, files))
        self._start = rank * (total // size) + min(rank, total % size)
        self._stop = self._start + total // size + (rank < total % size)
        self._batch_size = batch_size
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
        order: Sequence[int] = range(len(self._chunks))
        if self._seed is not None:
            order = np.random.default_rng([self._seed, self.epoch]).permutation(len(self._chunks)).tolist()
        mine = []
        first = 0
        for number in order:
            count = self._chunks[number][1].records
            start, stop = max(self._start - first, 0), min(self._stop - first, count)
            if start < stop:
                mine.append((number, slice(start, stop)))
            first += count
        found = read_ahead((file, chunk.number) for file, chunk in (self._chunks[number] for number, _ in mine))
        for (number, part), read in zip(mine, found, strict=True):
            if self._seed is None:
                yield read[part]
            else:
                within = np.random.default_rng([self._seed, self.epoch, number]).permutation(len(read))
                yield [read[at] for at in within[part].tolist()]
