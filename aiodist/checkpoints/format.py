"""Files of a checkpoint: one per rank, and `manifest.json`.

The file of one rank is in the format of safetensors (huggingface.co/docs/safetensors), the largest elements first, so
that each is aligned to its element size. The manifest lists the contents of a checkpoint; its first line has the
checksum of the second. docs/design/checkpoints.md has both to the byte.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiodist import _core
from aiodist.checkpoints import folders
from aiodist.checkpoints.folders import MANIFEST
from aiodist.checkpoints.values import Json
from aiodist.errors import CheckpointDamaged

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,
}
"""Dtypes by the names of safetensors. C128, which is not one of these, is written as pairs of F64."""
_PIECE_BYTES = 4 << 20
"""Bytes that are copied while the previous ones are written: whole pages."""
_TURN_BYTES = 16 * _PIECE_BYTES
"""Most bytes of one call. Between calls, memory is freed, and the thread waits for the GIL, up to 5 ms."""
_REST_FACTOR = 40.0
"""Seconds that a writing thread sleeps for one second of CPU, while others compute."""
_SHORTEST_REST_SECONDS = 5e-3
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, path: str) -> str:
    """Return the name of `dtype` in files. Raise `TypeError` with `path` for a dtype without a name."""
    if dtype not in _NAMES:
        raise TypeError(f"{path} is {dtype}: expected one of {', '.join(sorted(map(str, _NAMES)))}")
    return _NAMES[dtype]


class TensorEntry(NamedTuple):
    """Elements `start` to `start + numel` of a flat tensor, in the file of one rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    numel: int
    offset: int = 0
    """Offset in the file, in bytes."""
    crc: int = 0
    """CRC-32 of the bytes, as zlib's."""
    file: int = 0
    """Rank that wrote the file."""

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Layout:
    """A file: the header, then the entries in order."""

    header: bytes
    entries: list[TensorEntry]

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries)

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """Return the bytes of each entry, in a buffer with the bytes after the header."""
        begins = (entry.offset - len(self.header) for entry in self.entries)
        return [buffer[at : at + entry.nbytes] for at, entry in zip(begins, self.entries, strict=True)]

    def fill(self, buffer: Tensor, sources: Sequence[Tensor]) -> None:
        """Copy the flat tensor of each entry to its place in `buffer`."""
        for entry, part, source in zip(self.entries, self.parts(buffer), sources, strict=True):
            part.view(DTYPES[entry.dtype]).copy_(source)


def lay_out(given: Sequence[TensorEntry]) -> Layout:
    """Return the file that has `given` in this order; their names differ from one another."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts = list(accumulate((entry.nbytes for entry in given), initial=0))
    for entry, at in zip(given, starts, strict=False):
        shape = [*entry.shape] if entry.numel == prod(entry.shape) else [entry.numel]
        kind, shape = ("F64", [*shape, 2]) if entry.dtype == "C128" else (entry.dtype, shape)
        described[entry.name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + entry.nbytes]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 16)
    header = struct.pack("<Q", len(text)) + text
    entries = [entry._replace(offset=len(header) + at) for entry, at in zip(given, starts, strict=False)]
    return Layout(header, entries)


class WritePace:
    """Pauses of a writing thread, which uses a small part of a core while others compute."""

    def __init__(
        self,
        computing: set[int],
        clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """`computing` are the computing threads, this one too. `clock` returns the CPU seconds of this thread."""
        self._computing = computing
        self._clock, self._sleep = clock, sleep
        self._used = clock()
        """CPU seconds of the thread up to the last rest."""
        self._shared: bool | None = None
        """True if others computed at the last rest, or None before the first rest."""

    def turn_bytes(self) -> int:
        """Return the most bytes of the next call: one piece while others compute, and before the first rest."""
        return _TURN_BYTES if self._shared is False and len(self._computing) <= 1 else _PIECE_BYTES

    def rest(self) -> None:
        """Sleep for the CPU time since the last rest, if others compute."""
        owed = _REST_FACTOR * (self._clock() - self._used)
        if owed > _SHORTEST_REST_SECONDS:
            before, self._shared = self._shared, len(self._computing) > 1
            if before or self._shared:
                self._sleep(owed)
            self._used = self._clock()


def write_file(
    path: Path, layout: Layout, sources: Sequence[Tensor], computing: set[int], free: Callable[[int], object] = id
) -> tuple[FileFacts, list[TensorEntry]]:
    """Write and sync the file; return its facts and entries for the manifest.

    `sources` are the flat bytes of each entry. `free` is called with the number of an entry after the last use of its
    bytes. The thread rests between turns while others are `computing`. A turn does not need the GIL.
    """
    parts = [torch.frombuffer(bytearray(layout.header), dtype=torch.uint8), *sources]
    crcs = [0] * len(parts)
    memory, pace = folders.pages(2 * _PIECE_BYTES), WritePace(computing)
    with folders.new_file(path) as fd:
        folders.write_past_cache(fd)
        for turn in _cut([len(part) for part in parts], pace.turn_bytes):
            found = [(parts[number].data_ptr() + start, nbytes, crcs[number]) for number, start, nbytes in turn]
            sums = _core.write_checked(fd, memory.numpy().data, found)
            for (number, start, nbytes), crc in zip(turn, sums, strict=True):
                crcs[number] = crc
                if number and start + nbytes == len(parts[number]):
                    free(number - 1)
            pace.rest()
    entries = [entry._replace(crc=crc) for entry, crc in zip(layout.entries, crcs[1:], strict=True)]
    return FileFacts(layout.nbytes, len(layout.header), crcs[0]), entries


def _cut(sizes: Sequence[int], turn_bytes: Callable[[], int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the bytes of each call: for each part its number, the first byte and the number of bytes."""
    turn, room = list[tuple[int, int, int]](), turn_bytes()
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            nbytes = min(room, size - start)
            turn.append((number, start, nbytes))
            start, room = start + nbytes, room - nbytes
            if not room:
                yield turn
                turn, room = [], turn_bytes()
    if turn:
        yield turn


_FIRST_LINE = re.compile(rb'\{"aiodist checkpoint":(\d{1,9}),"nbytes":(\d{1,15}),"sha256":"([0-9a-f]{64})"\}')
_VERSION = 3
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors of a reader for JSON that was changed after the write."""


class FileFacts(NamedTuple):
    """A rank's file."""

    nbytes: int
    header: int
    """Bytes of the header, with the length before it."""
    crc: int
    """CRC-32 of the header."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    files: list[FileFacts]
    tensors: dict[str, list[TensorEntry]]
    """Pieces of each tensor, one at least, which fill the tensor once in this order."""
    parts: list[Json]
    metadata: Json
    own: list[Json]
    """Own state of each rank."""

    def packed(self) -> bytes:
        tensors = {}
        for name, pieces in self.tensors.items():
            rows = [[e.file, e.offset, e.start, e.numel, e.crc] for e in pieces]
            tensors[name] = {"dtype": pieces[0].dtype, "shape": list(pieces[0].shape), "pieces": rows}
        content = {
            "ranks": len(self.files),
            "files": self.files,
            "tensors": tensors,
            "parts": self.parts,
            "metadata": self.metadata,
            "own": self.own,
        }
        second = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        first = f'{{"aiodist checkpoint":{_VERSION},"nbytes":{len(second)},"sha256":"{sha256(second).hexdigest()}"}}'
        return b"\n".join((first.encode(), second, b""))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of the checkpoint in `folder`. Raise `CheckpointDamaged` if it was changed."""
        path = folder / MANIFEST
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointDamaged(f"{path} cannot be read: {error.strerror}") from error
        try:
            return _parsed(_content(data))
        except UNREADABLE as error:
            raise CheckpointDamaged(f"{path}: {error}") from error


def commit(
    path: Path,
    number: int,
    written: Sequence[tuple[Json, Json, Json]],
    parts: list[Json],
    metadata: Json,
) -> Path:
    """Write the manifest of checkpoint `number`, and commit the folder.

    `written` has for each rank the result of `write_file`, as JSON, and the rank's own state.
    """
    part = folders.folder_of(path, number, ".part")
    files = [FileFacts(*facts) for facts, _, _ in written]
    tensors: dict[str, list[TensorEntry]] = {}
    for rank, (_, entries, _) in enumerate(written):
        file = part / folders.file_name(rank)
        if not file.exists() or file.stat().st_size != files[rank].nbytes:
            raise FileNotFoundError(f"{file}, which rank {rank} wrote, is not there: do all ranks share the folder?")
        for entry in (TensorEntry(*row) for row in entries):
            tensors.setdefault(entry.name, []).append(entry._replace(file=rank))
    for pieces in tensors.values():
        pieces.sort(key=lambda piece: (piece.start, piece.numel))
    check_filled(tensors)
    manifest = Manifest(files, tensors, parts, metadata, [own for *_, own in written])
    with folders.new_file(part / folders.MANIFEST) as fd:
        folders.write_all(fd, memoryview(manifest.packed()))
    return folders.commit(path, number)


def check_filled(tensors: Mapping[str, Sequence[TensorEntry]]) -> None:
    """Raise `ValueError` unless the pieces of each tensor have one dtype and shape, and fill the tensor once."""
    for name, pieces in tensors.items():
        first, at = pieces[0], 0
        for piece in pieces:
            if (piece.dtype, piece.shape) != (first.dtype, first.shape):
                raise ValueError(
                    f"tensor {name!r}: rank {pieces[0].file} has {first.dtype} {list(first.shape)}, "
                    f"rank {piece.file} {piece.dtype} {list(piece.shape)}"
                )
            if piece.start != at:
                raise ValueError(f"tensor {name!r}: a piece begins at element {piece.start}: expected {at}")
            at += piece.numel
        if at != prod(first.shape):
            raise ValueError(f"tensor {name!r}: pieces end at element {at} of {prod(first.shape)}")


def _content(data: bytes) -> dict[str, Any]:
    first, _, rest = data.partition(b"\n")
    match = _FIRST_LINE.fullmatch(first)
    if match is None:
        raise ValueError(f"it begins with {first[:60]!r}: expected the first line of a checkpoint's manifest")
    if int(match[1]) != _VERSION:
        raise ValueError(f"version {int(match[1])}: expected {_VERSION}, the version of this aiodist")
    nbytes = int(match[2])
    if len(rest) != nbytes + 1 or rest[-1:] != b"\n":
        raise ValueError(f"{len(rest)} bytes behind its first line: expected {nbytes} and a newline")
    if sha256(rest[:-1]).hexdigest() != match[3].decode():
        raise ValueError(f"the SHA-256 of bytes {len(first) + 1} to {len(data) - 1} is not the one in its first line")
    content: dict[str, Any] = json.loads(rest)
    return content


def _parsed(content: dict[str, Any]) -> Manifest:
    files = [FileFacts(*row) for row in content["files"]]
    if not len(files) == len(content["own"]) == content["ranks"] >= 1:
        raise ValueError(f"{content['ranks']} ranks, {len(files)} files and {len(content['own'])} values of ranks")
    if any(not 0 <= file.header <= file.nbytes for file in files):
        raise ValueError("a header is longer than its file")
    tensors = {name: _pieces(name, said, files) for name, said in content["tensors"].items()}
    check_filled(tensors)
    return Manifest(files, tensors, content["parts"], content["metadata"], content["own"])


def _pieces(name: str, said: dict[str, Any], files: Sequence[FileFacts]) -> list[TensorEntry]:
    dtype, shape, found = said["dtype"], tuple(said["shape"]), []
    for file, offset, start, numel, crc in said["pieces"]:
        entry = TensorEntry(name, dtype, shape, start, numel, offset, crc, file)
        if min(file, offset, numel, *shape) < 0 or offset + entry.nbytes > files[file].nbytes:
            raise ValueError(f"tensor {name!r}: a piece lies outside of the files")
        found.append(entry)
    return found
