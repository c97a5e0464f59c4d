"""The file of one rank, in the format of safetensors: where its tensors lie, and its header.

Eight bytes, little-endian: the length of the header. The header: JSON, with spaces so that the tensors begin at a
multiple of sixteen. Then the tensors, one behind the other, little-endian, the largest elements first, so that each is
aligned to its own.
Source: huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from aiodist.checkpoints import folders

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
_PIECE_BYTES = 2 << 20
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, path: str) -> str:
    """Return what files call `dtype`; raise `TypeError` naming `path` for one that they do not know."""
    if dtype not in _NAMES:
        raise TypeError(f"{path} is {dtype}: expected one of {', '.join(sorted(map(str, _NAMES)))}")
    return _NAMES[dtype]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What a rank's file has of one tensor: elements `start` … `start + numel` of it, made flat."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    numel: int
    offset: int = 0
    """Bytes before it in the file."""
    crc: int = 0
    """The CRC-32 of its bytes, that of zlib."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Layout:
    """A file: its header, and behind it its entries, in their order."""

    header: bytes
    entries: list[TensorEntry]

    @property
    def nbytes(self) -> int:
        """How long the file is."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


def lay_out(given: Sequence[TensorEntry]) -> Layout:
    """Return the file that has `given` in this order; their names differ from one another."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = accumulate((entry.nbytes for entry in given), initial=0)
    for entry, at in zip(given, ends, strict=False):
        described[entry.name] = {**_as_stored(entry), "data_offsets": [at, at + entry.nbytes]}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 16)
    header = struct.pack("<Q", len(text)) + text
    ends = accumulate((entry.nbytes for entry in given), initial=len(header))
    return Layout(header, [replace(entry, offset=at) for entry, at in zip(given, ends, strict=False)])


def _as_stored(entry: TensorEntry) -> dict[str, object]:
    shape = [*entry.shape] if entry.numel == prod(entry.shape) else [entry.numel]
    if entry.dtype == "C128":
        return {"dtype": "F64", "shape": [*shape, 2]}
    return {"dtype": entry.dtype, "shape": shape}


def copy_into(buffer: Tensor, layout: Layout, sources: Sequence[Tensor]) -> None:
    """Have `buffer` be the file: its header, and `sources`, flat, one for each entry."""
    buffer[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    for entry, source in zip(layout.entries, sources, strict=True):
        buffer[entry.offset : entry.offset + entry.nbytes].view(DTYPES[entry.dtype]).copy_(source)


def write(path: Path, layout: Layout, buffer: Tensor, rest: Callable[[], None]) -> list[TensorEntry]:
    """Write the file, which `buffer` has; return the entries with their checksums when it is on disk.

    `rest` is called again and again, each time after some work that leaves the GIL alone.
    """
    data = buffer.numpy().data[: layout.nbytes]
    entries = []
    for entry in layout.entries:
        crc, end = 0, entry.offset + entry.nbytes
        for at in range(entry.offset, end, _PIECE_BYTES):
            crc = zlib.crc32(data[at : min(at + _PIECE_BYTES, end)], crc)
            rest()
        entries.append(replace(entry, crc=crc))
    with folders.new_file(path) as fd:
        folders.write_direct(fd, data, rest)
    return entries
