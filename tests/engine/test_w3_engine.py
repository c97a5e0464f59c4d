"""W3: an engine continues with other ranks; ranks are tasks of this process, and are killed at any moment."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import Communicator, Engine, PeerError
from aiodist.data import IndexShards, ShardQueue
from aiodist.engine import State
from aiodist.nn import DataParallel, PipelinedOptimizer
from aiodist.testing import run_ranks
from tests.support.elastic import build, bytes_of, survivors

pytestmark = pytest.mark.timeout(100)

SAMPLES, BATCHES, EPOCHS, GROWN = 12, 7, 4, 2
RECORDS = 203


def whole(epoch: int, number: int) -> tuple[Tensor, Tensor]:
    """Return a batch of all ranks."""
    at = torch.arange(SAMPLES, dtype=torch.float64)[:, None] + 100 * epoch + number
    return (at * torch.arange(1, 6)).sin(), (at * torch.arange(1, 4)).cos()


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / SAMPLES


class Divided:
    """A loader whose k-th batch is this rank's part of the k-th batch of all."""

    def __init__(self, coll: Communicator) -> None:
        self._coll = coll
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Any:
        for number in range(BATCHES):
            x, y = whole(self._epoch, number)
            yield x[self._coll.rank :: self._coll.size], y[self._coll.rank :: self._coll.size]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.03)


async def train(number: int, kind: str) -> Any:
    module = build(0)
    opt: Any = adam(module.parameters())
    engine: Engine | None = None
    steps: list[tuple[int, int, int]] = []
    async with aiodist.init(elastic=True) as coll:
        while True:
            try:
                if engine is None:
                    given = PipelinedOptimizer if kind == "pipelined" else opt
                    net = await DataParallel.create(module, coll, given, op="sum", bucket_bytes=1, first_bucket_bytes=1)
                    if kind == "pipelined":
                        opt = await PipelinedOptimizer.create(net, adam)
                    engine = Engine(net, opt, loss_of, progress=False)
                    engine.on("update", lambda state: steps.append((state.epoch, state.batch, state.step)))
                await engine.rebind(coll)
                await engine.train(Divided(coll), epochs=GROWN)
                if coll.size < 4:
                    coll = await coll.grow(4 - coll.size)
                    continue
                figures = await engine.train(Divided(coll), epochs=EPOCHS)
                await coll.barrier()
                return bytes_of(module, opt), net.steps_done, module, steps, figures
            except PeerError:
                coll = await coll.shrink()


@pytest.mark.thorough
@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["adam", "pipelined"])
def test_w3_an_engine_makes_each_step_once_whichever_ranks_die(kind: str, seed: int) -> None:
    """Two of four ranks are killed; others join after two epochs. One process comes to the same."""
    said = survivors(4, lambda number: train(number, kind), seed, within=3000, drawn=f"{kind} {seed}")
    held, counts, modules, steps, figures = zip(*said, strict=True)
    assert len(said) >= 2
    assert set(counts) == {EPOCHS * BATCHES}
    assert all(each == held[0] for each in held), "bit by bit the same on all ranks"
    assert all(each == figures[0] for each in figures)
    for made in steps:
        assert all(step == (epoch - 1) * BATCHES + batch for epoch, batch, step in made)
        assert made[-1:] in ([], [(EPOCHS, BATCHES, EPOCHS * BATCHES)]), "one may have joined behind the last"
    expected = build(0)
    opt = adam(expected.parameters())
    for epoch in range(EPOCHS):
        for number in range(BATCHES):
            opt.zero_grad()
            x, y = whole(epoch, number)
            loss_of(expected(x), y).backward()
            opt.step()
    for p, alone in zip(modules[0].parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, alone, rtol=1e-9, atol=1e-11)


class Tally(nn.Module):
    """How often each record was used in each epoch, which training by plain sums of gradients counts."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.zeros(EPOCHS, RECORDS))
        self.epoch = 0

    def forward(self, *records: int) -> Tensor:
        return -self.times[self.epoch, list(records)].sum()


async def count(number: int, module: Tally, kind: str) -> int:
    sgd = partial(torch.optim.SGD, lr=1.0)
    opt: Any = sgd(module.parameters())
    engine: Engine | None = None
    queue: ShardQueue[int] | None = None

    def begin(state: State) -> None:
        module.epoch = state.epoch - 1

    async with aiodist.init(elastic=True) as coll:
        while True:
            try:
                if engine is None:
                    given = PipelinedOptimizer if kind == "pipelined" else opt
                    net = await DataParallel.create(module, coll, given, op="sum")
                    if kind == "pipelined":
                        opt = await PipelinedOptimizer.create(net, sgd)
                    engine = Engine(net, opt, progress=False)
                    engine.on("sample", begin)
                await engine.rebind(coll)
                if queue is None:
                    queue = ShardQueue(IndexShards(RECORDS, 16), coll, batch_size=5, shuffle=True)
                await queue.rebind(coll, net.steps_done)
                await engine.train(queue, epochs=GROWN)
                if coll.size < 4:
                    coll = await coll.grow(4 - coll.size)
                    continue
                await engine.train(queue, epochs=EPOCHS)
                await coll.barrier()
                return coll.size
            except PeerError:
                coll = await coll.shrink()


@pytest.mark.thorough
@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", ["plain", "pipelined"])
def test_w3_an_engine_trains_once_on_each_record_of_a_queue(kind: str, seed: int) -> None:
    """The parameters are the counts. Of four ranks two are killed at any moment, and others join."""

    async def main(number: int) -> Any:
        module = Tally()
        with suppress(PeerError):
            await count(number, module, kind)
        return module.times.detach().tolist()

    said = survivors(4, main, seed, within=3500, drawn=f"{kind} {seed}")
    assert len(said) >= 2
    assert all(times == [[1.0] * RECORDS] * EPOCHS for times in said)


def test_w3_what_an_engine_does_not_go_on_with() -> None:
    async def main(number: int) -> None:
        async with aiodist.init(elastic=True) as coll:
            scaler = torch.amp.GradScaler("cpu")
            net = await DataParallel.create(build(0).float(), coll, PipelinedOptimizer, scaler=scaler)
            opt = await PipelinedOptimizer.create(net, partial(torch.optim.SGD, lr=0.1))
            engine = Engine(net, opt, loss_of, progress=False)
            with pytest.raises(RuntimeError, match="the steps that the scaler skipped"):
                await engine.rebind(coll)
            net.configure(scaler=None)

            async def inside(state: State) -> None:
                with pytest.raises(RuntimeError, match=r"engine\.rebind in a training"):
                    await engine.rebind(coll)

            engine.on("start", inside)
            await engine.train([(torch.ones(2, 5), torch.ones(2, 3))], epochs=1)

    run_ranks(2, main, elastic=(1, 2))
