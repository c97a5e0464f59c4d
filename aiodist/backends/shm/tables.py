"""A table is a separate memfd that each rank of a host maps, so that all see the same bytes.

A table has no name in any file system. The kernel frees a table with the last mapping and descriptor, however processes
end.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple
from weakref import finalize

from aiodist.backends.shm.memory import check_segment, reserved_fd


class TableAddress(NamedTuple):
    """The address of a table for other ranks."""

    rank: int
    """World rank that made the table."""
    number: int
    """Number among the tables of that rank."""
    fd: int
    """File descriptor in the process of that rank, for ranks in the same process.

    Open until all have mapped the table.
    """
    nbytes: int


class HostTable:
    """A table of this rank, before all ranks have mapped the table. The descriptor is open while this object lives."""

    def __init__(self, rank: int, number: int, nbytes: int) -> None:
        """Raise MemoryError unless all pages can be reserved. The bytes are 0."""
        fd, room = reserved_fd("aiodist-table", nbytes)
        self.address = TableAddress(rank, number, fd, room)
        finalize(self, os.close, fd)


def mapped(fd: int, nbytes: int) -> mmap.mmap:
    """Return the bytes of a table, or raise OSError or ValueError if `fd` is no table of `nbytes`."""
    check_segment(fd, nbytes)
    return mmap.mmap(fd, nbytes)
