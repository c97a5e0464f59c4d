"""Contenders take turns; what their samples say is that of the slowest rank."""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

WARMUPS = 10
OVERWRITTEN_BYTES = 64 << 10
"""From so many bytes on every rank overwrites its tensor before each timed call."""


@dataclass(frozen=True)
class Contender:
    """One way to do an operation: `once` does it, or returns what is to be awaited."""

    name: str
    once: Callable[[], Any]
    awaited: bool = False
    overwrite: Callable[[], Any] | None = None
    """Writes this rank's tensor anew before each timed call, outside the timed part.

    Without it a call finds in the core's cache what the call before left there; a program has new data each time.
    """


@dataclass(frozen=True)
class Pace:
    """How often: `repeat` samples of `batch` operations each, with one pair of clock readings around them."""

    repeat: int
    batch: int
    warmups: int = WARMUPS
    leads: int = 0
    """Operations at the start of each sample that are not timed, where a contender disturbs the one after it."""


def pace(nbytes: int, repeat: int | None) -> Pace:
    """Return how often an operation of so many bytes is done; reading the clock must not be what is measured."""
    paces = ((4 << 10, 100, 40), (OVERWRITTEN_BYTES - 1, 20, 40), (1 << 20, 1, 100))
    batch, usual = next(((batch, usual) for limit, batch, usual in paces if nbytes <= limit), (1, 20))
    return Pace(repeat or usual, batch)


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that so many percent do not exceed.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile(range(1, 101), 99)
    (2.0, 99)
    """
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def slowest_of_each(samples_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return how long the slowest rank took for each sample, which all began together.

    It need not be the same one each time. A rank that took no part has no samples.

    >>> slowest_of_each([[1.0, 3.0], [2.0, 1.0], []])
    [2.0, 3.0]
    """
    return [max(sample) for sample in zip(*filter(None, samples_by_rank), strict=True)]


def slowest(samples_by_rank: Sequence[Sequence[float]]) -> int:
    """Return the rank whose median is the largest."""
    medians = [statistics.median(samples) if samples else -math.inf for samples in samples_by_rank]
    return medians.index(max(medians))


Fence = Callable[[], Awaitable[None]]  # a barrier of all ranks


async def interleaved(contenders: Sequence[Contender], fence: Fence, pace: Pace) -> Mapping[str, list[float]]:
    """Return seconds per operation of each, a list of samples by name, after warming up.

    Every sample begins at a barrier of all ranks. The contenders take turns, each round the other way about, so
    that what disturbs the machine for a while disturbs them all.
    """
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(pace.warmups + pace.repeat):
        for contender in contenders if turn % 2 else reversed(contenders):
            await fence()
            for _ in range(pace.leads):
                await _timed(contender)
            found = await _sample(contender, fence, pace.batch)
            if turn >= pace.warmups:
                samples[contender.name].append(found)
    return samples


async def _sample(contender: Contender, fence: Fence, batch: int) -> float:
    """Return the seconds of one operation, on average over so many."""
    if contender.overwrite is None:
        return await _timed(contender, batch) / batch
    seconds = []
    for _ in range(batch):
        await fence()
        contender.overwrite()
        await fence()
        seconds.append(await _timed(contender))
    return statistics.fmean(seconds)


async def _timed(contender: Contender, count: int = 1) -> float:
    """Return the seconds that so many operations take, one after the other."""
    once = contender.once
    began = perf_counter()
    if contender.awaited:
        for _ in range(count):
            await once()
    else:
        for _ in range(count):
            once()
    return perf_counter() - began
