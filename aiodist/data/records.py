"""RecordIO files, and each rank's part of them.

A chunk is a header of five little-endian 32-bit numbers, the magic 0x01020304, the CRC-32 of the compressed body, the
compressor (0 none, 1 snappy, 2 gzip), the bytes of the compressed body and the number of records; then the body: of
each record its length, 32 bits, and its bytes. This is the format of github.com/wangkuiyi/recordio, of ElasticDL and
GoTorch. Snappy is its framing format, as Go's `snappy.NewBufferedWriter` writes it. Nothing is ever unpickled.
"""

from __future__ import annotations

import gzip
import importlib
import mmap
import os
import struct
import weakref
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, NoReturn, overload

from aiodist.communicator import Communicator
from aiodist.data.shard_queue import ShardQueue
from aiodist.data.shards import EpochOrder, Shuffle, check_order, checked_int
from aiodist.errors import BackendUnavailable

Compressor = Literal["none", "snappy", "gzip"]
Buffer = bytes | bytearray | memoryview
PathLike = str | os.PathLike[str]

_MAGIC = 0x01020304
_HEADER = struct.Struct("<5I")
_LENGTH = struct.Struct("<I")
_LIMIT = 1 << 31  # bytes of a body: below 2^32 also where compressing makes it larger
_READERS = 2  # what is compressed keeps both busy
_MOST_DENSE = 1100  # gzip compresses no better, and snappy far less
_NUMBERS: dict[Compressor, int] = {"none": 0, "snappy": 1, "gzip": 2}


class Chunk(NamedTuple):
    """Place and header of a chunk."""

    number: int
    offset: int  # bytes before its header
    checksum: int
    compressor: int
    nbytes: int  # of the compressed body
    records: int
    first: int  # index of its first record in the file


class RecordWriter(AbstractContextManager["RecordWriter"]):
    """Writes a new RecordIO file; a context manager. Leaving the block writes the last chunk.

    ```python
    with RecordWriter("train.rec", compressor="gzip") as writer:
        writer.write(b"any bytes, none too")
    ```
    Records are written in chunks of at most `chunk_bytes`, with 4 bytes for each length; a larger record has a chunk of
    its own. Readers decompress, check and shuffle whole chunks.

    Args:
        path: the file to write.
        compressor: "none", "snappy" or "gzip".
        chunk_bytes: bytes of a chunk, from 1 to 2^31.

    Raises:
        ValueError: for an unknown compressor, or `chunk_bytes` out of range.
        BackendUnavailable: for snappy without cramjam (`pip install aiodist[records]`).
        OSError: if the file cannot be opened.
    """

    def __init__(self, path: PathLike, *, compressor: Compressor = "none", chunk_bytes: int = 1 << 20) -> None:
        if compressor not in _NUMBERS:
            raise ValueError(f"compressor={compressor!r}: expected one of {', '.join(_NUMBERS)}")
        if not 1 <= chunk_bytes <= _LIMIT:
            raise ValueError(f"chunk_bytes={chunk_bytes}: expected from 1 to {_LIMIT}")
        if compressor == "snappy":
            _cramjam()  # raises now, and not in `flush`
        self._compressor = _NUMBERS[compressor]
        self._chunk_bytes = chunk_bytes
        self._body = bytearray()
        self._count = 0
        self._file = open(path, "wb")  # noqa: SIM115  - `close` closes it

    def write(self, record: Buffer) -> None:
        """Append `record`; raises `ValueError` when it has 2 GiB or more, or when the writer is closed."""
        nbytes = memoryview(record).nbytes
        if nbytes + _LENGTH.size > _LIMIT:
            raise ValueError(f"a record of {nbytes} bytes: expected at most {_LIMIT - _LENGTH.size}")
        if self._file.closed:
            raise ValueError(f"{self._file.name} is closed: write records inside the `with` block")
        if len(self._body) + _LENGTH.size + nbytes > self._chunk_bytes:
            self.flush()
        self._body += _LENGTH.pack(nbytes) + memoryview(record).tobytes()  # both, or an error and none
        self._count += 1

    def flush(self) -> None:
        """Write the records so far as a chunk, if there are any."""
        if self._count:
            body = _compressed(self._body, self._compressor)
            self._file.write(_HEADER.pack(_MAGIC, zlib.crc32(body), self._compressor, len(body), self._count))
            self._file.write(body)
            self._body, self._count = bytearray(), 0
        self._file.flush()

    def close(self) -> None:
        """Write the last chunk and close the file."""
        if not self._file.closed:
            with self._file:
                self.flush()

    def __exit__(self, *_: object) -> None:
        self.close()


class RecordFile(AbstractContextManager["RecordFile"]):
    """The records of a RecordIO file, by index and in order: a map-style dataset for torch's `DataLoader` too.

    `len(file)`, `file[i]`, `list(file)`, `file.read(start, stop)`. Opening reads all headers, one small read for each
    chunk; `chunks` is that index. A file of no bytes has no records. Any thread or forked process may read; pickling
    opens the file again.

    Raises `ValueError`, with the file, the chunk and the first byte of its header: at opening for a foreign or
    truncated file, and at reading for a damaged chunk (checksum, lengths or number of records). Reading all records
    finds any changed byte.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = os.fspath(path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._fd)
        """Closes the file, which happens too when nothing refers to this object any more."""
        self._last: tuple[int, list[bytes]] = (-1, [])
        self.chunks: Sequence[Chunk] = self._scan()
        self._firsts = [chunk.first for chunk in self.chunks]

    def _scan(self) -> list[Chunk]:
        # Else the kernel reads ahead of each header, of late also where it is only asked what is in memory.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        size = os.fstat(self._fd).st_size
        chunks: list[Chunk] = []
        offset = first = 0
        while offset < size:
            header = self._header(offset)
            chunk = Chunk(len(chunks), offset, 0, 0, 0, 0, first)
            other = f", or chunk {chunks[-1].number} at byte {chunks[-1].offset} has a wrong size" if chunks else ""
            if len(header) < _HEADER.size:
                seen = f"a header of {len(header)} bytes: expected {_HEADER.size}"
                self._fail(chunk, f"{seen}; the file is truncated{other}")
            magic, checksum, compressor, nbytes, count = _HEADER.unpack(header)
            if magic != _MAGIC:
                seen = f"it begins with {magic:#010x}: expected {_MAGIC:#010x}"
                self._fail(chunk, f"{seen}; it is damaged{other}" if chunks else f"{seen}, as in a RecordIO file")
            if compressor not in _NUMBERS.values():
                self._fail(chunk, f"compressor {compressor}: expected 0 (none), 1 (snappy) or 2 (gzip)")
            if not 0 < count * _LENGTH.size <= nbytes * (_MOST_DENSE if compressor else 1):
                self._fail(chunk, f"{count} records in {nbytes} bytes: expected at least one, each with its length")
            offset += _HEADER.size + nbytes
            if offset > size:
                self._fail(chunk, f"it ends at byte {offset} of {size}; the file is truncated, or its header damaged")
            chunks.append(Chunk(chunk.number, chunk.offset, checksum, compressor, nbytes, count, first))
            first += count
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_NORMAL)
        return chunks

    def _header(self, offset: int) -> bytes:
        """Return the bytes of a header, and leave no page of the file in memory that was not there before.

        Pages here and there would keep the kernel from reading the chunks ahead in large pieces: a third of the speed.
        """
        with suppress(OSError):  # nothing of it is in memory, as a rule, or this file system cannot tell
            header = bytearray(_HEADER.size)
            if os.preadv(self._fd, [header], offset, os.RWF_NOWAIT) == _HEADER.size:
                return bytes(header)
        found = os.pread(self._fd, _HEADER.size, offset)
        page = offset - offset % mmap.PAGESIZE
        os.posix_fadvise(self._fd, page, offset + _HEADER.size + mmap.PAGESIZE - page, os.POSIX_FADV_DONTNEED)
        return found

    def _fail(self, chunk: Chunk, what: str, cause: Exception | None = None) -> NoReturn:
        raise ValueError(f"{self.path}: chunk {chunk.number} at byte {chunk.offset}: {what}") from cause

    def chunk(self, number: int) -> list[bytes]:
        """Return the records of a chunk, read, checked and decompressed without the GIL."""
        chunk = self.chunks[number]
        if not self.close.alive:  # the number of its descriptor may be another file's
            raise ValueError(f"{self.path} is closed: read records inside the `with` block")
        start, body = chunk.offset + _HEADER.size, b""
        while len(body) < chunk.nbytes and (more := os.pread(self._fd, chunk.nbytes - len(body), start + len(body))):
            body += more
        if len(body) < chunk.nbytes:
            self._fail(chunk, f"{len(body)} bytes of {chunk.nbytes}; the file was truncated")
        if (found := zlib.crc32(body)) != chunk.checksum:
            self._fail(chunk, f"CRC-32 {found:#010x}: expected {chunk.checksum:#010x}; it is damaged")
        try:
            return _split(_decompressed(body, chunk.compressor), chunk.records)
        except ValueError as error:
            self._fail(chunk, f"{error}; it is damaged", error)

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Yield the records from `start` to before `stop`, by default all; only their chunks are read.

        The next two are read in threads meanwhile. Raises `IndexError` unless 0 <= start <= stop <= len(self).
        """
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"records {start} to {stop} of {len(self)}: expected 0 <= start <= stop <= {len(self)}")
        numbers = range(self._place(start)[0], self._place(stop - 1)[0] + 1) if start < stop else range(0)
        return self._read(start, stop, numbers)

    def _read(self, start: int, stop: int, numbers: range) -> Iterator[bytes]:
        for number, found in zip(numbers, read_ahead((self, number) for number in numbers), strict=True):
            first = self._firsts[number]
            yield from found[max(start - first, 0) : stop - first]

    def __iter__(self) -> Iterator[bytes]:
        return self.read()

    def __len__(self) -> int:
        return self.chunks[-1].first + self.chunks[-1].records if self.chunks else 0

    def __getitem__(self, index: int) -> bytes:
        """Return a record, and keep its chunk for the next call. Raises `IndexError` outside the file."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[bytes]:
        """Return the records at `indices`, in that order, each of their chunks read once: as `DataLoader` asks."""
        places = [self._place(index) for index in indices]
        last = {self._last[0]: self._last[1]}
        found = {number: last.get(number) or self.chunk(number) for number in dict.fromkeys(n for n, _ in places)}
        if places:
            self._last = (places[-1][0], found[places[-1][0]])
        return [found[number][at] for number, at in places]

    def _place(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of {len(self)} in {self.path}")
        index %= len(self)
        number = bisect_right(self._firsts, index) - 1
        return number, index - self._firsts[number]

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[RecordFile], tuple[str]]:
        return RecordFile, (self.path,)

    def __repr__(self) -> str:
        return f"<RecordFile {self.path!r}: {len(self)} records in {len(self.chunks)} chunks>"


def read_ahead(chunks: Iterable[tuple[RecordFile, int]]) -> Iterator[list[bytes]]:
    """Yield the records of each chunk; threads read the next two while the caller uses this one."""
    ahead: deque[Future[list[bytes]]] = deque()
    with ThreadPoolExecutor(_READERS, "aiodist-records") as readers:
        try:
            for file, number in chunks:
                ahead.append(readers.submit(file.chunk, number))
                if len(ahead) > _READERS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for unused in ahead:
                unused.cancel()


def _split(body: bytes, count: int) -> list[bytes]:
    """Return the records of a body; raise ValueError unless they are `count` and fill it."""
    records: list[bytes] = []
    unpack, append = _LENGTH.unpack_from, records.append  # many records are short
    at = 0
    with suppress(struct.error):  # the body ends within a length
        for _ in range(count):
            start = at + 4
            at = start + unpack(body, at)[0]
            append(body[start:at])
    if len(records) != count or at != len(body):
        raise ValueError(f"{count} records do not fill a body of {len(body)} bytes exactly")
    return records


def _compressed(body: bytearray, compressor: int) -> Buffer:
    if compressor == 1:
        return memoryview(_cramjam().snappy.compress(body))
    return gzip.compress(body, 6, mtime=0) if compressor == 2 else body


def _decompressed(body: bytes, compressor: int) -> bytes:
    """Return what was compressed; raise ValueError where the compressor cannot read it."""
    if compressor == 1:
        cramjam = _cramjam()
        try:
            return bytes(cramjam.snappy.decompress(body))
        except cramjam.DecompressionError as error:
            raise ValueError(f"snappy cannot read it ({error})") from error
    try:
        return gzip.decompress(body) if compressor == 2 else body
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"gzip cannot read it ({error})") from error


def _cramjam() -> Any:  # noqa: ANN401
    try:
        return importlib.import_module("cramjam")
    except ImportError as error:
        raise BackendUnavailable("snappy needs cramjam: pip install 'aiodist[records]'") from error


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
    `ValueError` of a damaged chunk. Cost: about 0.3 us a record in addition to reading, checking and decompressing.
    """
    if wait and not dynamic:
        raise ValueError("wait=True: expected dynamic=True too, since ranks with fixed parts wait for no records")
    check_order(batch_size, shuffle, seed)
    files = [RecordFile(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if dynamic:
        return ShardQueue(RecordShards(files), coll, batch_size=batch_size, shuffle=shuffle, seed=seed, wait=wait)
    return Records(files, coll.rank, coll.size, batch_size, shuffle, seed)


class Records:
    """This rank's records, as `records` returns them: each iteration is one pass, in the order of the epoch."""

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
        """The epoch; with the seed it determines the order."""

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch`, at least 0, from the next iteration on; every rank must set the same epoch."""
        self.epoch = checked_int("epoch", epoch)

    def __iter__(self) -> Iterator[Any]:
        each = chain.from_iterable(self._parts())
        if self._batch_size is None:
            return each
        return iter(lambda: list(islice(each, self._batch_size)), [])

    def __len__(self) -> int:
        """Return the number of batches of this rank, or of records without `batch_size`."""
        return -(-(self._stop - self._start) // (self._batch_size or 1))

    def _parts(self) -> Iterator[list[bytes]]:
        order = EpochOrder(self._shards.sizes, self._shuffle, self._seed, self.epoch)
        mine = list(order.parts(self._start, self._stop))
        found = read_ahead(self._shards.chunks[part.shard] for part in mine)
        for part, read in zip(mine, found, strict=True):
            yield _picked(read, part.within)


class RecordShards:
    """The chunks of RecordIO files; those that were read last are kept, since a rank may be handed more of them."""

    threads = 2
    """Number of threads that read, each other chunks; checksums keep both busy."""

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
