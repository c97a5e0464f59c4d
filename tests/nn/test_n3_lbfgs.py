"""N3: LBFGS, whose closure has the loop evaluate, does what one process does; errors name the way."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel


def module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, x.sin().sum(1, keepdim=True)


def lbfgs(net: nn.Module | DataParallel) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(net.parameters(), max_iter=30, line_search_fn="strong_wolfe")


def alone() -> tuple[int, list[Tensor]]:
    """Return how many evaluations one process makes in two steps, and its weights."""
    made, net, (x, y) = 0, module(), data()
    opt = lbfgs(net)

    def closure() -> Tensor:
        nonlocal made
        made += 1
        opt.zero_grad()
        loss = mse_loss(net(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure)
    return made, [p.detach().clone() for p in net.parameters()]


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3, backend=("local", "shm"))
async def test_n3_lbfgs_makes_the_evaluations_of_one_process(coll: Communicator) -> None:
    x, y = (t[coll.rank :: coll.size] for t in data())
    net = await DataParallel.create(module(), coll)
    opt, made = lbfgs(net), 0
    loop = asyncio.get_running_loop()

    async def evaluate() -> Tensor:
        nonlocal made
        made += 1
        opt.zero_grad()
        loss = await net.submit(lambda: mse_loss(net(x), y))
        await net.backward(loss)
        return await coll.allreduce(loss.detach().clone(), op="mean")

    for _ in range(2):
        await asyncio.to_thread(opt.step, lambda: asyncio.run_coroutine_threadsafe(evaluate(), loop).result())
    evaluations, weights = await asyncio.to_thread(alone) if coll.rank == 0 else (made, list(net.parameters()))
    assert made == evaluations > 40
    for mine, theirs in zip(net.parameters(), weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
    await aiodist.nn.assert_synchronized(net.module, coll, rtol=0.0)


@pytest.mark.ranks(1, 2)
async def test_n3_what_a_closure_cannot_do_names_what_it_can(coll: Communicator) -> None:
    x, y = data()
    net = await DataParallel.create(module(), coll)
    opt = lbfgs(net)

    def closure() -> Tensor:
        loss = mse_loss(net(x), y)
        loss.backward()
        return loss

    with pytest.raises(TypeError, match=r"as in examples/lbfgs\.py"):
        await net.step(lambda: mse_loss(net(x), y), opt)
    with pytest.raises(RuntimeError, match=r"closure of an optimizer such as LBFGS .* as in examples/lbfgs\.py"):
        await net.submit(opt.step, closure)


@pytest.mark.ranks(1, 2)
async def test_n3_functional_call_trains_through_the_module(coll: Communicator) -> None:
    """Parameters that are made of those of the net give these their gradients, which are reduced."""
    x, y = (t[coll.rank :: coll.size] for t in data())
    net = await DataParallel.create(module(), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)

    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        doubled = {name: 2 * p for name, p in net.named_parameters()}
        return mse_loss(functional_call(net, doubled, (x,)), y)

    for _ in range(3):
        await net.step(loss_of, opt, net.module, x, y)
    if coll.rank == 0:
        plain, (x, y) = module(), data()
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(3):
            other.zero_grad()
            loss_of(plain, x, y).backward()
            other.step()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.ranks(1)
async def test_n3_what_only_a_module_has_is_looked_for_in_net_module(coll: Communicator) -> None:
    net: Any = await DataParallel.create(module(), coll)
    with pytest.raises(AttributeError, match=r"as in `functional_call\(net\.module, parameters, x\)`"):
        functional_call(net, dict(net.named_parameters()), (data()[0],))
    with pytest.raises(AttributeError, match=r"no attribute 'weigth'.* Expected `net\.module\.weigth`") as caught:
        net.weigth  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("weigth", net)
    assert not hasattr(net, "weight")
    assert not hasattr(net, "__len__")
    assert copy.copy(net).module is net.module
    with pytest.raises(TypeError, match="cannot be pickled: save the state"):
        pickle.dumps(net)
    assert not hasattr(DataParallel.__new__(DataParallel), "module")  # half made, as copy makes it
