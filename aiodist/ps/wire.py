"""The wire format of parameter servers: frames of entries, each with a kind, a length and a body.

Frequent entries have a fixed form, and the others are calls in JSON. Nothing is unpickled. Each request has a number of
its sender, which its answer, its data and its order name.
"""

from __future__ import annotations

import ctypes
import struct
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

FRAME = struct.Struct("<iIQI?xxx")
"""Head of a frame: the source, the bytes in use, the number, the number of handled frames, and if it has requests.

The handled frames are those of requests that the source has handled since its last frame.
"""
ENTRY = struct.Struct("<BxxxI")
"""Head of an entry: its kind, and the length of its body, which is padded to eight bytes."""


class Kind(IntEnum):
    """Kinds of entries."""

    CALL = 0
    """JSON: open, make, ready, free, configure, barrier, leave and so on."""
    ANSWER = 1
    """JSON: the answer to a call, or the error of a request."""
    PUSH = 2
    PULL = 3
    ORDER = 4
    """The next order, from the server that leads a tensor to the others."""
    DONE = 5
    DATA = 6
    RELEASE = 7
    """The end of a read in place."""
    LAST = 8
    """No entry comes later, from any rank."""


class Way(IntEnum):
    """Ways of data to the other rank."""

    INLINE = 0
    """In the entry."""
    MESSAGE = 1
    """In a separate message, with the request's number as tag."""
    MEMORY = 2
    """In memory that the other rank reads: this rank's arena, or any memory if both ranks are the same."""


class Reads(IntEnum):
    """Consistency of a pull."""

    SNAPSHOT = 0
    LOCK_FREE = 1
    AFTER_OWN = 2
    """Lock-free, after the client's own pushes, whose memory may get the result."""


class Stage(IntEnum):
    """Stages of a push."""

    ACCEPTED = 0
    APPLIED = 1
    DROPPED = 2


class OrderKind(IntEnum):
    """Orders of the leader of a tensor to all shards."""

    APPLY = 0
    DROP = 1
    SERVE = 2
    DO = 3
    SAVE = 4
    """Save the current values. The version of the order is the number of the turn."""
    LOAD = 5
    """Take the values of a checkpoint. The version of the order is the number of the turn."""


FILL = 0xFFFF
"""Number of the rule of first values."""
TABLE = 0xFFFE
"""Number of the rule of a table's own optimizer."""


class PushHead(NamedTuple):
    """The head of a push, before inline data."""

    key: int
    rule: int
    way: int
    coded: bool
    number: int
    base: int
    alpha: float
    nbytes: int
    segment: int = 0
    offset: int = 0


class PullHead(NamedTuple):
    """A pull, before the `IdsHead` for rows of a table."""

    key: int
    reads: int
    number: int
    wants: int


class IdsHead(NamedTuple):
    """The head of the ids of a pull, before inline ids."""

    way: int
    nbytes: int
    segment: int = 0
    offset: int = 0


class Data(NamedTuple):
    """The head of the data for a pull, before inline data."""

    number: int
    version: int
    way: int
    coded: bool
    nbytes: int
    segment: int = 0
    offset: int = 0


PUSH = struct.Struct("<QHBBxxxxQQdQqq")
PULL = struct.Struct("<QBxxxxxxxQQ")
IDS = struct.Struct("<BxxxxxxxQqq")
DATA = struct.Struct("<QqBBxxxxxxQqq")
"""Forms of the heads above, with their fields in order."""
DONE = struct.Struct("<QBxxxxxxx")
"""Number and stage of a push."""
RELEASE = struct.Struct("<QQ")
"""Key of a tensor, and number of a pull."""
_ORDER = struct.Struct("<QBxxxxxxxqQ")
_PART = struct.Struct("<qQd")


class Order(NamedTuple):
    """The next order for every shard of a tensor: requests by client and number, each with its weight."""

    key: int
    kind: int
    version: int
    parts: tuple[tuple[int, int, float], ...]

    def pack(self) -> bytes:
        head = _ORDER.pack(self.key, self.kind, self.version, len(self.parts))
        return head + b"".join([_PART.pack(*part) for part in self.parts])

    @classmethod
    def unpack(cls, body: memoryview) -> Order:
        key, kind, version, count = _ORDER.unpack_from(body)
        at = _ORDER.size
        parts = tuple(_PART.unpack_from(body, at + i * _PART.size) for i in range(count))
        return cls(key, kind, version, parts)


_ALIGNED_BYTES = 8
_NONE = torch.empty(0, dtype=torch.uint8, device="cpu")


def as_bytes(t: Tensor) -> bytes:
    """Return a copy of the memory of a contiguous tensor of any dtype, three times as fast as with numpy."""
    return ctypes.string_at(t.data_ptr(), t.nbytes)


def bytes_in(body: memoryview, start: int, nbytes: int) -> Tensor:
    """Return `nbytes` of `body` from `start`, flat uint8, without a copy."""
    return torch.frombuffer(body, dtype=torch.uint8, offset=start, count=nbytes) if nbytes else _NONE


def values_in(body: memoryview, start: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    """Return `nbytes` of `body` from `start` as a flat tensor, without a copy unless the alignment requires one."""
    if not nbytes:
        return torch.empty(0, dtype=dtype, device="cpu")
    if dtype.itemsize > _ALIGNED_BYTES:  # torch's kernels for complex128 need 16-byte alignment
        return bytes_in(body, start, nbytes).clone().view(dtype)
    return torch.frombuffer(body, dtype=dtype, offset=start, count=nbytes // dtype.itemsize)
