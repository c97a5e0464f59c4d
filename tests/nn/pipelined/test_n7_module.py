"""N7: the module while updates are pending: calls, copies, flushes at any time."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import TYPE_CHECKING

import pytest
import torch

from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer

if TYPE_CHECKING:
    from tests.nn.pipelined.conftest import Course


@pytest.mark.ranks(2)
async def test_n7_the_module_is_called_while_updates_are_pending(coll: Communicator, course: type[Course]) -> None:
    net = await course.split(course.mlp(), coll)
    opt = PipelinedOptimizer(net, course.sgd)
    held = course.hold(net)
    x = course.batch(9, 9)
    expected = course.mlp()
    plain = course.sgd(expected.parameters())
    for step in range(3):
        work = asyncio.ensure_future(net.step(course.loss_of, opt, net, coll.rank, step))
        await work
        with pytest.raises(RuntimeError, match=r"net\.run\(net, x\)"):
            net(x)
        with pytest.raises(RuntimeError, match=r"opt\.flush\(\)"):
            net.module[2](torch.zeros(1, 8).double())  # type: ignore[index]
        course.reference(expected, plain, coll.size, range(step, step + 1))
        with torch.no_grad():
            seen = net.run(net, x)
            await course.until(seen.done, held.release)
            out = await seen
        assert not out.requires_grad
        torch.testing.assert_close(out, expected(x).detach(), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(net(x), expected(x), rtol=1e-6, atol=1e-9)


@pytest.mark.ranks(2)
async def test_n7_flush_any_time(coll: Communicator, course: type[Course]) -> None:
    net = await course.split(course.mlp(), coll)
    opt = PipelinedOptimizer(net, course.sgd)
    await opt.flush()
    await course.train(net, opt, coll, range(1))
    await opt.flush()
    await opt.flush()
    await course.train(net, opt, coll, range(1, 3))
    course.check(net.module, course.mlp(), coll.size, range(3))


@pytest.mark.ranks(2)
async def test_n7_gradients_from_before_do_not_count(coll: Communicator, course: type[Course]) -> None:
    """As in any step: it refuses to drop them."""
    net = await course.split(course.mlp(), coll, 100)
    opt = PipelinedOptimizer(net, course.sgd)
    for step in range(3):
        await opt.flush()
        with net.no_sync():
            await net.backward(await net.run(course.loss_of, net, coll.rank, 50 + step))
        with pytest.raises(RuntimeError, match=r"net\.step forgets gradients"):
            await course.train(net, opt, coll, range(step, step + 1))
        net.zero_grad()
        await course.train(net, opt, coll, range(step, step + 1))
    course.check(net.module, course.mlp(), coll.size, range(3))


@pytest.mark.ranks(2)
async def test_n7_copies_of_the_module_are_free(coll: Communicator, course: type[Course]) -> None:
    net = await DataParallel.create(course.mlp(), coll)
    opt = PipelinedOptimizer(net, course.sgd)
    held = course.hold(net)
    await net.step(course.loss_of, opt, net, coll.rank, 0)
    x = course.batch(3, 3)
    expected = course.mlp()(x)
    for made in (copy.deepcopy(net.module), pickle.loads(pickle.dumps(net.module))):
        torch.testing.assert_close(made(x), expected)  # the weights of then, and no guard
        made(x).sum().backward()
    with pytest.raises(RuntimeError, match="on their way"):
        net(x)
    held.end()
    await opt.flush()
    opt.close()
    assert not any(module._forward_pre_hooks for module in net.module.modules())
