"""Training steps of aiodist, of torch's DDP, and of a loop without communication, on copies of one model."""

from __future__ import annotations

import gc
import os
import statistics
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aiodist import codecs
from aiodist.bench.timing import percentile
from aiodist.nn import DataParallel, PipelinedOptimizer, ShardedOptimizer, synchronize_gradients
from aiodist.nn.drivers import Driver
from benchmarks import models, suite, threads
from benchmarks.figures import Figure, figure
from benchmarks.ticker import ticker

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session
    from aiodist.communicator import Communicator

__all__ = ["TRAINERS", "Setting", "Trainer", "measure", "torch_threads"]

RATE = 1e-6  # so small that a thousand steps on one batch leave the gradients as they are
_SECONDS = 20.0
"""Seconds for one model with one batch, all contenders together."""
WARMUPS = 2
_STEPS = 3
"""Timed steps in a turn, after one that clears the caches of the contender before."""
LAG_SECONDS = 2.0


@dataclass(frozen=True)
class Setting:
    """The model and the batch of this rank, for all contenders."""

    model: str
    x: Tensor
    y: Tensor
    coll: Communicator

    @classmethod
    def make(cls, model: str, samples: int, coll: Communicator) -> Setting:
        """Return `model` with a batch of `samples`."""
        x, y = models.batch(model, models.build(model), samples, coll.rank)
        return cls(model, x, y, coll)

    def loss(self, module: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the loss of the batch."""
        return F.mse_loss(module(self.x), self.y)


async def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Trainer:
    """A contender: `step` runs one training step, `drain` waits for its pending work."""

    name: str
    step: Callable[[], Awaitable[None]]
    drain: Callable[[], Awaitable[None]] = _nothing
    net: DataParallel | None = None
    """The net of aiodist, None for others."""

    @property
    def computes(self) -> str:
        """The name of the thread that computes."""
        return "MainThread" if self.net is None else "aiodist-compute"


class _Extras(NamedTuple):
    """Figures of one rank for a contender, in addition to times."""

    overlap: float | None
    loop_lag: float | None
    cpu: dict[str, float]
    """CPU seconds of each thread in a step, by name, and of all except the computing one."""


_LEAST_CPU = 1e-5  # a step: threads that had less are not told of


# --- contenders -----------------------------------------------------------------------------------------------------


def _optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


@asynccontextmanager
async def _datapar(
    setting: Setting, name: str = "datapar", compress: codecs.Codec | None = None
) -> AsyncIterator[Trainer]:
    net = await DataParallel.create(models.build(setting.model), setting.coll, compress=compress)
    optimizer = _optimizer(list(net.parameters()))

    async def step() -> None:
        await net.step(lambda: setting.loss(net), optimizer)

    try:
        yield Trainer(f"aiodist:{name}", step, net=net)
    finally:
        await net.aclose()


@asynccontextmanager
async def _ahead(
    setting: Setting, name: str, make: Callable[[DataParallel, Callable[..., torch.optim.Optimizer]], Awaitable[Driver]]
) -> AsyncIterator[Trainer]:
    """A contender with an optimizer that overlaps the next forward."""
    net = await DataParallel.create(models.build(setting.model), setting.coll)
    optimizer = await make(net, _optimizer)

    async def step() -> None:
        await net.step(lambda: setting.loss(net), optimizer)

    async def drain() -> None:
        await optimizer.flush()

    try:
        yield Trainer(f"aiodist:{name}", step, drain, net)
    finally:
        await net.aclose()


@asynccontextmanager
async def _sync(setting: Setting) -> AsyncIterator[Trainer]:
    """A whole backward, then one reduction of all gradients: a baseline without overlap."""
    net = await DataParallel.create(models.build(setting.model), setting.coll)
    optimizer = _optimizer(list(net.parameters()))

    async def step() -> None:
        await net.submit(optimizer.zero_grad)
        loss = await net.submit(setting.loss, net)
        with net.no_sync():
            await net.backward(loss)
        await synchronize_gradients(net.module, setting.coll, op="mean")
        await net.submit(optimizer.step)

    try:
        yield Trainer("aiodist:sync", step, net=net)
    finally:
        await net.aclose()


@asynccontextmanager
async def _reduce(setting: Setting, name: str = "reduce", *, arena: bool = True) -> AsyncIterator[Trainer]:
    """One allreduce of as many bytes as the gradients, in shared memory if `arena`, and nothing else: a floor."""
    numel = sum(p.numel() for p in models.build(setting.model).parameters())
    flat = (setting.coll.arena_empty if arena else torch.empty)(numel, dtype=torch.float32)
    flat.normal_()

    async def step() -> None:
        await setting.coll.allreduce(flat, op="mean")

    yield Trainer(f"aiodist:{name}", step)


def _blocking(name: str, setting: Setting, module: nn.Module) -> Trainer:
    """Return a plain torch loop, on the thread that calls it."""
    optimizer = _optimizer(list(module.parameters()))

    async def step() -> None:
        optimizer.zero_grad()
        setting.loss(module).backward()
        optimizer.step()

    return Trainer(name, step)


@asynccontextmanager
async def _none(setting: Setting) -> AsyncIterator[Trainer]:
    yield _blocking("none", setting, models.build(setting.model))


@asynccontextmanager
async def _ddp(setting: Setting) -> AsyncIterator[Trainer]:
    module = models.build(setting.model)
    yield _blocking("ddp", setting, nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True))


COMPRESSED = {"powersgd": codecs.PowerSGD(4), "topk": codecs.TopK(0.01), "bf16": codecs.BFloat16()}
TRAINERS: dict[str, Callable[[Setting], AbstractAsyncContextManager[Trainer]]] = {
    "datapar": _datapar,
    "pipelined": partial(_ahead, name="pipelined", make=PipelinedOptimizer.create),
    "sharded": partial(_ahead, name="sharded", make=ShardedOptimizer.create),
    "sync": _sync,
    "reduce": _reduce,
    "reduce-ordinary": partial(_reduce, name="reduce-ordinary", arena=False),
    "none": _none,
    "ddp": _ddp,
    **{name: partial(_datapar, name=name, compress=codec) for name, codec in COMPRESSED.items()},
}
"""The contenders by name; all ranks open the same ones in the same order."""


# --- measuring -------------------------------------------------------------------------------------------------------


async def measure(session: Session) -> list[Figure]:
    """Measure steps of every model with every batch of the plan."""
    plan = session.plan
    records = []
    with torch_threads(session.coll):
        for model in suite.models(plan):
            for samples in suite.batches(plan, model):
                records += await _measure(session, model, samples)
    return records


@contextmanager
def torch_threads(coll: Communicator) -> Iterator[int]:
    """Give each rank of this host its share of the cores during the block, at least one."""
    before = torch.get_num_threads()
    count = max(1, min((os.cpu_count() or 1) // coll.local_size, len(os.sched_getaffinity(0))))
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        if before != count:  # else another rank of this process restores them
            torch.set_num_threads(before)


async def _measure(session: Session, model: str, samples: int) -> list[Figure]:
    setting = Setting.make(model, samples, session.coll)
    names = [*session.impls, *session.plan.peers]
    async with AsyncExitStack() as stack:
        trainers = [await stack.enter_async_context(TRAINERS[name](setting)) for name in names]
        times, overlaps, cpu = await _rounds(session, trainers)
        lags = {
            ours.name: await _lag(session, ours, statistics.median(times[ours.name]))
            for ours in trainers
            if ours.net is not None
        }
        nbytes = sum(p.nbytes for p in models.build(model).parameters())
    extras = {t.name: _Extras(overlaps.get(t.name), lags.get(t.name), cpu[t.name]) for t in trainers}
    return _completed(
        await session.timed(f"train:{model}", None, times),
        await session.coll.gather_object(extras),
        batch=samples,
        nbytes=nbytes,
    )


def _completed(
    records: list[Record], extras: list[dict[str, _Extras]] | None, *, batch: int, nbytes: int
) -> list[Figure]:
    """Return records with the extra figures of all ranks, then one for each thread."""
    found = []
    by_thread = []
    for record in records:
        here = [_Extras(*extra[record.impl]) for extra in extras or []]
        cpu = {name: max(e.cpu.get(name, 0.0) for e in here) for name in {name for e in here for name in e.cpu}}
        by_thread += [
            Figure(f"{record.op}:cpu", record.impl, record.ranks, batch=batch, thread=name, cpu=seconds)
            for name, seconds in sorted(cpu.items(), key=lambda item: -item[1])
            if seconds >= _LEAST_CPU or name == threads.OTHERS
        ]
        overlaps = [extra.overlap for extra in here if extra.overlap is not None]
        lags = [extra.loop_lag for extra in here if extra.loop_lag is not None]
        found.append(
            figure(
                record,
                nbytes=nbytes,
                batch=batch,
                overlap=min(overlaps, default=None),
                loop_lag=max(lags, default=None),
            )
        )
    return found + by_thread


class _Rounds(NamedTuple):
    """The figures of one rank, by contender."""

    times: dict[str, list[float]]
    """Seconds of each step."""
    overlaps: dict[str, float]
    """The share of communication that overlapped computation."""
    cpu: dict[str, dict[str, float]]
    """CPU seconds a step, by thread."""


async def _rounds(session: Session, trainers: Sequence[Trainer]) -> _Rounds:
    times: dict[str, list[float]] = {t.name: [] for t in trainers}
    cpu: dict[str, list[dict[str, float]]] = {t.name: [] for t in trainers}
    for _ in range(WARMUPS):
        await _turns(session, trainers)
    before = {t.name: t.net.statistics() for t in trainers if t.net is not None}
    began = perf_counter()
    rounds = 1
    turn = 0
    while turn < rounds:
        for name, steps in (await _turns(session, trainers if turn % 2 else trainers[::-1])).items():
            times[name] += [seconds for seconds, _ in steps]
            cpu[name] += [spent for _, spent in steps]
        turn += 1
        if turn == 1:
            fitting = min(40, max(4, round(_SECONDS / (perf_counter() - began))))
            rounds = await session.coll.broadcast(session.plan.repeat or fitting)
    overlaps = {}
    for t in trainers:
        if t.net is not None:
            now, then = t.net.statistics(), before[t.name]
            reducing = now.reduction_seconds - then.reduction_seconds
            if reducing > 0:
                overlaps[t.name] = 1 - (now.exposed_seconds - then.exposed_seconds) / reducing
    return _Rounds(times, overlaps, {t.name: _with_others(threads.mean(cpu[t.name]), t) for t in trainers})


def _with_others(cpu: dict[str, float], trainer: Trainer) -> dict[str, float]:
    """Return `cpu` with the sum of all threads except the computing one."""
    return cpu | {threads.OTHERS: sum(seconds for name, seconds in cpu.items() if name != trainer.computes)}


_Step = tuple[float, dict[str, float]]
"""Seconds, and CPU seconds of each thread."""


async def _turns(session: Session, trainers: Sequence[Trainer]) -> dict[str, list[_Step]]:
    """Run the steps of each contender, each step after a barrier.

    So no step pays for a rank that the step before delayed. As the slowest rank counts, every contender includes the
    wait for it, also `none`. The pending work of a pipelined step runs in the next step, or during the wait.
    """
    found: dict[str, list[_Step]] = {one.name: [] for one in trainers}
    for one in trainers:
        await session.fence()
        await one.step()
        for _ in range(_STEPS):
            before, own = threads.cpu_seconds(), thread_time()
            await session.fence()
            before[threading.current_thread().name] += thread_time() - own  # it may have polled there
            began = perf_counter()
            await one.step()
            found[one.name].append((perf_counter() - began, threads.since(before)))
        await one.drain()
    return found


async def _lag(session: Session, ours: Trainer, seconds: float) -> float:
    """Return the lateness of a ticker during steps of about `seconds`, apart from the other figures."""
    steps = await session.coll.broadcast(min(100, max(3, round(LAG_SECONDS / seconds))))
    await session.fence()
    gc.collect()
    gc.freeze()  # a collection of all objects of torch and the contenders would stop the process for 100 ms
    async with ticker() as lateness:
        for _ in range(steps):
            await ours.step()
        await ours.drain()
    gc.unfreeze()
    return percentile(lateness, 99)
