"""The file of one rank while it is written: each part is checked and written on the thread for files."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from time import perf_counter, thread_time

from torch import Tensor

from aiodist.checkpoints.folders import write_all
from aiodist.checkpoints.manifest import FileFacts
from aiodist.checkpoints.safetensors_file import Layout, TensorEntry

_WAITS = 4.0


class Output:
    """Writes `layout`, of which `buffer` has the tensors as bytes; all but `close` runs on the thread for files.

    Both the checksum of a part and its writing leave the GIL alone.
    """

    def __init__(self, layout: Layout, buffer: Tensor) -> None:
        self._layout = layout
        self._data = buffer.numpy().data
        self._at = 0
        self._number = 0
        self._crcs = [0] * len(layout.entries)
        self._fd: int | None = None
        self._lock = Lock()
        """Of the two below."""
        self._used = False
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self._layout.nbytes - len(self._layout.header)

    def open(self, path: Path) -> None:
        """Make the file, which must not be there, and write its header."""
        with self._using():
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            write_all(self._fd, memoryview(self._layout.header))

    def write(self, nbytes: int) -> float:
        """Write the next `nbytes` of the tensors, or what is left of them; return the seconds that it took.

        Where the thread waited longer, for a disk or a core, these are at most four times those of CPU.
        """
        began, used = perf_counter(), thread_time()
        with self._using() as fd:
            stop = min(self._at + nbytes, self.nbytes)
            self._check(stop)
            write_all(fd, self._data[self._at : stop])
            self._at = stop
        return min(perf_counter() - began, _WAITS * (thread_time() - used))

    def _check(self, stop: int) -> None:
        """Add the bytes up to `stop` to the checksums of their tensors."""
        at, header = self._at, len(self._layout.header)
        while self._number < len(self._crcs):
            entry = self._layout.entries[self._number]
            end = min(stop, entry.offset - header + entry.nbytes)
            self._crcs[self._number] = zlib.crc32(self._data[at:end], self._crcs[self._number])
            at = end
            if end < entry.offset - header + entry.nbytes:
                break
            self._number += 1

    def sync(self) -> None:
        """Return when all is on the disk."""
        with self._using() as fd:
            os.fsync(fd)

    @contextmanager
    def _using(self) -> Iterator[int]:
        """Use the file, which `close` leaves open meanwhile."""
        with self._lock:
            if self._closed:
                raise ValueError("the file is closed")
            self._used = True
        try:
            yield -1 if self._fd is None else self._fd
        finally:
            with self._lock:
                self._used = False
                if self._closed:
                    self._close()

    def close(self) -> None:
        """Close the file, once a use that is under way is over; waits for nothing."""
        with self._lock:
            self._closed = True
            if not self._used:
                self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def facts(self) -> tuple[FileFacts, list[TensorEntry]]:
        """Return what the manifest says of the file, which is written."""
        header = self._layout.header
        entries = [replace(entry, crc=crc) for entry, crc in zip(self._layout.entries, self._crcs, strict=True)]
        return FileFacts(self._layout.nbytes, len(header), zlib.crc32(header)), entries
