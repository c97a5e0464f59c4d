"""Frames: the format of all control connections, between launcher, guards, hub and ranks.

A frame is `length kind number body`: unsigned 32 bits, 8 bits, signed 32 bits and `length` bytes, big endian. `number`
is a rank, a request, a signal or a count of bytes, so the hub routes a message without reading its body. A body is JSON
with byte strings in base64, or plain bytes for output and input. It is never a pickle.
"""

from __future__ import annotations

import json
import socket
import struct
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple

MAX_FRAME: Final = 64 << 20
"""Longest body of a frame, in bytes: the connections are for control, not for data."""
STRANGER_FRAME: Final = 64 << 10
"""Longest body before the handshake has succeeded, in bytes."""
EVERYBODY: Final = -1
"""The `number` of a message to all other ranks."""

_HEADER: Final = struct.Struct(">IBi")
_BYTES: Final = "\0bytes"
_BYTES_TEXT: Final = json.dumps(_BYTES)
_KEEP_ALIVE: Final = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 4),
    (socket.TCP_USER_TIMEOUT, 30_000),
)


class FrameKind(IntEnum):
    """The kinds of frames, with the sender and the content."""

    # The handshake.
    GREETING = 1  # listener: protocol, challenge
    HELLO = 2  # caller: rank, size, proof that it knows the token, challenge
    WELCOME = 3  # listener: proof, settings
    REFUSED = 4  # listener: code, reason
    # Hub and rank.
    READY = 5  # hub: all ranks have joined
    MESSAGE = 6  # both: `number` is the destination towards the hub, and the source from the hub
    REQUEST = 7  # rank: a REPLY has the same `number`
    CANCEL = 8  # rank: no reply to the request is awaited any more
    REPLY = 9  # hub: error or None, value
    EXIT = 10  # hub: a rank has left
    CLOSING = 11  # hub: the reason of the close
    PING = 12  # both: a heartbeat
    # Launcher and guard.
    START = 13  # launcher: the fields of `Start`
    STARTED = 14  # guard: process id, and the table of processes where the id is valid
    OUT = 15  # guard: output of the rank
    ERR = 16  # guard: error output of the rank
    TAKEN = 17  # launcher: `number` bytes of output are written
    WANT = 18  # guard: the rank takes more input
    INPUT = 19  # launcher: input, empty at its end
    SIGNAL = 20  # launcher: a signal for the rank
    ENDED = 21  # guard: exit code or minus the signal, True if the rank was asked to stop before
    DONE = 22  # guard: no output follows


class WireError(ValueError):
    """The peer has sent a frame that the protocol does not allow."""


class Frame(NamedTuple):
    """A received frame."""

    kind: int
    number: int
    body: bytes


def frame(kind: FrameKind, number: int = 0, body: bytes = b"") -> bytes:
    """Return the bytes of a frame, or raise `ValueError` if the body is longer than `MAX_FRAME`."""
    if len(body) > MAX_FRAME:
        raise ValueError(f"a control message of {len(body)} bytes: at most {MAX_FRAME} bytes (64 MiB) fit in one frame")
    return _HEADER.pack(len(body), kind, number) + body


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self.limit = STRANGER_FRAME
        """Longest body that is accepted, in bytes."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield each frame that `data` completes, or raise `WireError` if a frame is longer than `limit`.

        Frames that the caller does not take remain for the next call.
        """
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            length, kind, number = _HEADER.unpack_from(self._buffer)
            if length > self.limit:
                raise WireError(f"announced a frame of {length} bytes, at most {self.limit} were expected")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield Frame(kind, number, body)


def pack(payload: Any) -> bytes:  # noqa: ANN401  (JSON has no better name)
    r"""Return `payload` as bytes: JSON's types, with bytes, bytearray or memoryview anywhere inside.

    As in JSON, tuples arrive as lists and the keys of a dict as strings. Raises `TypeError` for other types, and
    `ValueError` for a payload that contains itself or the string that marks bytes.

    >>> unpack(pack({"id": b"\x00\xff", "sizes": (1, 2)}))
    {'id': b'\x00\xff', 'sizes': [1, 2]}
    """
    count = 0

    def place(value: object) -> dict[str, str]:
        nonlocal count
        if isinstance(value, bytes | bytearray | memoryview):
            count += 1
            return {_BYTES: b2a_base64(value, newline=False).decode()}
        raise TypeError(f"{type(value).__name__} cannot travel on the control channel: JSON's types and bytes can")

    text = json.dumps(payload, default=place, separators=(",", ":"))
    if text.count(_BYTES_TEXT) != count:
        raise ValueError(f"a payload cannot hold the string {_BYTES!r}, which stands for bytes")
    return text.encode("ascii")


def unpack(body: bytes) -> Any:  # noqa: ANN401
    """Return the value that `pack` has packed, or raise `WireError` for another body."""
    try:
        return json.loads(
            body, object_hook=lambda found: a2b_base64(found[_BYTES]) if found.keys() == {_BYTES} else found
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"a body that cannot be read: {error}") from error


def set_options(sock: socket.socket) -> None:
    """Send frames without delay, and end the connection within 30 s if the host of the peer disappears.

    The kernel answers for a stopped process, but only until its buffer is full. So a sender limits its bytes in flight.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
