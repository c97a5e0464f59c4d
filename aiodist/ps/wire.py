"""What ranks of a parameter server say to one another: a frame of entries, each a kind, a length and a body.

What is sent often has a fixed form; the rest are calls in JSON. Nothing here is ever unpickled. Every request has its
sender's number, by which its answer, its data and the order of its execution name it.
"""

from __future__ import annotations

import ctypes
import struct
from enum import IntEnum
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

FRAME = struct.Struct("<iIQI?xxx")
"""Head of a frame: the source, the bytes in use, the number, the number of handled frames, and if it has requests.

The handled frames are those of requests that the source has handled since its last frame.
"""
ENTRY = struct.Struct("<BxxxI")
"""The head of an entry: its kind, and the length of its body, which is padded to eight bytes."""


class Kind(IntEnum):
    """What an entry says."""

    CALL = 0
    """JSON: open, make, ready, free, configure, barrier, leave and so on."""
    ANSWER = 1
    """JSON: the answer to a call, or why a request failed."""
    PUSH = 2
    PULL = 3
    ORDER = 4
    """From the server that leads a tensor to those that follow: what to do next."""
    DONE = 5
    DATA = 6
    RELEASE = 7
    """A reader has copied what it was let look at."""
    LAST = 8
    """No entry comes later, from any rank."""


class Way(IntEnum):
    """How the data of a push or a pull travel."""

    INLINE = 0
    """In the entry."""
    MESSAGE = 1
    """In a message of their own, under the tag of the request's number."""
    MEMORY = 2
    """They lie where the other rank can look: in this rank's arena, or the other rank is this very one."""


class Reads(IntEnum):
    """What a pull may see."""

    SNAPSHOT = 0
    LOCK_FREE = 1
    AFTER_OWN = 2
    """Lock-free, once what the client pushed before is applied: that may lie where the values go."""


class Stage(IntEnum):
    """How far a push has come."""

    ACCEPTED = 0
    APPLIED = 1
    DROPPED = 2


class OrderKind(IntEnum):
    """What the leader of a tensor has all of its shards do."""

    APPLY = 0
    DROP = 1
    SERVE = 2
    DO = 3
    SAVE = 4
    """A checkpoint has it as it is now; in the place of a version there is the number of the turn."""
    LOAD = 5
    """It is now as a checkpoint has it; so too."""


FILL = 0xFFFF
"""The rule of a push that gives a new shard its first values."""
TABLE = 0xFFFE
"""The rule of a push that a table's own optimizer applies."""


class PushHead(NamedTuple):
    """The head of a push; with `Way.INLINE` the data follow."""

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
    """A pull. Where rows of a table are meant, an `IdsHead` stands behind."""

    key: int
    reads: int
    number: int
    wants: int


class IdsHead(NamedTuple):
    """How the ids of a pull travel; with `Way.INLINE` they follow."""

    way: int
    nbytes: int
    segment: int = 0
    offset: int = 0


class Data(NamedTuple):
    """What the pull `number` reads; with `Way.INLINE` the data follow."""

    number: int
    version: int
    way: int
    coded: bool
    nbytes: int
    segment: int = 0
    offset: int = 0


_FORMS = {
    PushHead: struct.Struct("<QHBBxxxxQQdQqq"),
    PullHead: struct.Struct("<QBxxxxxxxQQ"),
    IdsHead: struct.Struct("<BxxxxxxxQqq"),
    Data: struct.Struct("<QqBBxxxxxxQqq"),
}
PUSH_BYTES = _FORMS[PushHead].size
PULL_BYTES = _FORMS[PullHead].size
IDS_BYTES = _FORMS[IdsHead].size
DATA_BYTES = _FORMS[Data].size

pack_push, pack_pull, pack_ids, pack_data = (form.pack for form in _FORMS.values())
"""The fields of `PushHead` and so on, in order, as bytes: these are not made to be packed."""

_DONE = struct.Struct("<QBxxxxxxx")
pack_done, unpack_done = _DONE.pack, _DONE.unpack_from
"""The number of a push, and its stage."""
_RELEASE = struct.Struct("<QQ")
pack_release, unpack_release = _RELEASE.pack, _RELEASE.unpack_from
"""The key of a tensor, and the number of a pull that looks no more."""

_T = TypeVar("_T", PushHead, PullHead, IdsHead, Data)


def unpack(kind: type[_T], body: memoryview, start: int = 0) -> _T:
    return kind(*_FORMS[kind].unpack_from(body, start))


_ORDER = struct.Struct("<QBxxxxxxxqQ")
_PART = struct.Struct("<qQd")


class Order(NamedTuple):
    """What comes next on every shard of a tensor: requests by client and number, each with its weight."""

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
    """Return a copy of the memory of a contiguous tensor of any dtype, in a third of the time that numpy takes."""
    return ctypes.string_at(t.data_ptr(), t.nbytes)


def bytes_in(body: memoryview, start: int, nbytes: int) -> Tensor:
    """Return `nbytes` of `body` from `start` on as flat uint8, without a copy."""
    return torch.frombuffer(body, dtype=torch.uint8, offset=start, count=nbytes) if nbytes else _NONE


def values_in(body: memoryview, start: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    """Return `nbytes` of `body` from `start` on as a flat tensor of `dtype`, without a copy where that can be had."""
    if not nbytes:
        return torch.empty(0, dtype=dtype, device="cpu")
    if dtype.itemsize > _ALIGNED_BYTES:  # torch's kernels for complex128 fault on what is not aligned to 16 bytes
        return bytes_in(body, start, nbytes).clone().view(dtype)
    return torch.frombuffer(body, dtype=dtype, offset=start, count=nbytes // dtype.itemsize)
