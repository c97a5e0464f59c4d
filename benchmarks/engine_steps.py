"""Epochs of the engine, and of a bare loop of `net.step` over `data.prefetch`, with the same net and optimizer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from aiodist import Engine
from aiodist.data import prefetch
from aiodist.nn import DataParallel
from benchmarks import models, suite
from benchmarks.figures import figure
from benchmarks.training import Setting, torch_threads

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["measure"]

_RATE = 1e-6  # so small that the gradients stay as they are
EPOCH_SECONDS = 1.5
EPOCH_STEPS = 20
"""The least seconds of an epoch, so that exchanges once an epoch do not count."""
_ROUNDS = 12


async def measure(session: Session) -> list[Record]:
    """Measure epochs of every model with every batch of the plan; a time is that of a step."""
    records = []
    with torch_threads(session.coll):
        for model in suite.models(session.plan):
            for samples in suite.batches(session.plan, model):
                records += await _measure(session, model, samples)
    return records


async def _measure(session: Session, model: str, samples: int) -> list[Record]:
    setting = Setting.make(model, samples, session.coll)
    async with await DataParallel.create(models.build(model), session.coll) as net:
        opt = torch.optim.SGD(net.parameters(), lr=_RATE)
        engine = Engine(net, opt, F.mse_loss, progress=False)

        async def ours(steps: int) -> None:
            await engine.train([(setting.x, setting.y)] * steps, epochs=engine.state.epoch + 1)

        async def bare(steps: int) -> None:
            async with prefetch([(setting.x, setting.y)] * steps) as batches:
                async for x, y in batches:
                    await net.step(lambda x, y: F.mse_loss(net(x), y), opt, x, y)

        loops: dict[str, Callable[[int], Awaitable[None]]] = {}
        if "engine" in session.impls:
            loops["aiodist:engine"] = ours
        if "bare" in session.plan.peers:
            loops["bare"] = bare
        times = await _rounds(session, loops)
    return [figure(record, batch=samples) for record in await session.timed(f"engine:{model}", None, times)]


async def _rounds(session: Session, loops: dict[str, Callable[[int], Awaitable[None]]]) -> dict[str, list[float]]:
    """Return seconds of a step, one figure for each epoch; the loops take turns, in alternating order."""
    for loop in loops.values():
        await loop(3)
    began = perf_counter()
    for loop in loops.values():
        await loop(3)
    fitting = round(EPOCH_SECONDS * 3 * len(loops) / (perf_counter() - began))
    steps = await session.coll.broadcast(max(EPOCH_STEPS, fitting))
    times: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(session.plan.repeat or _ROUNDS):
        for name in loops if turn % 2 else reversed(loops):
            await session.fence()
            began = perf_counter()
            await loops[name](steps)
            times[name].append((perf_counter() - began) / steps)
    return times
