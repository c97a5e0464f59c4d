"""N8: gradients one after another as they arrive, while backward runs."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel
from aiodist.testing.seams.progress import reducer_of
from tests.nn.conftest import Trial
from tests.support.in_backward import in_backward


def expected_of(size: int, step: int) -> nn.Module:
    module = Trial.Mlp()
    Trial.joined(module, size, step).backward()
    return module


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("sizes", [Trial.SMALL, Trial.FEW, {}], ids=["each", "few", "all"])
async def test_n8_each_gradient_once(coll: Communicator, sizes: dict[str, Any]) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **sizes)
    for step in range(3):
        net.zero_grad()
        expected = dict(expected_of(coll.size, step).named_parameters())
        names = {p: name for name, p in net.named_parameters()}
        came: list[str] = []
        async for parameter, grad in net.backward_iter(Trial.loss(net, coll.rank, step)):
            came.append(names[parameter])
            torch.testing.assert_close(grad, expected[came[-1]].grad)
            assert grad.shape == parameter.shape
        assert sorted(came) == sorted(names.values())
        if coll.size == 1:
            assert came == [slot.name for bucket in reducer_of(net).buckets for slot in bucket.slots]
        Trial.assert_same_gradients(net, expected_of(coll.size, step))


@pytest.mark.ranks(2)
async def test_n8_the_first_arrive_while_backward_goes_on(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    await net.backward(Trial.loss(net, coll.rank, 0))
    net.zero_grad()
    go = threading.Event()
    first, *others = net.module.children()

    def forward(x: Tensor) -> Any:
        return nn.Sequential(*others)(in_backward(first(x), partial(go.wait, 30)))

    came = 0
    async for parameter, _ in net.backward_iter(Trial.loss(forward, coll.rank, 1)):
        came += 1
        if came == 4:  # those of the last two layers; the first one's come only now
            assert parameter is not first.weight
            go.set()
    assert came == 6
    Trial.assert_same_gradients(net, expected_of(2, 1))


@pytest.mark.ranks(2)
async def test_n8_unused_parameters(coll: Communicator) -> None:
    """Parameters that only other ranks used come last; parameters that no rank used do not come."""
    module = nn.ModuleDict({name: nn.Linear(6, 3).double() for name in ("both", "one", "none")})
    net = await DataParallel.create(module, coll, **Trial.SMALL)
    x, y = Trial.batch(coll.rank, 0)
    for _ in range(2):
        net.zero_grad()
        out = module["both"](x) + (module["one"](x) if coll.rank == 0 else 0)
        names = {p: name for name, p in net.named_parameters()}
        loss = torch.nn.functional.mse_loss(out, y)
        came = [names[p] async for p, grad in net.backward_iter(loss)]
        assert sorted(came) == ["both.bias", "both.weight", "one.bias", "one.weight"]
        if coll.rank == 1:
            assert {name.partition(".")[0] for name in came[2:]} == {"one"}
        assert module["none"].weight.grad is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sizes", [Trial.SMALL, {}], ids=["each", "all"])
async def test_n8_what_becomes_of_a_gradient_that_has_come_is_the_users(
    coll: Communicator, sizes: dict[str, Any]
) -> None:
    """The user deletes a gradient, and it does not come back; or the user puts another in its place."""
    net = await DataParallel.create(Trial.Mlp(), coll, **sizes)
    for step in range(6):
        expected = dict(expected_of(coll.size, step).named_parameters())
        names = {p: name for name, p in net.named_parameters()}
        mine = torch.ones(()) if step % 2 else None
        async for parameter, grad in net.backward_iter(Trial.loss(net, coll.rank, step)):
            torch.testing.assert_close(grad, expected[names[parameter]].grad)
            parameter.grad = None if mine is None else mine.to(grad).expand_as(grad)
        left = [p.grad for p in net.parameters()]
        assert all(grad is None if mine is None else grad is not None and grad.unique() == mine for grad in left)
        net.zero_grad()


@pytest.mark.ranks(2)
async def test_n8_there_are_none_within_no_sync(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    with net.no_sync(), pytest.raises(RuntimeError, match=r"net.backward_iter inside net.no_sync\(\)"):
        await anext(net.backward_iter(Trial.loss(net, coll.rank, 0)))


@pytest.mark.drawn(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", [{0}, {1}, {0, 1}], ids=str)
async def test_n8_leaving_early(coll: Communicator, who: set[int]) -> None:
    net, opt = await Trial.made(coll, **Trial.SMALL)
    for step in range(3):
        net.zero_grad()
        async for _ in net.backward_iter(Trial.loss(net, coll.rank, 7)):
            if coll.rank in who:
                break
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    Trial.assert_same(net, Trial.alone(2, 3))


@pytest.mark.ranks(2)
async def test_n8_leaving_early_and_what_may_come_next(coll: Communicator) -> None:
    """Backward continues on one rank: the next collective must not come between its reductions."""
    module = nn.Sequential(Trial.Mlp(), nn.BatchNorm1d(3).double())
    net = await DataParallel.create(module, coll, **Trial.SMALL)
    await net.backward(Trial.loss(net, coll.rank, 0))
    net.zero_grad()
    go = threading.Event()
    if coll.rank == 0:
        go.set()
    held = Trial.loss(lambda x: net(in_backward(x.requires_grad_(), partial(go.wait, 30))), coll.rank, 1)
    async for _ in net.backward_iter(held):
        break
    synchronized = net.synchronize_buffers()
    go.set()
    await synchronized
    await net.aclose()
    assert await coll.allreduce(1) == 2


@pytest.mark.ranks(2)
async def test_n8_errors(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    for _ in range(2):
        net.zero_grad()
        loss = Trial.loss(net, coll.rank, 0)
        if coll.rank:
            loss = torch.stack([loss, loss])
        with pytest.raises(
            aiodist.RemoteError if coll.rank == 0 else ValueError, match="expected the loss, one element"
        ):
            async for _ in net.backward_iter(loss):
                pass
        net.zero_grad()
        came = [p async for p, _ in net.backward_iter(Trial.loss(net, coll.rank, 1))]
        assert len(came) == 6
        Trial.assert_same_gradients(net, expected_of(2, 1))


@pytest.mark.ranks(2)
async def test_n8_a_user_who_raises(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    with pytest.raises(LookupError):  # noqa: PT012  - the test is about the loop
        async for _ in net.backward_iter(Trial.loss(net, coll.rank, 0)):
            raise LookupError
    arrived = asyncio.Event()

    async def consume() -> None:
        async for _ in net.backward_iter(Trial.loss(net, coll.rank, 1)):
            arrived.set()
            await asyncio.Event().wait()

    await net.submit(net.zero_grad)
    task = asyncio.ensure_future(consume())
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await net.submit(int)
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())
    await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
    Trial.assert_same(net, Trial.alone(2, 1))
