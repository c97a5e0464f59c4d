"""A table: a memfd of its own that each rank of a host maps, so that all see the same bytes.

It has no name in any file system. The kernel frees it with the last mapping and descriptor, however processes end.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple
from weakref import finalize

from aiodist.backends.shm.memory import check_segment, reserved_fd


class Named(NamedTuple):
    """What other ranks know a table by."""

    rank: int
    """The rank in the world that made it."""
    number: int
    """Its number among the tables of that rank."""
    fd: int
    """Its descriptor there, by which ranks of the same process map it; open until all ranks have."""
    nbytes: int


class HostTable:
    """A table that this rank made, until all ranks have mapped it: its descriptor is open while this object lives."""

    def __init__(self, rank: int, number: int, nbytes: int) -> None:
        """Raise MemoryError unless all pages can be had; their bytes are 0."""
        fd, room = reserved_fd("aiodist-table", nbytes)
        self.named = Named(rank, number, fd, room)
        finalize(self, os.close, fd)


def mapped(fd: int, nbytes: int) -> mmap.mmap:
    """Return the bytes of a table; raise OSError or ValueError if `fd` is not a table of so many."""
    check_segment(fd, nbytes)
    return mmap.mmap(fd, nbytes)
