"""W13: a callback after each step, of a net and of an engine."""

from __future__ import annotations

from time import perf_counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aiodist import Communicator, Engine
from aiodist.nn import DataParallel

Values = dict[str, float]


@pytest.mark.ranks(1, 2, 3)
async def test_w13_a_net_reports_each_step_on_rank_0(coll: Communicator) -> None:
    told: list[tuple[int, Values]] = []
    net = await DataParallel.create(nn.Linear(3, 1), coll, log=lambda step, values: told.append((step, values)))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    began = perf_counter()
    for step in range(5):
        x = torch.rand(4, 3)
        if step == 3:  # the rest returns an aux too
            loss, _ = await net.step(lambda x=x: (net(x).mean(), x), opt)
        else:
            loss = await net.step(lambda x=x: net(x).mean(), opt)
        losses.append(float(loss))
    elapsed = perf_counter() - began
    exposed = net.statistics().exposed_seconds
    await net.aclose()
    if coll.rank:
        assert told == []
        return
    assert [step for step, _ in told] == [1, 2, 3, 4, 5]
    assert [values["loss"] for _, values in told] == losses
    assert 0 < sum(values["seconds"] for _, values in told) <= elapsed
    assert sum(values["waited_seconds"] for _, values in told) == pytest.approx(exposed, abs=1e-9)


@pytest.mark.ranks(2)
async def test_w13_each_third_step_with_means_and_changes_between(coll: Communicator) -> None:
    told: list[tuple[int, Values]] = []
    net = await DataParallel.create(nn.Linear(3, 1), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    if coll.rank == 0:  # only rank 0 needs one
        net.configure(log=lambda step, values: told.append((step, values)), log_every=3)
    for _ in range(7):
        await net.step(lambda: net(torch.rand(4, 3)).mean(), opt)
    net.configure(log=None)
    for _ in range(3):
        await net.step(lambda: net(torch.rand(4, 3)).mean(), opt)
    assert [step for step, _ in told] == ([] if coll.rank else [3, 6])
    with pytest.raises(TypeError, match="expected a function of a step"):
        net.configure(log=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="log_every"):
        net.configure(log=print, log_every=0)
    await net.aclose()


@pytest.mark.ranks(1)
async def test_w13_an_error_of_the_callback_is_raised_after_the_step(coll: Communicator) -> None:
    def broken(step: int, values: Values) -> None:
        raise ZeroDivisionError(step)

    net = await DataParallel.create(nn.Linear(3, 1), coll, log=broken)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError, match="1"):
        await net.step(lambda: net(torch.rand(4, 3)).mean(), opt)
    assert net.steps_done == 1
    await net.aclose()


@pytest.mark.ranks(2)
async def test_w13_an_engine_reports_steps_on_rank_0(coll: Communicator) -> None:
    told: list[tuple[int, Values]] = []
    net = await DataParallel.create(nn.Linear(3, 1), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = Engine(
        net, opt, F.mse_loss, progress=False, log=lambda step, values: told.append((step, values)), log_every=2
    )
    losses: list[float] = []
    engine.on("update", lambda state: losses.append(float(state.loss)))
    await engine.train([(torch.rand(4, 3), torch.rand(4, 1)) for _ in range(3)], epochs=2)
    await net.aclose()
    assert [(step, values["loss"]) for step, values in told] == [
        (step, losses[step - 1]) for step in (2, 4, 6) if not coll.rank
    ]
    assert all(values["seconds"] > values["waited_seconds"] >= 0 for _, values in told)
