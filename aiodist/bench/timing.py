"""Contenders in turns, and the samples of the slowest rank."""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

WARMUPS = 10
OVERWRITTEN_BYTES = 64 << 10
"""Bytes from which every rank overwrites its tensor before each timed call."""
Fence = Callable[[], Awaitable[None]]  # a barrier of all ranks


@dataclass(frozen=True)
class Contender:
    """A call under measurement: `once` runs the operation, or returns an awaitable."""

    name: str
    once: Callable[[], Any]
    awaited: bool = False
    overwrite: Callable[[], Any] | None = None
    """Overwrites this rank's tensor before each timed call, outside the timed part.

    Without this, a call would find the result of the call before in the cache; a program has new data each time.
    """


@dataclass(frozen=True)
class Pace:
    """The number of samples, `repeat`, each of `batch` operations between two clock readings."""

    repeat: int
    batch: int
    warmups: int = WARMUPS
    leads: int = 0
    """Operations before each sample that are not timed, for contenders that disturb the next one."""


def pace(nbytes: int, repeat: int | None) -> Pace:
    """Return the pace for operations of `nbytes`; small ones come in batches, as reading the clock takes time."""
    paces = ((4 << 10, 100, 40), (OVERWRITTEN_BYTES - 1, 20, 40), (1 << 20, 1, 100))
    batch, usual = next(((batch, usual) for limit, batch, usual in paces if nbytes <= limit), (1, 20))
    return Pace(repeat or usual, batch)


async def interleaved(contenders: Sequence[Contender], fence: Fence, pace: Pace) -> Mapping[str, list[float]]:
    """Return seconds per operation, a list of samples by name, after the warm-ups.

    Every sample starts at a barrier of all ranks. The contenders take turns, every other round in reverse, so that a
    disturbance of the machine affects them all.
    """
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(pace.warmups + pace.repeat):
        for contender in contenders if turn % 2 else reversed(contenders):
            await fence()
            await _timed(contender, pace.leads)
            if contender.overwrite is None:
                seconds = await _timed(contender, pace.batch) / pace.batch
            else:
                seconds = 0.0
                for _ in range(pace.batch):
                    await fence()
                    contender.overwrite()
                    await fence()
                    seconds += await _timed(contender) / pace.batch
            if turn >= pace.warmups:
                samples[contender.name].append(seconds)
    return samples


async def _timed(contender: Contender, count: int = 1) -> float:
    """Return the seconds of `count` operations, one after the other."""
    once = contender.once
    began = perf_counter()
    if contender.awaited:
        for _ in range(count):
            await once()
    else:
        for _ in range(count):
            once()
    return perf_counter() - began


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the percentile of samples, by nearest rank.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile(range(1, 101), 99)
    (2.0, 99)
    """
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def slowest_of_each(samples_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of the slowest rank for each sample, which all ranks began together.

    A rank that did not take part has no samples.

    >>> slowest_of_each([[1.0, 3.0], [2.0, 1.0], []])
    [2.0, 3.0]
    """
    return [max(sample) for sample in zip(*filter(None, samples_by_rank), strict=True)]


def slowest(samples_by_rank: Sequence[Sequence[float]]) -> int:
    """Return the rank with the largest median."""
    medians = [statistics.median(samples) if samples else -math.inf for samples in samples_by_rank]
    return medians.index(max(medians))
