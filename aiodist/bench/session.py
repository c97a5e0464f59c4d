"""The session of a benchmark: a communicator, implementations, peers, a barrier."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from aiodist.bench.records import Record, bandwidths
from aiodist.bench.timing import percentile, slowest, slowest_of_each

if TYPE_CHECKING:
    from aiodist.bench.peers import OtherLibrary
    from aiodist.bench.plan import Plan
    from aiodist.bench.timing import Fence
    from aiodist.communicator import Communicator


def facts() -> tuple[tuple[int, ...], int]:
    """Return the cores of this rank and the number of torch's threads, on which times depend."""
    return tuple(sorted(os.sched_getaffinity(0))), torch.get_num_threads()


@dataclass(frozen=True)
class Session:
    """An open communicator and the contenders on it, the same on every rank."""

    plan: Plan
    coll: Communicator
    impls: tuple[str, ...]
    peers: Sequence[OtherLibrary]
    fence: Fence
    """The fastest barrier of all ranks."""
    first: bool = True
    """True in the first session; figures that do not depend on the backend are measured there."""
    notes: list[str] = field(default_factory=list)
    """Lines for the title of the table, such as versions of the peers."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        found = getattr(torch, self.plan.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def keywords(self, impl: str) -> dict[str, str]:
        """Return the keywords of a call with `impl`; auto and arena have none."""
        return {} if impl in ("auto", "arena") else {"impl": impl}

    async def timed(self, op: str, nbytes: int | None, samples: Mapping[str, Sequence[float]]) -> list[Record]:
        """Return on rank 0 a record for each contender from the samples of all ranks, on others an empty list."""
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
