"""N20: the results of sharded steps are those of a plain loop."""

from __future__ import annotations

import pytest

from aiodist import Communicator
from aiodist.nn import DataParallel, ShardedOptimizer, assert_synchronized


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("sizes", ["SMALL", "FEW", "one"])
@pytest.mark.parametrize("how", ["sgd", "momentum", "adam"])
async def test_n20_equals_the_plain_loop(coll: Communicator, trial, how: str, sizes: str) -> None:
    net = await DataParallel.create(trial.Mlp(), coll, **getattr(trial, sizes, {}))
    opt = ShardedOptimizer(net, trial.OPTIMIZERS[how])
    for step in range(5):
        await net.step(trial.loss, opt, net, coll.rank, step)
    await opt.flush()
    trial.assert_same(net, trial.alone(coll.size, 5, optimizer=how))
    await assert_synchronized(list(net.parameters()), coll)
