"""Which bytes are in flight: one writer, or any number of readers, at a time."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from aiodist.errors import BufferInFlight

__all__ = ["InFlight", "in_flight"]

Range = tuple[int, int]  # first byte, one past the last; never empty
Claimed = tuple[int, int, bool, object]  # first byte, how many, whether they are written, what keeps them alive


class InFlight:
    """The byte ranges of all operations that are not over, of all communicators of the process.

    Ranges that are written overlap nothing, so a look at the two neighbours finds a clash: O(log n). Ranges that
    are read may overlap one another; only those that begin within the longest one's length can clash.
    User code that touches a tensor by itself cannot be seen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writes: list[int] = []
        self._written: dict[int, tuple[int, object]] = {}
        """First byte to one past the last, and who writes there."""
        self._only: tuple[int, int, object] | None = None
        """The one range in flight, when there is just one and it is written: the tables are empty then."""
        self._reads: list[Range] = []
        self._readers: dict[Range, list[object]] = {}
        self._longest_read = 0

    def acquire(self, start: int, nbytes: int, writes: bool, owner: object) -> None:
        """Claim bytes for `owner`; raise `BufferInFlight`, naming who has them, when that cannot be."""
        if not nbytes:
            return
        end = start + nbytes
        with self._lock:
            if self._only is not None:
                self._written_alone()
            elif writes and not self._writes and not self._reads:
                self._only = (start, end, owner)
                return
            begun = self._writes
            at = bisect_right(begun, start) if begun else 0
            if at and self._written[begun[at - 1]][0] > start:
                raise _clash(owner, writes, self._written[begun[at - 1]][1])
            if at < len(begun) and begun[at] < end:
                raise _clash(owner, writes, self._written[begun[at]][1])
            if writes:
                if self._reads and (reader := self._read(start, end)) is not None:
                    raise _clash(owner, writes, reader)
                begun.insert(at, start)
                self._written[start] = (end, owner)
            else:
                self._add_read((start, end), owner)

    def acquire_all(self, claims: Sequence[Claimed], owner: object) -> None:
        """Claim all of them, or none where one cannot be had."""
        for i, claim in enumerate(claims):
            try:
                self.acquire(*claim[:3], owner)
            except ValueError:
                self.release_all(claims[:i])
                raise

    def release(self, start: int, nbytes: int, writes: bool) -> None:
        """Give bytes back that `acquire` claimed."""
        if not nbytes:
            return
        with self._lock:
            if self._only is not None:
                self._only = None
            elif writes:
                del self._writes[bisect_left(self._writes, start)]
                del self._written[start]
            else:
                self._drop_read((start, start + nbytes))

    def release_all(self, claims: Sequence[Claimed]) -> None:
        """Give back what `acquire_all` claimed."""
        for claim in claims:
            self.release(*claim[:3])

    def _written_alone(self) -> None:
        """Enter the range that was alone into the table."""
        assert self._only is not None
        start, end, owner = self._only
        self._writes.append(start)
        self._written[start] = (end, owner)
        self._only = None

    def __len__(self) -> int:
        return (self._only is not None) + len(self._writes) + sum(map(len, self._readers.values()))

    def _read(self, start: int, end: int) -> object | None:
        """Return who reads any of these bytes."""
        first = bisect_left(self._reads, (start - self._longest_read, 0))
        for held in self._reads[first : bisect_left(self._reads, (end, 0))]:
            if held[1] > start:
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


def _clash(owner: object, writes: bool, holder: object) -> BufferInFlight:
    verb = "write" if writes else "read"
    return BufferInFlight(f"{owner} would {verb} memory that {holder} still owns: await that first")


in_flight = InFlight()
