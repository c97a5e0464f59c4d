"""The file of one rank, in the format of safetensors: where its tensors lie, and its header.

Eight bytes, little-endian: the length of the header. The header: JSON, with spaces up to a multiple of eight bytes.
Then the tensors, one behind the other, little-endian, the largest elements first, so that each is aligned to its own.
Source: huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<Q")

Block = tuple[tuple[int, int], ...]
"""Of each dimension where a block begins and where it ends."""


def dtype_name(dtype: torch.dtype, path: str) -> str:
    """Return what files call `dtype`; raise `TypeError` naming `path` for one that they do not know."""
    if dtype not in _NAMES:
        raise TypeError(f"{path} is {dtype}: expected one of {', '.join(sorted(map(str, _NAMES)))}")
    return _NAMES[dtype]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What a rank's file has of one tensor: elements `start` … `start + numel` of `block` of it, made flat."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    numel: int
    block: Block | None = None
    """None is the whole tensor."""
    offset: int = 0
    """Bytes before it in the file."""
    crc: int = 0
    """The CRC-32 of its bytes, that of zlib."""

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self.numel * DTYPES[self.dtype].itemsize

    @property
    def whole(self) -> bool:
        """It is all of the tensor."""
        return self.block is None and self.numel == prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """A file: its header, and its entries in their order; `order` has their numbers as they were given."""

    header: bytes
    entries: list[TensorEntry]
    order: list[int]
    nbytes: int


def lay_out(given: Sequence[TensorEntry]) -> Layout:
    """Return the file that has `given`, whose names differ from one another."""
    order = sorted(range(len(given)), key=lambda i: -DTYPES[given[i].dtype].itemsize)
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in (given[i] for i in order):
        described[entry.name] = {**_as_stored(entry), "data_offsets": [offset, offset + entry.nbytes]}
        offset += entry.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = _LENGTH.pack(len(text)) + text
    entries, at = [], len(header)
    for entry in (given[i] for i in order):
        entries.append(replace(entry, offset=at))
        at += entry.nbytes
    return Layout(header, entries, order, at)


def _as_stored(entry: TensorEntry) -> dict[str, object]:
    shape = [*entry.shape] if entry.whole else [entry.numel]
    if entry.dtype == "C128":
        return {"dtype": "F64", "shape": [*shape, 2]}
    return {"dtype": entry.dtype, "shape": shape}


def copy_into(buffer: Tensor, layout: Layout, sources: Sequence[Tensor]) -> None:
    """Copy `sources`, flat and in the order of the given entries, into `buffer`: bytes as they follow the header."""
    at = 0
    for number, entry in zip(layout.order, layout.entries, strict=True):
        buffer[at : at + entry.nbytes].view(DTYPES[entry.dtype]).copy_(sources[number])
        at += entry.nbytes
