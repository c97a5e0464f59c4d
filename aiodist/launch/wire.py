"""Frames between the launcher and the guard of a rank: five bytes (kind, length), then the payload.

The guard says HELLO, the launcher answers START, the guard STARTED; then OUT and ERR carry what the rank
writes, EXIT how it ended and DONE that nothing follows. The launcher sends SIGNAL; whoever loses the connection ends its work.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, field
from enum import IntEnum

from aiodist.errors import LaunchError

__all__ = ["HEADER", "Exit", "Hello", "Kind", "Start", "Started", "header", "pack"]

HEADER = struct.Struct("!BI")
LONGEST = 16 << 20


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1
    START = 2
    STARTED = 3
    OUT = 4
    ERR = 5
    EXIT = 6
    DONE = 7
    SIGNAL = 8


@dataclass(frozen=True)
class _Message:
    """A frame whose payload is a JSON object."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True)
class Hello(_Message):
    """The guard of `rank` is here."""

    rank: int
    size: int
    token: str = field(repr=False)

    @classmethod
    def decode(cls, payload: bytes) -> Hello:
        return cls(**json.loads(payload))


@dataclass(frozen=True)
class Start(_Message):
    """What the rank runs: its argument vector, and the variables it has beside those it inherits."""

    argv: list[str]
    environ: dict[str, str]

    @classmethod
    def decode(cls, payload: bytes) -> Start:
        return cls(**json.loads(payload))


@dataclass(frozen=True)
class Started(_Message):
    """The rank runs, in a session of its own whose id is `pid`."""

    pid: int

    @classmethod
    def decode(cls, payload: bytes) -> Started:
        return cls(**json.loads(payload))


@dataclass(frozen=True)
class Exit(_Message):
    """How the rank ended: its exit code, or minus the signal; `told`: something asked it to stop before."""

    code: int
    told: bool

    @classmethod
    def decode(cls, payload: bytes) -> Exit:
        return cls(**json.loads(payload))


def pack(kind: Kind, payload: bytes = b"") -> bytes:
    """Return the frame."""
    return HEADER.pack(kind, len(payload)) + payload


def header(data: bytes) -> tuple[Kind, int]:
    """Return kind and length that the five bytes announce; raise `LaunchError` when they are no header."""
    kind, length = HEADER.unpack(data)
    if kind not in set(Kind) or length > LONGEST:
        raise LaunchError(f"a peer sent kind {kind} with {length} bytes: expected a frame of the launcher")
    return Kind(kind), length
