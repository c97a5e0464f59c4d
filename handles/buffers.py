"""Which bytes are in flight: one writer, or any number of readers, at a time (H9)."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort

from aiodist.errors import BufferInFlight

__all__ = ["InFlight", "in_flight"]

Range = tuple[int, int]  # first byte, one past the last; never empty


class InFlight:
    """The byte ranges of all operations that are not over, of all communicators of the process.

    Ranges that are written overlap nothing, so a look at the two neighbours finds a clash: O(log n). Ranges that
    are read may overlap one another; only those that begin within the longest one's length can clash.
    User code that touches a tensor by itself cannot be seen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writes: list[Range] = []
        self._reads: list[Range] = []
        self._readers: dict[Range, list[object]] = {}
        self._longest_read = 0
        self._writer: dict[Range, object] = {}

    def acquire(self, start: int, nbytes: int, writes: bool, owner: object) -> None:
        """Claim bytes for `owner`; raise `BufferInFlight`, naming who has them, when that cannot be."""
        if nbytes == 0:
            return
        wanted = (start, start + nbytes)
        with self._lock:
            clash = self._written(wanted)
            if clash is None and writes and self._reads:
                clash = self._read(wanted)
            if clash is not None:
                raise BufferInFlight(
                    f"{owner} would {'write' if writes else 'read'} memory that {clash} still owns: await that first"
                )
            if writes:
                insort(self._writes, wanted)
                self._writer[wanted] = owner
            else:
                self._add_read(wanted, owner)

    def release(self, start: int, nbytes: int, writes: bool) -> None:
        """Give bytes back that `acquire` claimed."""
        if nbytes == 0:
            return
        held = (start, start + nbytes)
        with self._lock:
            if writes:
                del self._writes[bisect_left(self._writes, held)]
                del self._writer[held]
            else:
                self._drop_read(held)

    def __len__(self) -> int:
        return len(self._writes) + sum(map(len, self._readers.values()))

    def _written(self, wanted: Range) -> object | None:
        """Return who writes any of `wanted`: ranges written are disjoint, so neighbours tell."""
        writes = self._writes
        i = bisect_right(writes, wanted)
        if i and writes[i - 1][1] > wanted[0]:
            return self._writer[writes[i - 1]]
        if i < len(writes) and writes[i][0] < wanted[1]:
            return self._writer[writes[i]]
        return None

    def _read(self, wanted: Range) -> object | None:
        first = bisect_left(self._reads, (wanted[0] - self._longest_read, 0))
        for held in self._reads[first : bisect_left(self._reads, (wanted[1], 0))]:
            if held[1] > wanted[0]:
                return self._readers[held][0]
        return None

    def _add_read(self, wanted: Range, owner: object) -> None:
        if (readers := self._readers.get(wanted)) is not None:
            readers.append(owner)
            return
        self._readers[wanted] = [owner]
        insort(self._reads, wanted)
        self._longest_read = max(self._longest_read, wanted[1] - wanted[0])

    def _drop_read(self, held: Range) -> None:
        readers = self._readers[held]
        readers.pop(0)  # most likely the one that is over: the oldest
        if readers:
            return
        del self._readers[held]
        del self._reads[bisect_left(self._reads, held)]
        if not self._reads:
            self._longest_read = 0


in_flight = InFlight()
