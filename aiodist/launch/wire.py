"""Frames between the launcher and the guard of a rank: five bytes (kind, length), then the payload.

The guard says HELLO, the launcher answers START, the guard STARTED; then OUT and ERR carry what the rank
writes, EXIT how it ended and DONE that nothing follows. The launcher sends SIGNAL, and for each WANT a piece of
INPUT (an empty one at its end), so that no more is read than the rank takes. The side that loses the connection
ends its work.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from aiodist.errors import LaunchError

HEADER = struct.Struct("!BI")
LONGEST = 16 << 20
_SILENCE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 4),
    (socket.TCP_USER_TIMEOUT, 30_000),
)


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1  # [rank, size, token]
    START = 2  # the fields of `Start`
    STARTED = 3  # [id of the process and of its session, where that id means it: see `aiodist.machine`]
    OUT = 4
    ERR = 5
    EXIT = 6  # [exit code or minus the signal, whether something asked it to stop before]
    DONE = 7
    SIGNAL = 8
    WANT = 9
    INPUT = 10


Stdin = Literal["null", "same", "sent"]
"""What a rank reads: nothing, what its guard would, or what the launcher sends."""


@dataclass(frozen=True)
class Start:
    """What the rank runs: its argument vector, and the variables it has beside those it inherits."""

    argv: list[str]
    environ: dict[str, str]
    stdin: Stdin = "null"
    folder: str | None = None  # its working directory; None: that of its guard


def pack(kind: Kind, payload: object = b"") -> bytes:
    """Return the frame; a payload that is no bytes travels as JSON."""
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return HEADER.pack(kind, len(body)) + body


def header(data: bytes | bytearray) -> tuple[Kind, int]:
    """Return kind and length that the five bytes announce; raise `LaunchError` when they are no header."""
    kind, length = HEADER.unpack(data)
    if kind not in set(Kind) or length > LONGEST:
        raise LaunchError(f"a peer sent kind {kind} with {length} bytes: expected a frame of the launcher")
    return Kind(kind), length


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice within half a minute that the other end's host is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _SILENCE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
