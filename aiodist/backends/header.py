"""The header of a message between two ranks: the same eight words for shared memory, gloo and the mailbox."""

from __future__ import annotations

import hashlib
import struct
from typing import Final, NamedTuple

_FORMAT: Final = struct.Struct("<8q")
HEADER_BYTES: Final = _FORMAT.size
"""Bytes of a header, 64, so that data after a header are aligned for every dtype."""


class Header(NamedTuple):
    """Eight words of 64 bits. `kind` decides which words have a meaning, as in `core/ring.h`.

    |             | `place`                            | `extra`                              |
    |-------------|------------------------------------|--------------------------------------|
    | shm         | segment of the bytes, or -1        | their offset in the segment          |
    | gloo        |                                    | frames received from the other rank  |
    | the mailbox | where the bytes are: `DataPlace`   | sum of `MessageFlag`                 |
    """

    kind: int
    """Kind of the message. Shared memory, gloo and the mailbox have separate kinds."""
    comm: int = 0
    """Number of the communicator, or for the mailbox the sending rank."""
    tag: int = 0
    number: int = 0
    """Number of the message at the sender."""
    nbytes: int = 0
    """Bytes of the whole message."""
    place: int = -1
    extra: int = 0
    size: int = 0
    """Bytes that follow the header."""

    def pack(self) -> bytes:
        """Return the 64 bytes of the header."""
        return _FORMAT.pack(*self)

    @classmethod
    def read(cls, data: memoryview) -> Header:
        """Return the header at the start of `data`."""
        return cls._make(_FORMAT.unpack_from(data))


def comm_number(path: str) -> int:
    """Return the number of the communicator with the common name `path`."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), signed=True)
