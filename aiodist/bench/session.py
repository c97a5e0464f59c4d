"""What a benchmark is given: a communicator, the implementations to try on it, the peers, a barrier."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from aiodist.bench.records import Record, bandwidths
from aiodist.bench.timing import percentile, slowest, slowest_of_each

if TYPE_CHECKING:
    from aiodist.bench.peers import Peer
    from aiodist.bench.plan import Plan
    from aiodist.bench.timing import Fence
    from aiodist.communicator import Communicator


class RankFacts(NamedTuple):
    """What must be known of a rank beside its times."""

    affinity: tuple[int, ...]
    torch_threads: int


def facts() -> RankFacts:
    """Return those of this process."""
    return RankFacts(tuple(sorted(os.sched_getaffinity(0))), torch.get_num_threads())


@dataclass(frozen=True)
class Session:
    """One open communicator with what is to be tried on it, the same on every rank."""

    plan: Plan
    coll: Communicator
    impls: tuple[str, ...]
    peers: Sequence[Peer]
    fence: Fence
    """A barrier of all ranks, by the quickest means there is."""
    first: bool = True
    """What needs measuring only once is measured in the first session."""
    notes: list[str] = field(default_factory=list)
    """Lines for the title of the table: what the peers are, and why one is missing."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        found = getattr(torch, self.plan.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def keywords(self, impl: str) -> dict[str, str]:
        """Return what a call is given to use `impl`: nothing for auto and arena, as users call."""
        return {} if impl in ("auto", "arena") else {"impl": impl}

    async def timed(self, op: str, nbytes: int | None, samples: Mapping[str, Sequence[float]]) -> list[Record]:
        """Return on rank 0 a record per contender from the samples of all ranks, elsewhere nothing."""
        everything = await self.coll.gather_object((dict(samples), facts()))
        if everything is None:
            return []
        records, size = [], self.coll.size
        for name in samples:
            by_rank = [told[name] for told, _ in everything]
            longest = slowest_of_each(by_rank)
            median = statistics.median(longest)
            algorithm, bus = bandwidths(op, nbytes or 0, median, size)
            measured = median, statistics.fmean(longest), median, percentile(longest, 99), algorithm, bus
            records.append(Record(op, name, size, nbytes, *measured, *everything[slowest(by_rank)][1]))
        return records
