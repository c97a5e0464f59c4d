"""`net.stop_requested`: true on all ranks at the same step, with every driver; the engine stops after that step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import aiodist
from aiodist import Communicator
from aiodist.engine import State
from aiodist.nn import DataParallel, LocalSGD, PipelinedOptimizer, ShardedOptimizer
from tests.support.awaited import awaited

Make = Callable[[DataParallel], Any]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


DRIVERS: dict[str, tuple[Make, int]] = {
    "plain": (lambda net: sgd(net.parameters()), 0),
    "pipelined": (lambda net: PipelinedOptimizer.create(net, sgd), 1),
    "sharded": (lambda net: ShardedOptimizer.create(net, sgd), 0),
    "local": (lambda net: LocalSGD.create(net, sgd(net.parameters()), every=2), 3),
}
"""Each driver with the most steps that may pass until all ranks know."""


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("driver", DRIVERS)
async def test_l11_all_ranks_see_it_at_the_same_step(coll: Communicator, driver: str) -> None:
    make, latest = DRIVERS[driver]
    net = await DataParallel.create(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), coll)
    opt = await awaited(make(net))
    asks = 2  # the step before which a rank is asked
    seen = -1
    for step in range(12):
        if step == asks and coll.rank == coll.size - 1:
            coll.request_stop()
        await net.step(lambda: net(torch.ones(2, 3)).mean(), opt)
        if net.stop_requested:
            seen = step
            break
    assert await coll.allgather_object(seen) == [seen] * coll.size
    assert asks <= seen <= asks + latest
    if driver != "plain":
        await opt.flush()
    await net.aclose()


@pytest.mark.ranks(2)
async def test_l11_the_engine_stops_all_ranks_behind_the_same_step(coll: Communicator) -> None:
    net = await DataParallel.create(nn.Linear(3, 1), coll)
    engine = aiodist.Engine(net, sgd(net.parameters()), nn.functional.mse_loss, progress=False)

    @engine.on("sample")
    def ask(state: State) -> None:
        if coll.rank == 1 and state.step == 3:
            coll.request_stop()

    await engine.train([(torch.ones(2, 3), torch.ones(2, 1))] * 8, epochs=3)
    assert await coll.allgather_object(engine.state.step) == [3, 3]
    await engine.train([(torch.ones(2, 3), torch.ones(2, 1))] * 8, epochs=3)  # asked still
    assert engine.state.step == 3
    await net.aclose()
