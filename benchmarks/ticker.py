"""A ticker on the event loop: how late it is tells how long the loop was held up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter

__all__ = ["ticker"]

_TICK_SECONDS = 1e-3


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
