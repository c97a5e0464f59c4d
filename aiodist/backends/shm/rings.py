"""Records from one rank to another: a ring of bytes in the sender's memory, and numbers that each tells the other.

Only the sender writes the ring, and only the receiver says how much of it may be written again. What is stored in a
ring is seen before the number that counts it: by itself where the processor keeps the order of stores, else because
the numbers travel over the socket, which delivers them after what was stored before.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiodist.backends.shm.memory import Place
from aiodist.backends.shm.neighbours import NUMBERS_BYTES, Neighbour, Neighbourhood, memory_of

__all__ = ["DRAINED", "RETURNED", "SENT", "TAKEN", "Inbox", "Numbers", "Outbox", "Record", "copy_bytes", "move_bytes"]

SENT, TAKEN, RETURNED, DRAINED, _SEGMENT, _OFFSET = range(6)
# SENT: bytes of records, ever. TAKEN: the same of the other's ring. RETURNED: bytes of short messages that were
# received. DRAINED: pieces of staged messages that were copied out. _SEGMENT, _OFFSET: where my ring lies.

_NAME = "messages"
_HEADER = struct.Struct("8q")
_LINE = 64
"""Records begin at multiples of it."""
_SKIP = 0
_NOWHERE = Place(-1, 0)


def _memmove(library: ctypes.CDLL) -> Callable[[int, int | bytes, int], None]:
    function: Any = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function  # type: ignore[no-any-return]


copy_bytes = _memmove(ctypes.PyDLL(None))
"""(to, from, count): copy a few bytes, in 0.2 us."""
move_bytes = _memmove(ctypes.CDLL(None))
"""The same for many: the GIL is free meanwhile."""


class Record(NamedTuple):
    """What one rank says to another; which of the fields mean something depends on `kind`, which is not 0."""

    kind: int
    comm: int = 0
    tag: int = 0
    number: int = 0
    nbytes: int = 0
    segment: int = -1
    offset: int = 0
    size: int = 0
    """How many bytes follow it."""

    @property
    def place(self) -> Place | None:
        """Return the place that it names."""
        return Place(self.segment, self.offset) if self.segment >= 0 else None


class Numbers:
    """What this rank and a neighbour tell each other by numbers that only grow."""

    def __init__(self, near: Neighbourhood, neighbour: Neighbour, slots: Tensor) -> None:
        """`slots` are this rank's own numbers, `NUMBERS_BYTES` for each rank, in order of ranks."""
        self._near = near
        self._neighbour = neighbour
        at = near.members.index(neighbour.rank) * NUMBERS_BYTES
        self.mine = memory_of(slots)[at : at + NUMBERS_BYTES].cast("q")
        self.theirs = memoryview(bytearray(NUMBERS_BYTES)).cast("q")
        self.met = False
        """The neighbour's are known."""

    @staticmethod
    def slots(near: Neighbourhood) -> Tensor:
        """Return memory for the numbers of one rank, and tell the others where it is."""
        return near.place(
            _NAME, NUMBERS_BYTES * len(near.members), [rank for rank in near.members if rank != near.rank]
        )

    def meet(self) -> bool:
        """Return True once the neighbour's numbers are known."""
        neighbour = self._neighbour
        if not self.met:
            neighbour.listen()
            place = neighbour.places.get(_NAME)
            if place is not None:
                if self._near.ordered:
                    at = place.offset + self._near.members.index(self._near.rank) * NUMBERS_BYTES
                    theirs = memory_of(neighbour.memory(Place(place.segment, at), NUMBERS_BYTES))
                else:
                    theirs = memoryview(neighbour.numbers(_NAME))
                self.theirs = theirs.cast("q")
                self.met = True
        return self.met

    def ring(self) -> None:
        """Have the neighbour look."""
        if not self._near.ordered:
            self._neighbour.tell({"numbers": _NAME, "are": self.mine.tolist()})
        if self.met or self.meet():
            self._neighbour.ring()


class Outbox:
    """The records for a neighbour that it has not taken yet."""

    def __init__(self, near: Neighbourhood, numbers: Numbers, nbytes: int) -> None:
        self._near = near
        self._numbers = numbers
        self._nbytes = nbytes
        self._ring: Tensor | None = None
        self._memory = memoryview(b"")
        self._base = 0

    def put(self, record: Record, data: int = 0) -> bool:
        """Write `record`, and behind it what lies at address `data`; False when there is no room now.

        Raises MemoryError where the ring itself finds no memory.
        """
        if self._ring is None:
            self._make()
        mine, size = self._numbers.mine, record.size
        sent = mine[SENT]
        need = _LINE + -(-size // _LINE) * _LINE
        at = sent % self._nbytes
        skipped = self._nbytes - at if need > self._nbytes - at else 0
        if sent + skipped + need - self._numbers.theirs[TAKEN] > self._nbytes:
            return False
        if skipped:
            _HEADER.pack_into(self._memory, at, _SKIP, 0, 0, 0, 0, 0, 0, 0)
            at = 0
        _HEADER.pack_into(self._memory, at, *record)
        if size:
            copy_bytes(self._base + at + _LINE, data, size)
        mine[SENT] = sent + skipped + need
        return True

    def _make(self) -> None:
        ring = self._near.arena.empty((self._nbytes,), torch.uint8)
        place = self._near.locate(ring)
        assert place is not None
        mine = self._numbers.mine
        mine[_SEGMENT], mine[_OFFSET] = place
        self._memory = memory_of(ring)
        self._base = ring.data_ptr()
        self._ring = ring


class Inbox:
    """The records of a neighbour that this rank has not taken yet."""

    def __init__(self, neighbour: Neighbour, numbers: Numbers, nbytes: int) -> None:
        self._neighbour = neighbour
        self._numbers = numbers
        self._nbytes = nbytes
        self._memory: memoryview | None = None
        self._base = 0
        self._need = 0

    @property
    def fill(self) -> int:
        """Return how many bytes of the ring are taken up."""
        return self._numbers.theirs[SENT] - self._numbers.mine[TAKEN]

    def first(self) -> tuple[Record, int] | None:
        """Return the oldest record and the address of what follows it; None when there is none.

        Raises BackendError where the ring cannot be mapped.
        """
        while True:
            taken = self._numbers.mine[TAKEN]
            if taken >= self._numbers.theirs[SENT]:
                return None
            if self._memory is None:
                self._map()
                assert self._memory is not None
            at = taken % self._nbytes
            record = Record._make(_HEADER.unpack_from(self._memory, at))
            if record.kind != _SKIP:
                self._need = _LINE + -(-record.size // _LINE) * _LINE
                return record, self._base + at + _LINE
            self._numbers.mine[TAKEN] = taken + self._nbytes - at

    def take(self) -> None:
        """Let go of the record that `first` returned."""
        self._numbers.mine[TAKEN] += self._need

    def _map(self) -> None:
        theirs = self._numbers.theirs
        ring = self._neighbour.memory(Place(theirs[_SEGMENT], theirs[_OFFSET]), self._nbytes)
        self._memory = memory_of(ring)
        self._base = ring.data_ptr()
