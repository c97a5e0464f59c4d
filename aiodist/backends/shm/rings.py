"""Records from one rank to another: a ring of bytes in the sender's memory, and numbers that each tells the other.

The compiled core reads and writes them (`core/ring.h`); here is where they lie.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiodist._core import NUMBERS_BYTES, Rings
from aiodist.backends.shm.memory import Place
from aiodist.backends.shm.neighbours import Neighbour, Neighbourhood, memory_of

_NAME = "messages"


def _memmove() -> Callable[[int, int, int], None]:
    function: Any = ctypes.CDLL(None).memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function  # type: ignore[no-any-return]


move_bytes = _memmove()
"""(to, from, count): copy many bytes; the GIL is free meanwhile."""


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


def numbers_for(near: Neighbourhood) -> Tensor:
    """Return memory for the numbers of one rank, `NUMBERS_BYTES` for each of all, and tell the others where it is."""
    return near.place(_NAME, NUMBERS_BYTES * len(near.members), [rank for rank in near.members if rank != near.rank])


def rings_with(near: Neighbourhood, rank: int, numbers: Tensor, nbytes: int) -> Rings:
    """Return the rings, of `nbytes` each, between this rank and `rank`; `numbers` are this rank's."""
    at = near.members.index(rank) * NUMBERS_BYTES
    return Rings(memory_of(numbers)[at : at + NUMBERS_BYTES], nbytes)


def meet(rings: Rings, near: Neighbourhood, neighbour: Neighbour) -> bool:
    """Return True once the neighbour's numbers are known."""
    if not rings.met:
        neighbour.listen()
        place = neighbour.places.get(_NAME)
        if place is None:
            return False
        at = place.offset + near.members.index(near.rank) * NUMBERS_BYTES
        rings.meet(memory_of(neighbour.memory(Place(place.segment, at), NUMBERS_BYTES)))
    return True


def open_ring(rings: Rings, near: Neighbourhood, nbytes: int) -> None:
    """Make this rank's ring; raise MemoryError where there is no memory for it."""
    ring = near.arena.empty((nbytes,), torch.uint8)
    place = near.locate(ring)
    assert place is not None
    rings.open(memory_of(ring), *place)


def map_ring(rings: Rings, neighbour: Neighbour, nbytes: int) -> None:
    """Map the neighbour's ring, in which there is something; raise BackendError where that cannot be."""
    rings.map(memory_of(neighbour.memory(Place(rings.segment, rings.offset), nbytes)))
