"""N3: every way to call an optimizer's step is seen, and a program that is correct on all ranks raises no error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim import optimizer as of_torch

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, assert_synchronized
from tests.nn.conftest import Trial

on_ranks = pytest.mark.ranks(2)
on_processes = pytest.mark.ranks(2, backend="gloo")


class Derived(SGD):
    """Torch's hook fires for the step of this class, and for its base class's step if an instance of that exists."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@asynccontextmanager
async def trained(coll: Communicator) -> AsyncIterator[DataParallel]:
    """Make a net; in the end no alarm was raised, and all ranks have the same parameters."""
    async with await DataParallel.create(Trial.Mlp(), coll, **Trial.FEW) as net:
        yield net
        net.zero_grad()
        await net.backward(Trial.loss(net, coll.rank, 9))
        await assert_synchronized(list(net.parameters()), coll)


async def backward(net: DataParallel, rank: int, step: int = 0) -> None:
    net.zero_grad()
    await net.backward(Trial.loss(net, rank, step))


async def check_told(net: DataParallel, rank: int, made: tuple[int, int]) -> None:
    said = [f"rank {rank}: {count} step{'s' * (count != 1)} made" for rank, count in enumerate(made)]
    with pytest.raises(aiodist.MismatchError, match="; ".join(said)):
        await backward(net, rank)


@on_ranks
@pytest.mark.parametrize("lost", [0, 1])
async def test_n3_one_of_several_optimizers_is_left_out(coll: Communicator, lost: int) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    first, *others = net.parameters()
    opts = [SGD([first], lr=0.1), Adam(others, lr=0.1)]
    for step in range(2):
        await backward(net, coll.rank, step)
        for number, opt in enumerate(opts):
            if (coll.rank, step, number) != (1, 1, lost):
                opt.step()
    await check_told(net, coll.rank, (4, 3))


@on_ranks
@pytest.mark.parametrize("kind", [Derived, partial(Adam, foreach=True), partial(Adam, fused=True), "scheduled"])
async def test_n3_every_kind_of_step_is_seen(coll: Communicator, kind: Any) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    opt = SGD(net.parameters(), lr=0.1) if kind == "scheduled" else kind(net.parameters(), lr=0.1)
    if kind == "scheduled":
        torch.optim.lr_scheduler.StepLR(opt, 1)
    for step in range(3):
        await backward(net, coll.rank, step)
        if (coll.rank, step) != (1, 2):
            opt.step()
    await check_told(net, coll.rank, (3, 2))


@pytest.mark.thorough
@on_ranks
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
async def test_n3_a_compiled_step_is_seen(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    opt = SGD(net.parameters(), lr=0.1)
    compiled = torch.compile(opt.step, backend="eager")
    for step in range(3):
        await backward(net, coll.rank, step)
        if (coll.rank, step) != (1, 2):
            (compiled if coll.rank == 0 or step else opt.step)()
    await check_told(net, coll.rank, (3, 2))


@on_ranks
async def test_n3_several_backwards_for_a_step(coll: Communicator) -> None:
    async with trained(coll) as net:
        opt = SGD(net.parameters(), lr=0.1)
        for step in range(8):
            if step % 4 < 2:
                with net.no_sync():
                    await net.backward(Trial.loss(net, coll.rank, step))
            else:
                await net.backward(Trial.loss(net, coll.rank, step))
            if step % 4 == 3:
                opt.step()
                opt.zero_grad()


@pytest.mark.drawn(2)
@on_ranks
@pytest.mark.parametrize("way", ["plain", "run", "step"])
async def test_n3_a_step_that_all_ranks_skip(coll: Communicator, way: str) -> None:
    """All ranks skip a step after an overflow on one, like GradScaler: the reduced gradients are the same on all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    class Scaled(SGD):
        def step(self, closure: Any = None) -> Any:
            if any(not p.grad.isfinite().all() for group in self.param_groups for p in group["params"]):
                return None
            return super().step(closure)

    async with trained(coll) as net:
        opt = (Scaled if way == "step" else SGD)(net.parameters(), lr=0.1)
        for step in range(4):
            factor = float("inf") if coll.rank == 1 and step in (1, 2) else 1.0
            if way == "step":
                await net.step(lambda step, factor: factor * Trial.loss(net, coll.rank, step), opt, step, factor)
                continue
            net.zero_grad()
            await net.backward(scaler.scale(factor * Trial.loss(net, coll.rank, step)))
            if way == "run":
                await net.submit(scaler.step, opt)
            else:
                scaler.step(opt)
            scaler.update()
        assert way == "step" or scaler.get_scale() == 256.0


@on_ranks
async def test_n3_ways_to_step_that_differ(coll: Communicator) -> None:
    """One rank steps on the compute thread, another calls `step`, a third passes a closure: each counts as a step."""
    async with trained(coll) as net:
        opt = SGD(net.parameters(), lr=0.1)
        for step in range(4):
            if step == 3:
                await net.step(partial(Trial.loss, net, coll.rank, step), opt)
                continue
            await backward(net, coll.rank, step)
            if (coll.rank + step) % 3 == 0:
                await net.submit(opt.step)
            elif (coll.rank + step) % 3 == 1:
                opt.step()
            else:
                opt.step(lambda: torch.zeros(()))


@on_processes
async def test_n3_a_hook_that_fires_twice_on_one_rank(coll: Communicator) -> None:
    async with trained(coll) as net:
        opt = Derived(net.parameters(), lr=0.1)
        if coll.rank:
            SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        for step in range(3):
            await backward(net, coll.rank, step)
            opt.step()


def elsewhere(net: DataParallel) -> None:
    """Train another module."""
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    SGD(other.parameters(), lr=0.1).step()


def at_once(net: DataParallel) -> None:
    """Give the optimizer a state before there are gradients, as for a checkpoint."""
    opt = Adam(net.parameters(), lr=0.0)
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    net.zero_grad()


@on_ranks
@pytest.mark.parametrize("what", [elsewhere, at_once])
async def test_n3_steps_of_one_rank_that_change_nothing(
    coll: Communicator, what: Callable[[DataParallel], None]
) -> None:
    async with trained(coll) as net:
        opt = SGD(net.parameters(), lr=0.1)
        for step in range(3):
            if coll.rank and (step == 0 or what is elsewhere):
                what(net)
            await net.step(partial(Trial.loss, net, coll.rank, step), opt)
            if coll.rank:
                await net.submit(opt.state_dict)
        await backward(net, coll.rank)
        if coll.rank:
            await net.submit(opt.state_dict)


@on_ranks
async def test_n3_an_optimizer_for_each_parameter_as_gradients_arrive(coll: Communicator) -> None:
    """The ranks step in different order, before the pass has ended."""
    async with trained(coll) as net:
        opts = {p: SGD([p], lr=0.1) for p in net.parameters()}
        for step in range(3):
            net.zero_grad()
            async for p, _ in net.backward_iter(Trial.loss(net, coll.rank, step)):
                opts[p].step()


@on_ranks
async def test_n3_plain_steps_in_a_join_block(coll: Communicator) -> None:
    async with trained(coll) as net:
        opt = SGD(net.parameters(), lr=0.1, momentum=0.9)
        for epoch in range(2):
            async with net.join(opt):
                for step in range(1 + 2 * coll.rank + epoch):
                    await backward(net, coll.rank, step)
                    opt.step()
            await backward(net, coll.rank)
            opt.step()


@on_processes
async def test_n3_the_hook_goes_with_the_last_net(coll: Communicator) -> None:
    before = dict(of_torch._global_optimizer_post_hooks)
    nets = [await DataParallel.create(Trial.Mlp(), coll) for _ in range(2)]
    hooks = of_torch._global_optimizer_post_hooks
    assert len(hooks) == len(before) + 1
    await nets[1].aclose()
    assert len(hooks) == len(before) + 1
    await nets[0].aclose()
    assert dict(hooks) == before
