"""Files of a checkpoint: one per rank, and `manifest.json`.

The file of one rank is in the format of safetensors (huggingface.co/docs/safetensors), the largest elements first, so
that each is aligned to its element size. The manifest lists the contents of a checkpoint; its first line has the
checksum of the second. docs/design/checkpoints.md has both to the byte.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aiodist import _core
from aiodist.checkpoints import folders
from aiodist.checkpoints.folders import MANIFEST
from aiodist.checkpoints.pace import WritePace
from aiodist.checkpoints.values import Json
from aiodist.checkpoints.writer import pages
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
"""By the names of safetensors, which has no complex128: there it is pairs of F64."""
_PIECE_BYTES = 4 << 20
"""What is copied while the piece before is written; whole pages."""
_TURN_BYTES = 16 * _PIECE_BYTES
"""What is written in one call: in between, memory is given back, and the thread waits for the GIL, up to 5 ms."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, path: str) -> str:
    """Return what files call `dtype`; raise `TypeError` naming `path` for one that they do not know."""
    if dtype not in _NAMES:
        raise TypeError(f"{path} is {dtype}: expected one of {', '.join(sorted(map(str, _NAMES)))}")
    return _NAMES[dtype]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Elements `start` to `start + numel` of a flat tensor, in the file of one rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int
    numel: int
    offset: int = 0
    """Bytes before it in the file."""
    crc: int = 0
    """The CRC-32 of its bytes, that of zlib."""
    file: int = 0
    """The rank that wrote it."""

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
    entries = [replace(entry, offset=len(header) + at) for entry, at in zip(given, starts, strict=False)]
    return Layout(header, entries)


def copy_into(buffer: Tensor, layout: Layout, sources: Sequence[Tensor]) -> None:
    """Fill `buffer` with the bytes after the header of the file: one flat source for each entry."""
    for entry, part, source in zip(layout.entries, parts_of(buffer, layout), sources, strict=True):
        part.view(DTYPES[entry.dtype]).copy_(source)


def parts_of(buffer: Tensor, layout: Layout) -> list[Tensor]:
    """Return the bytes of each entry, in a buffer that `copy_into` has filled."""
    begins = (entry.offset - len(layout.header) for entry in layout.entries)
    return [buffer[at : at + entry.nbytes] for at, entry in zip(begins, layout.entries, strict=True)]


def write_file(
    path: Path, layout: Layout, sources: Sequence[Tensor], computing: set[int], over: Callable[[int], object] = id
) -> tuple[FileFacts, list[TensorEntry]]:
    """Write the file; return what the manifest says of it, once it is on the disk.

    `sources` are the bytes of each entry, flat, and `over` is called with its number when they are no longer looked at.
    The thread rests between turns, while others are `computing`; a turn does not need the GIL.
    """
    parts = [torch.frombuffer(bytearray(layout.header), dtype=torch.uint8), *sources]
    crcs = [0] * len(parts)
    memory, pace = pages(2 * _PIECE_BYTES), WritePace(computing)
    with folders.new_file(path) as fd:
        folders.write_past_cache(fd)
        for turn in _cut([len(part) for part in parts]):
            found = [(parts[number].data_ptr() + start, nbytes, crcs[number]) for number, start, nbytes in turn]
            sums = _core.write_checked(fd, memory.numpy().data, found)
            for (number, start, nbytes), crc in zip(turn, sums, strict=True):
                crcs[number] = crc
                if number and start + nbytes == len(parts[number]):
                    over(number - 1)
            pace.rest()
    entries = [replace(entry, crc=crc) for entry, crc in zip(layout.entries, crcs[1:], strict=True)]
    return FileFacts(layout.nbytes, len(layout.header), crcs[0]), entries


def _cut(sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield what is written in one call: the numbers of parts, where it begins in them, and how many bytes."""
    turn, room = list[tuple[int, int, int]](), _TURN_BYTES
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            nbytes = min(room, size - start)
            turn.append((number, start, nbytes))
            start, room = start + nbytes, room - nbytes
            if not room:
                yield turn
                turn, room = [], _TURN_BYTES
    if turn:
        yield turn


_FIRST_LINE = re.compile(rb'\{"aiodist checkpoint":(\d{1,9}),"nbytes":(\d{1,15}),"sha256":"([0-9a-f]{64})"\}')
_VERSION = 2
_READABLE = (1, _VERSION)  # 1 has no kinds
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors of a reader for JSON that was changed after the write."""


@dataclass(frozen=True)
class FileFacts:
    """A rank's file."""

    nbytes: int
    header: int
    """Bytes of its header, with the length before it."""
    crc: int
    """The CRC-32 of these."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    files: list[FileFacts]
    tensors: dict[str, list[TensorEntry]]
    """The pieces of each in order, which fill it once; one at least."""
    parts: list[Json]
    extra: Json
    own: list[Json]
    """Own state of each rank."""

    def packed(self) -> bytes:
        tensors = {}
        for name, pieces in self.tensors.items():
            rows = [[e.file, e.offset, e.start, e.numel, e.crc] for e in pieces]
            tensors[name] = {"dtype": pieces[0].dtype, "shape": list(pieces[0].shape), "pieces": rows}
        content = {
            "ranks": len(self.files),
            "files": [[file.nbytes, file.header, file.crc] for file in self.files],
            "tensors": tensors,
            "parts": self.parts,
            "extra": self.extra,
            "own": self.own,
        }
        second = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
        first = f'{{"aiodist checkpoint":{_VERSION},"nbytes":{len(second)},"sha256":"{sha256(second).hexdigest()}"}}'
        return b"\n".join((first.encode(), second, b""))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return that of the checkpoint in `folder`; raise `CheckpointDamaged` where it is not as it was written."""
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
    written: Sequence[tuple[FileFacts, list[TensorEntry], Json]],
    parts: list[Json],
    extra: Json,
) -> Path:
    """Write the manifest of checkpoint `number`, and commit the folder.

    `written` has the facts and entries of each rank's file, which is on the disk, and the rank's own state.
    """
    part = folders.folder_of(path, number, ".part")
    tensors: dict[str, list[TensorEntry]] = {}
    for rank, (facts, entries, _) in enumerate(written):
        file = part / folders.file_name(rank)
        if not file.exists() or file.stat().st_size != facts.nbytes:
            raise FileNotFoundError(f"{file}, which rank {rank} wrote, is not there: do all ranks share the folder?")
        for entry in entries:
            tensors.setdefault(entry.name, []).append(replace(entry, file=rank))
    for pieces in tensors.values():
        pieces.sort(key=lambda piece: (piece.start, piece.numel))
    check_filled(tensors)
    manifest = Manifest([facts for facts, _, _ in written], tensors, parts, extra, [own for *_, own in written])
    with folders.new_file(part / folders.MANIFEST) as fd:
        folders.write_all(fd, memoryview(manifest.packed()))
    return folders.commit(path, number)


def check_filled(tensors: Mapping[str, Sequence[TensorEntry]]) -> None:
    """Raise `ValueError` unless the pieces of each tensor fill it once, and agree about what it is."""
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
    if int(match[1]) not in _READABLE:
        raise ValueError(f"version {int(match[1])}: expected at most {_VERSION}, the one that this aiodist writes")
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
    return Manifest(files, tensors, content["parts"], content["extra"], content["own"])


def _pieces(name: str, said: dict[str, Any], files: Sequence[FileFacts]) -> list[TensorEntry]:
    dtype, shape, found = said["dtype"], tuple(said["shape"]), []
    for file, offset, start, numel, crc in said["pieces"]:
        entry = TensorEntry(name, dtype, shape, start, numel, offset, crc, file)
        if min(file, offset, numel, *shape) < 0 or offset + entry.nbytes > files[file].nbytes:
            raise ValueError(f"tensor {name!r}: a piece lies outside of the files")
        found.append(entry)
    return found
