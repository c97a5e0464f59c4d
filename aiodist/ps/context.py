"""What the client and the server of one rank share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.shm import Neighbourhood
from aiodist.backends.shm.memory import Place
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

    def shares_memory(self, rank: int) -> bool:
        """Return whether this rank and `rank` can look into one another's arena."""
        return self.near is not None and self.world_ranks[rank] in self.near.neighbours

    def way_to(self, rank: int, t: Tensor) -> tuple[Way, Place]:
        """Return how `t` gets to another rank, and where it lies in this rank's arena."""
        if t.nbytes <= self.coalescer.inline_bytes:
            return Way.INLINE, _NOWHERE
        place = self.near.locate(t) if self.near is not None and self.shares_memory(rank) else None
        return (Way.MESSAGE, _NOWHERE) if place is None else (Way.MEMORY, place)

    def memory(self, rank: int, segment: int, offset: int, nbytes: int) -> Tensor:
        """Return bytes of another rank's arena; raise BackendError for a place that it never told of."""
        assert self.near is not None
        return self.near.neighbours[self.world_ranks[rank]].memory(Place(segment, offset), nbytes)

    def ring(self, rank: int) -> None:
        """Wake the progress thread of `rank` if it shares memory with us and sleeps."""
        if self.near is not None and self.shares_memory(rank):
            self.near.neighbours[self.world_ranks[rank]].ring()

    def lost(self, rank: int) -> AiodistError:
        """Return why nothing can be had from `rank`."""
        known = self.gone.get(rank)
        text = f"server {rank} of parameter server {self.name!r} is gone"
        return PeerLost(f"{text}: {known.args[0] if known else 'nothing is known of it'}", lost=rank, rank=self.rank)
