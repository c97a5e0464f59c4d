"""A RecordIO file read, checked and cut into records, and plain reads of the same file, each time from the disk.

The file is a temporary file (`TMPDIR`), whose pages leave the kernel's cache before each read.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING

from aiodist.data import RecordFile, RecordWriter, prefetch, records

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session
    from aiodist.communicator import Communicator

__all__ = ["measure"]

NBYTES = 256 << 20
_RECORD = 10_000
"""Bytes of a record, on average: a compressed picture."""
_ROUNDS = 9
_BATCH = 32

Way = Callable[[Path, "Communicator"], Awaitable[int]]


async def _records(path: Path, _: Communicator) -> int:
    with RecordFile(path) as file:
        return sum(map(len, file))


async def _queue(path: Path, coll: Communicator) -> int:
    total = 0
    async with prefetch(records(path, coll, batch_size=_BATCH, dynamic=True)) as batches:
        async for batch in batches:
            total += sum(map(len, batch))
    return total


async def _plain(path: Path, _: Communicator) -> int:
    total = 0
    room = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(room):
            total += got
    return total


_WAYS: dict[str, Way] = {"records": _records, "queue": _queue, "plain": _plain}


def _write(path: Path, rank: int) -> None:
    random = Random(rank)
    noise = random.randbytes(1 << 22)
    with RecordWriter(path) as writer:
        left = NBYTES
        while left > 0:
            count = random.randrange(_RECORD // 2, _RECORD * 3 // 2)
            first = random.randrange(len(noise) - count)
            writer.write(noise[first : first + count])
            left -= count


def _forget(path: Path) -> None:
    """Write the file's pages to the disk, and drop them from memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def measure(session: Session) -> list[Record]:
    """Measure all readers in turns; each rank reads its own file, alone in its queue."""
    names = [*session.impls, *session.plan.peers]
    times: dict[str, list[float]] = {name: [] for name in names}
    alone = await session.coll.split(session.coll.rank)
    with TemporaryDirectory() as folder:
        path = Path(folder, "reading.rec")
        _write(path, session.coll.rank)
        for turn in range(1 + (session.plan.repeat or _ROUNDS)):
            for name in names:
                _forget(path)
                await session.fence()
                began = perf_counter()
                await _WAYS[name](path, alone)
                if turn:
                    times[name].append(perf_counter() - began)
        with RecordFile(path) as file:
            nbytes = sum(chunk.nbytes for chunk in file.chunks)
    prefixed = {name if name == "plain" else f"aiodist:{name}": found for name, found in times.items()}
    return await session.timed("reading", nbytes, prefixed)
