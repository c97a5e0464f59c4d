"""N3: gradients that are not reduced update no parameter, and none that were kept are dropped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam

from aiodist import Communicator, RemoteError, nn
from aiodist.nn import DataParallel, assert_synchronized
from tests.nn.conftest import Trial
from tests.support.awaited import awaited
from tests.support.in_backward import in_backward

on_ranks = pytest.mark.ranks(1, 2)
NOT_REDUCED = r"\.step\(\) was called while the gradient of parameter '\d\.\w+' was not reduced yet.*net\.backward_iter"
CHANGED = r"parameter '\d\.\w+' was changed while backward ran.*load_state_dict"


@contextmanager
def hooked(module: torch.nn.Module, hook: Callable[[Tensor], object]) -> Iterator[None]:
    """In this block each gradient that is accumulated calls `hook` with its parameter."""
    handles = [p.register_post_accumulate_grad_hook(hook) for p in module.parameters()]
    yield
    for handle in handles:
        handle.remove()


def stepping(module: torch.nn.Module, make: Any = SGD) -> Callable[[Tensor], Any]:
    optimizers: dict[Tensor, Any] = {p: make([p], lr=0.1) for p in module.parameters()}
    return lambda p: optimizers[p].step()


async def one_pass(net: DataParallel, forward: Callable[[], Tensor], way: str, opt: Any) -> None:
    if way == "backward":
        await net.backward(forward())
    elif way == "gradients":
        async for _ in net.backward_iter(forward()):
            pass
    else:
        await net.step([forward] * (2 if way == "list" else 1), opt)


async def check_works(net: DataParallel, coll: Communicator) -> None:
    """The next step works, and all ranks have the same parameters."""
    await net.step(lambda: Trial.loss(net, coll.rank, 7), SGD(net.parameters(), lr=0.1))
    await assert_synchronized(net.module, coll)


@on_ranks
@pytest.mark.parametrize("make", [SGD, partial(Adam, foreach=True)])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("way", ["backward", "step", "list", "gradients"])
async def test_n3_a_hook_that_steps_within_backward(coll: Communicator, way: str, where: str, make: Any) -> None:
    module = Trial.Mlp()
    with hooked(module, stepping(module, make) if where == "before" else lambda _: None):
        net = await DataParallel.create(module, coll, **Trial.FEW)
        with hooked(module, stepping(module, make) if where == "after" else lambda _: None):
            for step in range(2):  # the first one learns the order
                before = [p.detach().clone() for p in module.parameters()]
                forward = partial(Trial.loss, net, coll.rank, step)
                with pytest.raises(RuntimeError, match=NOT_REDUCED):
                    await one_pass(net, forward, way, SGD(net.parameters(), lr=0.1))
                assert all(map(torch.equal, before, module.parameters()))
    await check_works(net, coll)


@pytest.mark.ranks(2)
async def test_n3_a_hook_that_steps_on_one_rank_alone(coll: Communicator) -> None:
    module = Trial.Mlp()
    net = await DataParallel.create(module, coll)
    told = pytest.raises(RuntimeError if coll.rank else RemoteError, match="was not reduced yet")
    with hooked(module, stepping(module) if coll.rank else lambda _: None), told:
        await net.backward(Trial.loss(net, coll.rank, 0))
    await check_works(net, coll)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", ["add", "copy", "foreach"])
@pytest.mark.parametrize("way", ["backward", "step", "gradients", "pipelined"])
async def test_n3_a_parameter_that_is_changed_within_backward(coll: Communicator, way: str, change: str) -> None:
    def descend(p: Tensor) -> None:
        assert p.grad is not None
        with torch.no_grad():
            if change == "add":
                p.add_(p.grad, alpha=-0.1)
            elif change == "copy":
                p.copy_(p - 0.1 * p.grad)
            else:
                torch._foreach_add_([p], [p.grad], alpha=-0.1)

    module = Trial.Mlp()
    net = await DataParallel.create(module, coll, **Trial.FEW)
    make = Trial.OPTIMIZERS["sgd"]
    opt: Any = await nn.PipelinedOptimizer.create(net, make) if way == "pipelined" else make(net.parameters())
    with hooked(module, descend):
        for step in range(2):
            forward = partial(Trial.loss, net, coll.rank, step)
            with pytest.raises(RuntimeError, match=CHANGED):
                await one_pass(net, forward, way, opt)


@pytest.mark.ranks(2)
async def test_n3_a_step_beside_a_pass_that_goes_on(coll: Communicator) -> None:
    """A plain optimizer steps after an early exit from the loop over gradients, while the pass continues."""
    module = torch.nn.Sequential(torch.nn.Linear(3000, 3000), torch.nn.Linear(3000, 1))
    net = await DataParallel.create(module, coll, bucket_bytes=1, first_bucket_bytes=1)
    opt = SGD(net.parameters(), lr=1e-6)
    x = torch.rand(1, 3000) + coll.rank
    await net.backward(net(x).sum())
    net.zero_grad()
    async for _ in net.backward_iter(net(x).sum()):  # the large gradient is reduced last
        with pytest.raises(RuntimeError, match=NOT_REDUCED):
            opt.step()
        break
    net.zero_grad()
    await net.backward(net(x).sum())
    opt.step()
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
async def test_n8_each_parameter_is_stepped_as_its_gradient_is_reduced(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    optimizers = {p: SGD([p], lr=0.1) for p in net.parameters()}
    for step in range(3):
        net.zero_grad()
        async for p, _ in net.backward_iter(Trial.loss(net, coll.rank, step)):
            optimizers[p].step()
    Trial.assert_same(net, Trial.alone(coll.size, 3))


@pytest.mark.ranks(2)
async def test_n18_hooks_may_step_where_ranks_step_alone(coll: Communicator) -> None:
    module = Trial.Mlp()
    net = await DataParallel.create(module, coll)
    local = await nn.LocalSGD.create(net, SGD(net.parameters(), lr=0.0), every=2)
    with hooked(module, stepping(module)):
        for step in range(4):
            await net.step([partial(Trial.loss, net, coll.rank, step)] * 2, local)
    await local.flush()
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
async def test_n3_another_net_may_step_within_backward(coll: Communicator) -> None:
    """What is stepped in a hook is no parameter of this net."""
    module, other = Trial.Mlp(), Trial.Mlp(1)
    net = await DataParallel.create(module, coll)
    beside = await DataParallel.create(other, coll)
    opt, first = SGD(other.parameters(), lr=0.1), next(other.parameters())
    before = first.detach().clone()
    await beside.backward(Trial.loss(beside, coll.rank, 0))

    def stepped(_: Tensor) -> None:
        opt.step()

    with hooked(module, stepped):
        await net.backward(Trial.loss(net, coll.rank, 0))
    assert not torch.equal(before, first)


@on_ranks
@pytest.mark.parametrize("kind", ["sgd", "pipelined", "sharded", "local"])
@pytest.mark.parametrize("way", ["net", "torch", "thread"])
async def test_n5_a_step_does_not_drop_gradients_that_were_kept(coll: Communicator, way: str, kind: str) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.FEW)
    make = Trial.OPTIMIZERS["sgd"]
    drivers: dict[str, Callable[[], Any]] = {
        "sgd": lambda: make(net.parameters()),
        "pipelined": lambda: nn.PipelinedOptimizer.create(net, make),
        "sharded": lambda: nn.ShardedOptimizer.create(net, make),
        "local": lambda: nn.LocalSGD.create(net, make(net.parameters()), every=1),
    }
    opt = await awaited(drivers[kind]())
    with net.no_sync():
        if way == "net":
            await net.backward(Trial.loss(net, coll.rank, 0))
        elif way == "torch":
            Trial.loss(net, coll.rank, 0).backward()
        else:
            await net.submit(lambda: torch.autograd.backward(Trial.loss(net, coll.rank, 0)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"net\.step forgets gradients .* as a list, `await net\.step\(\[forw"):
            await net.step(partial(Trial.loss, net, coll.rank, 1), opt)
    net.zero_grad(set_to_none=coll.rank == 0)
    await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
    if kind != "sgd":
        await opt.flush()
    Trial.assert_same(net, Trial.alone(coll.size, 1))
    await net.step(partial(Trial.loss, net, coll.rank, 1), opt)


@pytest.mark.ranks(1)
async def test_n5_what_is_kept_while_another_net_is_in_its_backward_is_kept(coll: Communicator) -> None:
    """The other net's backward runs on a thread of its own, and does not concern this net."""
    net, other = await DataParallel.create(Trial.Mlp(), coll), await DataParallel.create(Trial.Mlp(), coll)
    begun, done = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert done.wait(20)

    task = asyncio.ensure_future(other.backward(in_backward(Trial.loss(other, coll.rank, 0), hold)))
    await asyncio.to_thread(begun.wait, 20)
    with net.no_sync():
        Trial.loss(net, coll.rank, 0).backward()
    done.set()
    await task
    with pytest.raises(RuntimeError, match=r"net\.step forgets gradients"):
        await net.step(partial(Trial.loss, net, coll.rank, 1), Trial.OPTIMIZERS["sgd"](net.parameters()))


@pytest.mark.ranks(2)
async def test_n5_gradients_that_were_kept_and_reduced(coll: Communicator) -> None:
    net, opt = await Trial.made(coll)
    for step in range(0, 4, 2):
        net.zero_grad()
        with net.no_sync():
            await net.backward(Trial.loss(net, coll.rank, step))
        await net.backward(Trial.loss(net, coll.rank, step + 1))
        opt.step()
    Trial.assert_same(net, Trial.alone(coll.size, 4, every=2))
    await net.step(partial(Trial.loss, net, coll.rank, 4), opt)
