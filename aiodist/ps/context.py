"""What the client and the server of one rank share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.shm import Neighbourhood
from aiodist.backends.shm.memory import Place
from aiodist.backends.shm.neighbours import Neighbour
from aiodist.codecs import Codec
from aiodist.errors import AiodistError, PeerLost
from aiodist.handles import Progress
from aiodist.ps.coalescer import Coalescer
from aiodist.ps.consistency import Policy
from aiodist.ps.log import Log
from aiodist.ps.pool import Pool
from aiodist.ps.rules import Rule
from aiodist.ps.service import Service
from aiodist.ps.wire import Way

_NOWHERE = Place(0, 0)


@dataclass(eq=False)
class Context:
    """One rank of a parameter server."""

    name: str
    rank: int
    servers: tuple[int, ...]
    """Ranks, in order."""
    workers: tuple[int, ...]
    world_ranks: Sequence[int]
    """The ranks' numbers in the world."""
    uids: Sequence[str]
    """Names of the ranks' clients, which they keep in other communicators."""
    log: Log | None
    """What this rank pushes, kept for servers that die; None: nothing is."""
    rules: Sequence[Rule]
    """By their numbers on the wire: the same on all ranks."""
    policy: Policy
    codec: Codec | None
    pull_codec: Codec | None
    progress: Progress
    service: Service
    pool: Pool
    near: Neighbourhood | None
    counts: defaultdict[str, Any] = field(default_factory=lambda: defaultdict(int))
    """Of `ParameterServerStatistics`, those that are counted as things happen."""
    saved: tuple[int, str] | None = None
    """How many checkpoints there were, and the folder of the last."""
    gone: dict[int, AiodistError] = field(default_factory=dict)
    """The ranks that died, and how."""
    coalescer: Coalescer = field(init=False)
    _shown: dict[int, Tensor] = field(default_factory=dict, init=False)
    _shown_numbers: count[int] = field(default_factory=count, init=False)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes to the count of that name."""
        began = perf_counter()
        try:
            yield
        finally:
            self.counts[name] += perf_counter() - began

    def decoded(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        """Return what a client has encoded, as a flat tensor; in any thread. ValueError where nothing is encoded."""
        if self.codec is None:
            raise ValueError("a code, and no codec: expected plain data")
        with self.timed("decode_seconds"):
            return self.codec.decode(code, dtype, numel)

    def living(self) -> list[int]:
        """Return the servers that are there."""
        return [rank for rank in self.servers if rank not in self.gone]

    def way_to(self, rank: int, t: Tensor, *, look: bool = True) -> tuple[Way, Place]:
        """Return how `t` gets to another rank, and where it finds it, if it may `look`: once, where that is this rank.

        That is in this rank's arena, or, for this rank itself, anywhere.
        """
        if t.nbytes <= self.coalescer.inline_bytes:
            return Way.INLINE, _NOWHERE
        if rank == self.rank:
            number = next(self._shown_numbers)
            self._shown[number] = t
            return Way.MEMORY, Place(0, number)
        near = self._neighbour(rank) if look else None
        place = None if near is None or self.near is None else self.near.locate(t)
        return (Way.MESSAGE, _NOWHERE) if place is None else (Way.MEMORY, place)

    def memory(self, rank: int, segment: int, offset: int, nbytes: int) -> Tensor:
        """Return what another rank lets us look at, flat uint8; raise BackendError for a place that it never told."""
        if rank == self.rank:
            return self._shown.pop(offset).view(torch.uint8)[:nbytes]
        near = self._neighbour(rank)
        assert near is not None
        return near.memory(Place(segment, offset), nbytes)

    def _neighbour(self, rank: int) -> Neighbour | None:
        """Return the rank as one that shares memory with us, if it does."""
        return None if self.near is None else self.near.neighbours.get(self.world_ranks[rank])

    def ring(self, rank: int) -> None:
        """Wake the progress thread of `rank` if it shares memory with us and sleeps."""
        if (near := self._neighbour(rank)) is not None:
            near.ring()

    def lost(self, rank: int) -> AiodistError:
        """Return why nothing can be had from `rank`."""
        known = self.gone.get(rank)
        text = f"server {rank} of parameter server {self.name!r} is gone"
        return PeerLost(f"{text}: {known.args[0] if known else 'nothing is known of it'}", lost=rank, rank=self.rank)
