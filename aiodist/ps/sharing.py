"""How data travel to another rank, and memory that ranks read in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from aiodist.backends.shm import Neighbourhood
from aiodist.backends.shm.memory import Place
from aiodist.backends.shm.neighbours import Neighbour
from aiodist.ps.wire import Way

_INLINE = Way.INLINE, Place(0, 0)
_MESSAGE = Way.MESSAGE, Place(0, 0)


class SharedMemory:
    """The memory that this rank reads in place: arenas of ranks of its host, and tensors that it sends to itself."""

    def __init__(self, rank: int, world_ranks: Sequence[int], near: Neighbourhood | None, inline_bytes: int) -> None:
        """`near` are the ranks of the host, or None. Data up to `inline_bytes` travel in the entry."""
        self._rank = rank
        self._world_ranks = world_ranks
        self._near = near
        self._inline_bytes = inline_bytes
        self._own: dict[int, Tensor] = {}
        """Tensors that this rank has sent to itself, by number."""
        self._numbers = count()

    def way_to(self, rank: int, t: Tensor, *, look: bool = True) -> tuple[Way, Place]:
        """Return how `t` travels to a rank, and its place if the rank reads it there.

        The place is in this rank's arena. A tensor for this rank itself may be anywhere, and is read once. If `look` is
        False, no other rank reads in place.
        """
        if t.nbytes <= self._inline_bytes:
            return _INLINE
        if rank == self._rank:
            number = next(self._numbers)
            self._own[number] = t
            return Way.MEMORY, Place(0, number)
        near = self._neighbour(rank) if look else None
        place = None if near is None or self._near is None else self._near.locate(t)
        return _MESSAGE if place is None else (Way.MEMORY, place)

    def find(self, rank: int, segment: int, offset: int, nbytes: int) -> Tensor:
        """Return a rank's memory at a place, flat uint8. Raises BackendError for an unknown place."""
        if rank == self._rank:
            return self._own.pop(offset).view(torch.uint8)[:nbytes]
        near = self._neighbour(rank)
        assert near is not None
        return near.memory(Place(segment, offset), nbytes)

    def _neighbour(self, rank: int) -> Neighbour | None:
        return None if self._near is None else self._near.neighbours.get(self._world_ranks[rank])

    def ring(self, rank: int) -> None:
        """Wake the progress thread of a rank that shares memory with this rank, if the thread sleeps."""
        if (near := self._neighbour(rank)) is not None:
            near.ring()
