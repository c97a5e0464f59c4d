"""N7: the module while updates are pending: calls, copies, flushes at any time."""

from __future__ import annotations

import asyncio
import copy
import pickle

import pytest
import torch

from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer
from tests.nn.pipelined.conftest import Course


@pytest.mark.ranks(2)
async def test_n7_the_module_is_called_while_updates_are_pending(coll: Communicator) -> None:
    net = await Course.split(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    held = Course.hold(net)
    x = Course.batch(9, 9)
    expected = Course.mlp()
    plain = Course.sgd(expected.parameters())
    for step in range(3):
        work = asyncio.ensure_future(net.step(Course.loss_of, opt, net, coll.rank, step))
        await work
        with pytest.raises(RuntimeError, match=r"net\.submit\(net, x\)"):
            net(x)
        with pytest.raises(RuntimeError, match=r"opt\.flush\(\)"):
            net.module[2](torch.zeros(1, 8).double())  # type: ignore[index]
        Course.reference(expected, plain, coll.size, range(step, step + 1))
        with torch.no_grad():
            seen = net.submit(net, x)
            await Course.until(seen.done, held.release)
            out = await seen
        assert not out.requires_grad
        torch.testing.assert_close(out, expected(x).detach(), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(net(x), expected(x), rtol=1e-6, atol=1e-9)


@pytest.mark.ranks(2)
async def test_n7_flush_any_time(coll: Communicator) -> None:
    net = await Course.split(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    await opt.flush()
    await Course.train(net, opt, coll, range(1))
    await opt.flush()
    await opt.flush()
    await Course.train(net, opt, coll, range(1, 3))
    Course.check(net.module, Course.mlp(), coll.size, range(3))


@pytest.mark.ranks(2)
async def test_n7_gradients_from_before_do_not_count(coll: Communicator) -> None:
    """The step refuses to drop gradients, like any `net.step`."""
    net = await Course.split(Course.mlp(), coll, 100)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    for step in range(3):
        await opt.flush()
        with net.no_sync():
            await net.backward(await net.submit(Course.loss_of, net, coll.rank, 50 + step))
        with pytest.raises(RuntimeError, match=r"net\.step forgets gradients"):
            await Course.train(net, opt, coll, range(step, step + 1))
        net.zero_grad()
        await Course.train(net, opt, coll, range(step, step + 1))
    Course.check(net.module, Course.mlp(), coll.size, range(3))


@pytest.mark.ranks(2)
async def test_n7_copies_of_the_module_are_free(coll: Communicator) -> None:
    net = await DataParallel.create(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    held = Course.hold(net)
    await net.step(Course.loss_of, opt, net, coll.rank, 0)
    x = Course.batch(3, 3)
    expected = Course.mlp()(x)
    for made in (copy.deepcopy(net.module), pickle.loads(pickle.dumps(net.module))):
        torch.testing.assert_close(made(x), expected)  # the weights of then, and no guard
        made(x).sum().backward()
    with pytest.raises(RuntimeError, match="still in flight"):
        net(x)
    held.end()
    await opt.flush()
    opt.close()
    assert not any(module._forward_pre_hooks for module in net.module.modules())
