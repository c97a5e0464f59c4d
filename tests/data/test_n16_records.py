"""N16: RecordIO files, written and read, damaged and cut, and each rank's part of them."""

from __future__ import annotations

import ctypes
import gzip
import itertools
import mmap
import os
import pickle
import random
import struct
import sys
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
from torch.utils.data import DataLoader

from aiodist import Communicator
from aiodist.data import RecordFile, RecordWriter, ShardSampler, prefetch, records
from aiodist.errors import BackendUnavailable
from tests.support.place import place

Compressor = Literal["none", "snappy", "gzip"]
COMPRESSORS: tuple[Compressor, ...] = get_args(Compressor)
each_compressor = pytest.mark.parametrize("compressor", COMPRESSORS)


def make(lengths: list[int], seed: int = 0) -> list[bytes]:
    """Distinct records; half of these compress."""
    rng = random.Random(seed)
    return [rng.randbytes(n) if n % 2 else bytes([rng.randrange(256)]) * n for n in lengths]


def written(path: Path, items: list[bytes], compressor: Compressor = "none", chunk_bytes: int = 1 << 20) -> Path:
    with RecordWriter(path, compressor=compressor, chunk_bytes=chunk_bytes) as writer:
        for item in items:
            writer.write(item)
    return path


@each_compressor
@pytest.mark.parametrize("chunk_bytes", [1, 5000, 1 << 20, 1 << 31])
def test_n16_two_thousand_records_come_back(tmp_path: Path, compressor: Compressor, chunk_bytes: int) -> None:
    items = make(list(range(2000)))
    with RecordFile(written(tmp_path / "a", items, compressor, chunk_bytes)) as file:
        assert len(file) == 2000
        assert list(file) == items
        assert all(type(item) is bytes for item in file)
        assert [chunk.number for chunk in file.chunks] == list(range(len(file.chunks)))
        sizes = [sum(4 + len(items[c.first + i]) for i in range(c.records)) for c in file.chunks]
        assert all(size <= chunk_bytes or c.records == 1 for size, c in zip(sizes, file.chunks, strict=True))
        if chunk_bytes == 1 << 31:
            assert len(file.chunks) == 1


def test_n16_the_layout_is_that_of_go_s_recordio(tmp_path: Path) -> None:
    body = b"\x01\0\0\0a\0\0\0\0\x02\0\0\0bc"
    path = written(tmp_path / "a", [b"a", b"", b"bc"])
    assert path.read_bytes() == struct.pack("<IIIII", 0x01020304, zlib.crc32(body), 0, len(body), 3) + body
    path = written(tmp_path / "b", [b"a", b"", b"bc"], "gzip")
    magic, checksum, compressor, nbytes, count = struct.unpack_from("<IIIII", found := path.read_bytes())
    assert (magic, compressor, nbytes, count) == (0x01020304, 2, len(found) - 20, 3)
    assert zlib.crc32(found[20:]) == checksum
    assert gzip.decompress(found[20:]) == body
    found = written(tmp_path / "c", [b"a", b"", b"bc"], "snappy").read_bytes()
    assert found[8] == 1
    assert found[20:30] == b"\xff\x06\0\0sNaPpY"  # the framing format
    assert written(tmp_path / "d", [b"a", b"", b"bc"], "gzip").read_bytes() == path.read_bytes()  # and no time in it


def test_n16_a_file_that_go_wrote(tmp_path: Path) -> None:
    """Chunks of several compressors in one file, and gzip in two members, as other writers may do."""

    def chunk(compressor: int, body: bytes, count: int) -> bytes:
        return struct.pack("<5I", 0x01020304, zlib.crc32(body), compressor, len(body), count) + body

    one, two = b"\x03\0\0\0one", b"\x03\0\0\0two"
    (tmp_path / "a").write_bytes(chunk(2, gzip.compress(one) + gzip.compress(two), 2) + chunk(0, one, 1))
    assert list(RecordFile(tmp_path / "a")) == [b"one", b"two", b"one"]


@each_compressor
def test_n16_each_flipped_byte_is_an_error_that_names_chunk_and_offset(tmp_path: Path, compressor: Compressor) -> None:
    path = written(tmp_path / "a", make([0, 1, 7, 30, 2, 9, 64], seed=3), compressor, chunk_bytes=40)
    whole = path.read_bytes()
    chunks = RecordFile(path).chunks
    assert len(chunks) > 3
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << random.Random(at).randrange(8)
        path.write_bytes(damaged)
        hit = max((c for c in chunks if c.offset <= at), key=lambda c: c.offset)
        size_changed = 12 <= at - hit.offset < 16
        with pytest.raises(ValueError, match=r"expected|damaged|truncated") as caught:
            list(RecordFile(path))
        named = f"chunk {hit.number} at byte {hit.offset}"
        # A wrong size leads elsewhere: what is there is no header, unless it is the end of the file.
        assert str(caught.value).startswith(f"{path}: {named}: ") or (
            size_changed and str(caught.value).endswith(f", or {named} has a wrong size")
        )
    path.write_bytes(whole)
    assert len(list(RecordFile(path))) == 7


@each_compressor
def test_n16_a_truncated_file_is_an_error_wherever_it_ends(tmp_path: Path, compressor: Compressor) -> None:
    items = make([5, 20, 31, 0], seed=4)
    path = written(tmp_path / "a", items, compressor, chunk_bytes=30)
    whole = path.read_bytes()
    offsets = {chunk.offset: chunk.first for chunk in RecordFile(path).chunks}
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        if size in offsets:  # it ends between two chunks: nothing shows that there were more
            assert list(RecordFile(path)) == items[: offsets[size]]
        else:
            last = max(offset for offset in offsets if offset < size)
            with pytest.raises(ValueError, match=f"at byte {last}: .*truncated"):
                RecordFile(path)


def in_memory(path: Path) -> list[bool]:
    """Return for each page of a file whether the kernel has it; reading with RWF_NOWAIT would have it read ahead."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        found = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        first = ctypes.c_char.from_buffer(mapped)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapped)), found)
        del first
    assert not failed, os.strerror(ctypes.get_errno())
    return [bool(page & 1) for page in found]


def test_n16_opening_leaves_no_page_in_memory_and_takes_none(tmp_path: Path) -> None:
    left = {0}
    for attempt in range(5):
        if not left:
            break
        path = written(tmp_path / str(attempt), make([100_000] * 10), chunk_bytes=100_000)
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if any(in_memory(path)):
            pytest.skip("this file system keeps all in memory")
        with RecordFile(path) as file:
            left = {number for number, page in enumerate(in_memory(path)) if page}
            # If the disk answers within the query for resident pages, that page counts as resident.
            assert left <= {chunk.offset // mmap.PAGESIZE for chunk in file.chunks}
            assert len(list(file)) == len(file) == 10
        with RecordFile(path) as file:
            assert all(in_memory(path))
    assert not left


def test_n16_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    path = written(tmp_path / "a", make([50, 51]), chunk_bytes=50)
    file = RecordFile(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="chunk 1 at byte 74: 6 bytes of 55; the file was truncated"):
        list(file)


def test_n16_foreign_empty_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"PK\3\4 this is something else, and long enough")
    with pytest.raises(ValueError, match="chunk 0 at byte 0: it begins with 0x04034b50: expected 0x01020304"):
        RecordFile(path)
    with RecordFile(written(path, [])) as empty:
        assert path.stat().st_size == len(empty) == 0
        assert list(empty) == list(empty.read(0, 0)) == []
    with pytest.raises(FileNotFoundError):
        RecordFile(tmp_path / "none")
    path.write_bytes(struct.pack("<5I", 0x01020304, 0, 0, 0, 0))
    with pytest.raises(ValueError, match="0 records in 0 bytes: expected at least one"):
        RecordFile(path)


@pytest.mark.parametrize("body", [b"\x05\0\0\0ab", b"\x01\0\0\0a\0\0", b"\x01\0\0\0aa", b"\xff\xff\xff\xffa"])
def test_n16_lengths_that_do_not_fit_are_an_error(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "a"
    for count in (1, 2, 2**32 - 1):
        path.write_bytes(struct.pack("<5I", 0x01020304, zlib.crc32(body), 0, len(body), count) + body)
        with pytest.raises(ValueError, match=f"chunk 0 at byte 0: {count} records (do not fill|in {len(body)} bytes)"):
            list(RecordFile(path))  # which asks first how many there are


@each_compressor
def test_n16_ranges_and_indices(tmp_path: Path, compressor: Compressor) -> None:
    items = make([random.Random(i).randrange(40) for i in range(60)], seed=5)
    file = RecordFile(written(tmp_path / "a", items, compressor, chunk_bytes=100))
    for start, stop in itertools.combinations_with_replacement(range(0, 61, 3), 2):
        assert list(file.read(start, stop)) == items[start:stop]
    assert list(file.read(57)) == items[57:]
    assert [file[i] for i in range(-60, 60)] == items * 2
    mixed = [59, 3, 3, -1, 17]
    assert file.__getitems__(mixed) == [items[i] for i in mixed]
    assert file.__getitems__([]) == []
    for start, stop in ((-1, 3), (4, 3), (0, 61), (61, 61)):
        with pytest.raises(IndexError, match="expected 0 <= start <= stop <= 60"):
            file.read(start, stop)
    for index in (60, -61):
        with pytest.raises(IndexError, match=f"record {index} of 60"):
            file[index]


def test_n16_only_the_chunks_of_a_range_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a", make([10, 11, 12]), chunk_bytes=10)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    file = RecordFile(path)
    assert list(file.read(0, 2)) == make([10, 11, 12])[:2]
    with pytest.raises(ValueError, match="chunk 2 at byte"):
        list(file.read(2, 3))


def test_n16_leaving_a_range_early_ends_its_thread(tmp_path: Path) -> None:
    reading = iter(RecordFile(written(tmp_path / "a", make([10] * 20), chunk_bytes=20)))
    next(reading)
    assert any(thread.name.startswith("aiodist-records") for thread in threading.enumerate())
    del reading
    assert not any(thread.name.startswith("aiodist-records") for thread in threading.enumerate())


def test_n16_wrong_arguments_of_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="compressor='zstd': expected one of none, snappy, gzip"):
        RecordWriter(tmp_path / "a", compressor="zstd")  # type: ignore[arg-type]
    for nbytes in (0, (1 << 31) + 1):
        with pytest.raises(ValueError, match=f"chunk_bytes={nbytes}"):
            RecordWriter(tmp_path / "a", chunk_bytes=nbytes)
    with RecordWriter(tmp_path / "a") as writer, pytest.raises(TypeError):
        writer.write("text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is closed"):
        writer.write(b"")
    assert len(RecordFile(tmp_path / "a")) == 0
    monkeypatch.setitem(sys.modules, "cramjam", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'aiodist\[records\]'"):
        RecordWriter(tmp_path / "a", compressor="snappy")


def test_n16_a_writer_takes_any_buffer_and_keeps_what_an_error_left(tmp_path: Path) -> None:
    with suppress(ZeroDivisionError), RecordWriter(tmp_path / "a") as writer:
        writer.write(memoryview(bytearray(b"abcd")).cast("H"))
        _ = 1 // 0
    assert list(RecordFile(tmp_path / "a")) == [b"abcd"]


def test_n16_a_record_of_any_layout_is_written_whole(tmp_path: Path) -> None:
    """Its length was once written before its bytes raised, which damaged the chunk."""
    odd: list[Any] = [
        memoryview(b"abcdef")[::2],
        np.arange(5, dtype="u1"),
        np.arange(6.0).reshape(2, 3).T,
        memoryview(b""),
    ]
    with RecordWriter(tmp_path / "a") as writer:
        for record in odd:
            writer.write(record)
    assert list(RecordFile(tmp_path / "a")) == [memoryview(record).tobytes() for record in odd]


def test_n16_a_file_that_was_closed_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "a", make([50, 51]))
    with RecordFile(path) as file:
        pass
    with path.open():  # takes the number of the descriptor
        for read in (lambda: file[0], lambda: list(file)):
            with pytest.raises(ValueError, match="is closed: read records inside"):
                read()


def test_n16_a_read_may_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = make([50, 51])  # as of a chunk of 2 GiB
    file = RecordFile(written(tmp_path / "a", items))
    monkeypatch.setattr(os, "pread", lambda fd, count, at, whole=os.pread: whole(fd, min(count, 7), at))
    assert list(file) == items


@pytest.mark.ranks(1, 2, 3, 7)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [None, 1, 4])
async def test_n16_ranks_cover_the_records_once(
    coll: Communicator, tmp_path_factory: pytest.TempPathFactory, shuffle: bool, batch_size: int | None
) -> None:
    folder = tmp_path_factory.mktemp("records")
    items = [f"{i}".encode() for i in range(53)]
    paths = [written(folder / "a", items[:20], chunk_bytes=33), written(folder / "b", items[20:], "gzip", 60)]
    source = records(paths, coll, batch_size=batch_size, shuffle=shuffle, seed=coll.size)
    orders = []
    for epoch in range(2):
        source.set_epoch(epoch)
        found: list[bytes] = []
        async with prefetch(source) as batches:
            count = 0
            async for batch in batches:
                found += [batch] if batch_size is None else batch
                count += 1
            assert len(batches) == len(source) == count
        everybody = await coll.allgather_object(found)
        assert max(map(len, everybody)) - min(map(len, everybody)) <= 1
        orders.append(list(itertools.chain(*everybody)))
        assert sorted(orders[-1]) == sorted(items)
        assert (orders[-1] == items) is not shuffle
    assert (orders[0] == orders[1]) is not shuffle
    source.set_epoch(0)
    again = itertools.chain(source) if batch_size is None else itertools.chain(*source)
    assert list(itertools.chain(*await coll.allgather_object(list(again)))) == orders[0]


@pytest.mark.ranks(1)
async def test_n16_records_of_wrong_arguments_and_no_records(coll: Communicator, tmp_path: Path) -> None:
    path = written(tmp_path / "a", [])
    assert list(records(path, coll)) == list(records([], coll, batch_size=3)) == []
    with pytest.raises(ValueError, match="batch_size=0"):
        records(path, coll, batch_size=0)
    with pytest.raises(ValueError, match="seed=-1"):
        records(path, coll, seed=-1)
    with pytest.raises(ValueError, match="epoch=-1"):
        records(path, coll).set_epoch(-1)


@pytest.mark.ranks(1)
async def test_n16_a_damaged_chunk_is_raised_in_its_place(coll: Communicator, tmp_path: Path) -> None:
    path = written(tmp_path / "a", [b"one", b"two", b"three"], chunk_bytes=7)
    path.write_bytes(path.read_bytes().replace(b"two", b"tow"))
    async with prefetch(records(str(path), coll)) as items:
        assert await anext(items) == b"one"
        with pytest.raises(ValueError, match="chunk 1 at byte 27"):
            await anext(items)


def test_n16_a_record_file_is_a_dataset_for_a_data_loader(tmp_path: Path) -> None:
    items = [f"{i}".encode() for i in range(23)]
    file = pickle.loads(pickle.dumps(RecordFile(written(tmp_path / "a", items, "snappy", 40))))
    found = []
    for rank in range(3):
        sampler = ShardSampler(file, place(rank, 3), shuffle=True)
        loader = DataLoader(file, batch_size=4, sampler=sampler, num_workers=rank == 2, collate_fn=list)
        found += list(itertools.chain(*loader))
    assert sorted(found) == sorted(items)
