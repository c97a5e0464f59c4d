"""Contenders take turns; what their samples say is that of the slowest rank."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

__all__ = [
    "WARMUPS",
    "Contender",
    "Figures",
    "Pace",
    "figures",
    "interleaved",
    "pace",
    "percentile",
    "slowest",
    "ticker",
]

WARMUPS = 10
_TICK_SECONDS = 1e-3


@dataclass(frozen=True)
class Contender:
    """One way to do an operation: `once` does it, or returns what is to be awaited."""

    name: str
    once: Callable[[], Any]
    awaited: bool = False


@dataclass(frozen=True)
class Pace:
    """How often: `repeat` samples of `batch` operations each, with one pair of clock readings around them."""

    repeat: int
    batch: int
    warmups: int = WARMUPS
    leads: int = 0
    """Operations at the start of each sample that are not timed, where a contender disturbs the one after it."""


@dataclass(frozen=True)
class Figures:
    """What the samples of one rank say, in seconds."""

    median: float
    mean: float
    p99: float


def pace(nbytes: int, repeat: int | None) -> Pace:
    """Return how often an operation of so many bytes is done; reading the clock must not be what is measured."""
    for limit, batch, usual in ((4 << 10, 100, 40), (64 << 10, 20, 40), (1 << 20, 4, 30)):
        if nbytes <= limit:
            return Pace(repeat or usual, batch)
    return Pace(repeat or 15, 1)


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that so many percent do not exceed.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile(range(1, 101), 99)
    (2.0, 99)
    """
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def figures(samples: Sequence[float]) -> Figures:
    """Return median, mean and 99th percentile."""
    return Figures(statistics.median(samples), statistics.fmean(samples), percentile(samples, 99))


def slowest(samples_by_rank: Sequence[Sequence[float]]) -> tuple[int, Figures]:
    """Return the rank whose median is the largest, and its figures."""
    by_rank = [figures(samples) for samples in samples_by_rank]
    rank = max(range(len(by_rank)), key=lambda r: by_rank[r].median)
    return rank, by_rank[rank]


async def interleaved(
    contenders: Sequence[Contender], fence: Callable[[], Awaitable[None]], pace: Pace
) -> Mapping[str, list[float]]:
    """Return seconds per operation of each, a list of samples by name, after warming up.

    Every sample begins at a barrier of all ranks. The contenders take turns, each round the other way about, so
    that what disturbs the machine for a while disturbs them all.
    """
    samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(pace.warmups + pace.repeat):
        for contender in contenders if turn % 2 else reversed(contenders):
            await fence()
            if pace.leads:
                await _sample(contender, pace.leads)
            seconds = await _sample(contender, pace.batch)
            if turn >= pace.warmups:
                samples[contender.name].append(seconds)
    return samples


async def _sample(contender: Contender, batch: int) -> float:
    once = contender.once
    if contender.awaited:
        began = perf_counter()
        for _ in range(batch):
            await once()
    else:
        began = perf_counter()
        for _ in range(batch):
            once()
    return (perf_counter() - began) / batch


@asynccontextmanager
async def ticker() -> AsyncIterator[list[float]]:
    """Collect how late each tick of a 1 ms ticker is, while the block runs.

    When the loop is held up, the ticks that would have come meanwhile count too, each with its own lateness; else
    a long stop would be one tick among many.
    """
    lateness: list[float] = []

    async def tick() -> None:
        while True:
            due = perf_counter() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            late = max(0.0, perf_counter() - due)
            while late >= 0:
                lateness.append(late)
                late -= _TICK_SECONDS

    task = asyncio.create_task(tick())
    await asyncio.sleep(5 * _TICK_SECONDS)
    lateness.clear()
    try:
        yield lateness
        while not lateness:  # noqa: ASYNC110  - the block took less than a tick, which sets no event
            await asyncio.sleep(_TICK_SECONDS)
    finally:
        task.cancel()
        await asyncio.wait([task])
