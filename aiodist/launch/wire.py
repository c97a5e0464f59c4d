"""Frames between the launcher and the guard of a rank: five bytes (kind, length), then the payload.

The guard says HELLO, the launcher answers START, the guard STARTED; then OUT and ERR carry what the rank
writes, EXIT how it ended and DONE that nothing follows. The launcher sends SIGNAL, and for each WANT a piece of
INPUT (an empty one at its end), so that no more is read than the rank takes. Whoever loses the connection ends
its work.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Literal, Self

from aiodist.errors import LaunchError

__all__ = ["HEADER", "Exit", "Hello", "Kind", "Start", "Started", "Stdin", "header", "pack"]

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
    WANT = 9
    INPUT = 10


Stdin = Literal["null", "same", "sent"]
"""What a rank reads: nothing, what its guard would, or what the launcher sends."""


@dataclass(frozen=True)
class _Message:
    """A frame whose payload is a JSON object."""

    def encode(self) -> bytes:
        """Return the payload."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Return what the payload says; raise `ValueError` or `TypeError` when it is not of this kind."""
        return cls(**json.loads(payload))


@dataclass(frozen=True)
class Hello(_Message):
    """The guard of `rank` is here."""

    rank: int
    size: int
    token: str = field(repr=False)


@dataclass(frozen=True)
class Start(_Message):
    """What the rank runs: its argument vector, and the variables it has beside those it inherits."""

    argv: list[str]
    environ: dict[str, str]
    stdin: Stdin = "null"


@dataclass(frozen=True)
class Started(_Message):
    """The rank runs, in a session of its own whose id is `pid`."""

    pid: int


@dataclass(frozen=True)
class Exit(_Message):
    """How the rank ended: its exit code, or minus the signal; `told`: something asked it to stop before."""

    code: int
    told: bool


def pack(kind: Kind, payload: bytes = b"") -> bytes:
    """Return the frame."""
    return HEADER.pack(kind, len(payload)) + payload


def header(data: bytes | bytearray) -> tuple[Kind, int]:
    """Return kind and length that the five bytes announce; raise `LaunchError` when they are no header."""
    kind, length = HEADER.unpack(data)
    if kind not in set(Kind) or length > LONGEST:
        raise LaunchError(f"a peer sent kind {kind} with {length} bytes: expected a frame of the launcher")
    return Kind(kind), length
