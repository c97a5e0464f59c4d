"""The cost of serving for training steps: the first server trains while the first worker pulls."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import torch

from aiodist.streams import HostStream
from benchmarks.first import valued
from benchmarks.prefetching import Step

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session
    from aiodist.ps import ParameterServer

__all__ = ["MODES", "PULLS", "measure"]

MODES: dict[str, Literal["snapshot", "lock-free"] | None] = {
    "none": None,
    "aiodist:ps": "snapshot",
    "aiodist:ps:lock-free": "lock-free",
}
"""Read modes of pulls, by label."""
_NBYTES = 1 << 20
_PULL_SECONDS = 0.1
"""Seconds from one pull to the next."""
PULLS = 8
"""Pulls of a turn."""
_STEP_SECONDS = 15e-3
_NAME = "served"


async def measure(session: Session, ps: ParameterServer) -> list[Record]:
    """Return records of the step (`serving_step`), of the pulls (`serving_pull`), and of the slowdown of a step.

    The slowdown, `serving`, is the median over all rounds of the ratio of the mean steps with and without pulls. Single
    steps are not compared, since most meet no pull.
    """
    trains, pulls = ps.rank == ps.servers[0], ps.rank == ps.workers[0]
    t = torch.zeros(_NBYTES // 4)
    if ps.is_worker:
        await ps.init(_NAME, t)
    steps: dict[str, list[float]] = {name: [] for name in MODES}
    waits: dict[str, list[float]] = {name: [] for name, mode in MODES.items() if mode is not None}
    async with HostStream("training") as compute:
        step = _step(compute) if trains else None
        rounds = session.plan.repeat or 8
        for turn in range(1 + rounds):
            for name in MODES if turn % 2 else reversed(MODES):
                await session.coll.barrier()
                mode = MODES[name]
                if step is not None:
                    mean = await _train(step)
                    if turn:  # the first round warms up
                        steps[name].append(mean)
                elif pulls and mode is not None:
                    waits[name] += await _pull(ps, t, mode) if turn else []
    if ps.is_worker:
        await ps.free(_NAME)
    return await _records(session, steps, waits, trains=trains)


def _step(compute: HostStream) -> Callable[[], Awaitable[None]]:
    """Return a training step of a known length on a stream."""
    batch = torch.randn(64, 256)
    once = Step(1)
    seconds = []
    for _ in range(50):  # the first calls are slow, and so is the machine at times
        began = perf_counter()
        once(batch)
        seconds.append(perf_counter() - began)
    whole = Step(max(1, round(_STEP_SECONDS / min(seconds))))

    async def step() -> None:
        await compute.submit(whole, batch)

    return step


async def _train(step: Callable[[], Awaitable[None]]) -> float:
    """Return the mean seconds of a step during the pulls."""
    began = perf_counter()
    count = 0
    while perf_counter() - began < PULLS * _PULL_SECONDS:
        await step()
        count += 1
    return (perf_counter() - began) / count


async def _pull(ps: ParameterServer, out: torch.Tensor, mode: Literal["snapshot", "lock-free"]) -> list[float]:
    """Return the seconds of each pull."""
    seconds = []
    began = perf_counter()
    for turn in range(PULLS):
        await asyncio.sleep(max(0.0, began + turn * _PULL_SECONDS - perf_counter()))
        asked = perf_counter()
        await ps.pull(_NAME, out, reads=mode)
        seconds.append(perf_counter() - asked)
    return seconds


async def _records(
    session: Session, steps: dict[str, list[float]], waits: dict[str, list[float]], *, trains: bool
) -> list[Record]:
    records = await session.timed("serving_step", None, steps)
    found = await session.timed("serving_pull", _NBYTES, waits)
    records += [replace(record, busbw_gbps=None) for record in found]
    for name in waits:
        pairs = zip(steps[name], steps["none"], strict=True)
        slowed = statistics.median([beside / alone for beside, alone in pairs]) if trains else None
        records += await valued(session, "serving", name, slowed, _NBYTES)
    return records
