"""What travels on a control connection: frames with a length, and values as JSON. Never pickle.

A frame is `length kind number body` (unsigned 32 bits, 8 bits, signed 32 bits, `length` bytes; big endian).
`number` is the other rank of a message and the number of a request, so that the hub routes a message without
looking into it. A body is JSON, with byte strings in base64.
"""

from __future__ import annotations

import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple

MAX_FRAME: Final = 64 << 20
"""The largest body of a frame in bytes: the channel is for control, not for data."""
STRANGER_FRAME: Final = 64 << 10
"""The largest body before the other side has shown that it belongs here."""
EVERYBODY: Final = -1  # the `number` of a message to all other ranks

_HEADER: Final = struct.Struct(">IBi")
_BYTES: Final = "\0bytes"
_BYTES_TEXT: Final = json.dumps(_BYTES)


class Kind(IntEnum):
    """What a frame is; who sends it."""

    GREETING = 1  # hub: the challenge
    HELLO = 2  # rank: who I am, and the proof that I know the token
    WELCOME = 3  # hub: its own proof, and its settings
    REFUSED = 4  # hub: why not
    READY = 5  # hub: all ranks are here
    MESSAGE = 6  # both: number is the destination on the way to the hub, the source on the way from it
    REQUEST = 7  # rank: number is answered by a REPLY
    CANCEL = 8  # rank: the request is not waited for any more
    REPLY = 9  # hub
    EXIT = 10  # hub: a rank left
    CLOSING = 11  # hub: it goes, or it gives this rank up
    PING = 12  # both: still here


class WireError(ValueError):
    """The other side sent what no peer of ours sends."""


class Frame(NamedTuple):
    """One frame as it arrived."""

    kind: int
    number: int
    body: bytes


def frame(kind: Kind, number: int = 0, body: bytes = b"") -> bytes:
    """Return the bytes of a frame; raise `ValueError` when the body is over `MAX_FRAME`."""
    if len(body) > MAX_FRAME:
        raise ValueError(f"a control message of {len(body)} bytes: at most {MAX_FRAME} bytes (64 MiB) fit in one frame")
    return _HEADER.pack(len(body), kind, number) + body


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self.limit = STRANGER_FRAME
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield each frame that `data` completes; raise `WireError` when one announces more than `limit` bytes."""
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
    r"""Return `payload` as bytes: JSON's types, and bytes, bytearray or memoryview anywhere inside.

    As in JSON, tuples arrive as lists and the keys of a dict as strings. Raises `TypeError` for other types and
    `ValueError` for a payload that contains itself or holds the string that stands for bytes here.

    >>> unpack(pack({"id": b"\x00\xff", "sizes": (1, 2)}))
    {'id': b'\x00\xff', 'sizes': [1, 2]}
    """
    count = 0

    def place(value: object) -> dict[str, str]:
        nonlocal count
        if isinstance(value, bytes | bytearray | memoryview):
            count += 1
            return {_BYTES: b64encode(value).decode()}
        raise TypeError(f"{type(value).__name__} cannot travel on the control channel: JSON's types and bytes can")

    text = json.dumps(payload, default=place, separators=(",", ":"))
    if text.count(_BYTES_TEXT) != count:
        raise ValueError(f"a payload cannot hold the string {_BYTES!r}, which stands for bytes")
    return text.encode("ascii")


def unpack(body: bytes) -> Any:  # noqa: ANN401
    """Return the value that `pack` made `body` of; raise `WireError` when it did not."""
    try:
        return json.loads(
            body, object_hook=lambda found: b64decode(found[_BYTES]) if found.keys() == {_BYTES} else found
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"a body that cannot be read: {error}") from error
