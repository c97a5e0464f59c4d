"""N19: settings that differ by rank raise at the first such step, with the values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

import aiodist
from aiodist import Communicator, nn
from aiodist.nn import DataParallel, assert_synchronized
from tests.nn.conftest import Trial

on_ranks = pytest.mark.ranks(2, 3)


async def step(net: DataParallel, opt: Any, rank: int, number: int = 0) -> None:
    await net.step(partial(Trial.loss, net, rank, number), opt)


CLIP: dict[str, tuple[Callable[[bool], Any], str]] = {
    "clip_norm": (lambda odd: {"clip_norm": 1.0 if odd else 0.5}, r"clip_norm: rank.*: 0\.5; rank 1: 1\.0"),
    "no clip_norm": (lambda odd: {"clip_norm": 1.0 if odd else None}, r"clip_norm: rank.*: None; rank 1: 1\.0"),
    "scaler": (
        lambda odd: {"scaler": torch.amp.GradScaler("cpu") if odd else None},
        r"scaler: rank 0: None; rank 1: .*GradScaler",
    ),
    "autocast": (
        lambda odd: {"autocast": torch.bfloat16 if odd else None},
        r"autocast: rank 0: None; rank 1: .*bfloat16",
    ),
}


@on_ranks
@pytest.mark.parametrize("what", CLIP)
async def test_n19_settings_that_differ(coll: Communicator, what: str) -> None:
    make, words = CLIP[what]
    net = await DataParallel.create(Trial.Mlp(), coll)
    opt = SGD(net.parameters(), lr=0.1)
    await step(net, opt, coll.rank)
    known = [p.detach().clone() for p in net.parameters()]
    net.configure(**make(coll.rank == 1))
    for _ in range(2):
        with pytest.raises(aiodist.MismatchError, match=words):
            await step(net, opt, coll.rank)
        assert all(map(torch.equal, known, net.parameters()))
    net.configure(clip_norm=None, scaler=None, autocast=None)
    await step(net, opt, coll.rank)
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
async def test_n19_a_scaler_that_is_disabled_is_none(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    opt = SGD(net.parameters(), lr=0.1)
    net.configure(scaler=torch.amp.GradScaler("cpu", enabled=False) if coll.rank else None)
    for number in range(2):
        await step(net, opt, coll.rank, number)
    Trial.assert_same(net, Trial.alone(2, 2))


OPTIMIZERS: dict[str, tuple[Callable[[Any, bool], Any], str]] = {
    "class": (
        lambda p, odd: Adam(p, lr=0.1) if odd else SGD(p, lr=0.1),
        r"the class of the optimizer: rank.*: SGD; rank 1: Adam",
    ),
    "lr": (lambda p, odd: SGD(p, lr=0.2 if odd else 0.1), r"lr of group 0 of SGD: rank.*: 0\.1; rank 1: 0\.2"),
    "momentum": (
        lambda p, odd: SGD(p, lr=0.1, momentum=0.5 * odd),
        r"momentum of group 0 of SGD: rank.*: 0\.0; rank 1: 0\.5",
    ),
    "betas": (lambda p, odd: Adam(p, betas=(0.9, 0.5 if odd else 0.9)), r"betas of group 0 of Adam: .*0\.5"),
    "nesterov": (lambda p, odd: SGD(p, lr=0.1, momentum=0.9, nesterov=odd), r"nesterov of group 0 .*False.*True"),
    "tensor": (lambda p, odd: SGD(p, lr=torch.tensor(0.5 if odd else 0.25)), r"lr of group 0 .*0\.25.*0\.5"),
    "group": (
        lambda p, odd: SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.3 if odd else 0.1}], lr=0.1),
        r"lr of group 1 of SGD: rank.*: 0\.1; rank 1: 0\.3",
    ),
    "groups": (
        lambda p, odd: SGD([{"params": p}] if odd else [{"params": p[:1]}, {"params": p[1:]}], lr=0.1),
        r"of group 1 of SGD.*nothing",
    ),
}


@on_ranks
@pytest.mark.parametrize("what", OPTIMIZERS)
async def test_n19_hyperparameters_that_differ(coll: Communicator, what: str) -> None:
    make, words = OPTIMIZERS[what]
    net = await DataParallel.create(Trial.Mlp(), coll)
    opt = make(list(net.parameters()), coll.rank == 1)
    with pytest.raises(aiodist.MismatchError, match=words):
        await step(net, opt, coll.rank)
    Trial.assert_same(net, Trial.Mlp())
    await step(net, SGD(net.parameters(), lr=0.1), coll.rank)
    Trial.assert_same(net, Trial.alone(coll.size, 1))


@on_ranks
@pytest.mark.parametrize("way", ["step", "own", "changed"])
async def test_n19_rates_that_come_to_differ(coll: Communicator, way: str) -> None:
    """A scheduler or the program changes the rate: that step raises, or `net.backward` if the program steps itself."""
    net = await DataParallel.create(Trial.Mlp(), coll)
    opt = SGD(net.parameters(), lr=0.1)
    schedule = StepLR(opt, 2 if coll.rank == 1 else 1, gamma=0.5)

    async def one(number: int) -> None:
        if way == "own":
            opt.zero_grad()
            await net.backward(Trial.loss(net, coll.rank, number))
            opt.step()
            schedule.step()
            return
        await step(net, opt, coll.rank, number)
        if way == "step":
            schedule.step()
        elif coll.rank != 1:
            opt.param_groups[0]["lr"] = 0.05

    await one(0)
    known = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(aiodist.MismatchError, match=r"lr of group 0 of SGD: ranks? \d.*: 0\.05; ranks? \d.*: 0\.1"):
        await one(1)
    assert all(map(torch.equal, known, net.parameters()))
    opt.param_groups[0]["lr"] = 0.1
    await step(net, opt, coll.rank, 1)
    Trial.assert_same(net, Trial.alone(coll.size, 2))


@pytest.mark.ranks(2)
async def test_n19_a_list_of_hyperparameters_that_changes_in_place(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    opt, betas = Adam(net.parameters()), [0.9, 0.9]
    opt.param_groups[0]["betas"] = betas
    await step(net, opt, coll.rank)
    betas[1] = 0.5 if coll.rank else 0.9
    with pytest.raises(aiodist.MismatchError, match=r"betas of group 0 of Adam: .*0\.5"):
        await step(net, opt, coll.rank)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["pipelined", "sharded", "local", "plain", "outer"])
async def test_n19_drivers_whose_rates_differ(coll: Communicator, kind: str) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    lr = 0.1 + 0.1 * coll.rank

    def sgd(params: Any) -> SGD:
        return SGD(params, lr=0.1 if kind == "outer" else lr)

    drivers: dict[str, Callable[[], Any]] = {
        "pipelined": lambda: nn.PipelinedOptimizer.create(net, sgd),
        "sharded": lambda: nn.ShardedOptimizer.create(net, sgd),
        "local": lambda: nn.LocalSGD.create(net, sgd(net.parameters()), every=2),
        "plain": lambda: nn.LocalSGD.create(net, sgd(net.parameters()), every=1),
        "outer": lambda: nn.LocalSGD.create(net, sgd(net.parameters()), every=2, outer=lambda p: SGD(p, lr=lr)),
    }
    opt = await drivers[kind]()

    async def train() -> None:
        for number in range(2):
            await step(net, opt, coll.rank, number)
        await opt.flush()

    with pytest.raises(aiodist.MismatchError, match=r"lr of group 0 of SGD.*: rank 0: 0\.1; rank 1: 0\.2"):
        await train()
    if kind == "pipelined":  # the second step had begun
        with pytest.raises(aiodist.MismatchError, match="disagree on the settings"):
            await opt.flush()


@on_ranks
async def test_n19_what_may_differ(coll: Communicator) -> None:
    """Values that are equal, what each rank keeps for itself, how many closures; other objects."""
    torch.manual_seed(coll.rank)
    head = torch.nn.Linear(3, 3).double()
    net = await DataParallel.create(Trial.Mlp(), coll, per_rank=head.parameters())
    groups: list[dict[str, Any]] = [{"params": net.parameters(), "lr": 1 if coll.rank == 1 else 1.0, "tag": object()}]
    more = [torch.nn.Parameter(torch.zeros(3)) for _ in range(coll.rank)]
    net.configure(per_rank=[*head.parameters(), *more])
    opt = SGD(
        [*groups, *({"params": [p]} for p in more), {"params": head.parameters(), "lr": 0.1 * (1 + coll.rank)}], lr=0.1
    )
    for number in range(2):
        forwards = [lambda: Trial.loss(net, coll.rank, 0) / (1 + coll.rank)] * (1 + coll.rank)
        await net.step(forwards, opt)
        assert number == net.steps_done - 1
    await assert_synchronized(net.module, coll)


@on_ranks
async def test_n19_several_optimizers_in_another_order(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    first, *others = net.parameters()
    opts = [SGD([first], lr=0.1), Adam(others, lr=0.02)]
    for number in range(3):
        net.zero_grad()
        await net.backward(Trial.loss(net, coll.rank, number))
        for opt in opts if coll.rank else reversed(opts):
            opt.step()
    await assert_synchronized(net.module, coll)
    opts[1].param_groups[0]["lr"] *= 1 + coll.rank
    with pytest.raises(aiodist.MismatchError, match=r"lr of group 0 of Adam, the .*: rank 0: 0\.02; rank 1: 0\.04"):
        await net.backward(Trial.loss(net, coll.rank, 3))


@pytest.mark.ranks(2)
async def test_n19_ranks_without_data_tell_no_settings(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, clip_norm=1.0)
    opt = Adam(net.parameters(), lr=0.02)
    async with net.join():
        for number in range(1 + 2 * coll.rank):
            await step(net, opt, coll.rank, number)
    await step(net, opt, coll.rank, 9)
    await assert_synchronized(net.module, coll)
