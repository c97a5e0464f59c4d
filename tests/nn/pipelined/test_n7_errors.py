"""N7: what goes wrong in a pipelined step, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized
from aiodist.testing import run_ranks
from aiodist.testing.seams.progress import reducer_of
from aiodist.testing.seams.world import Limits, opened
from tests.nn.pipelined.conftest import Course


class Wanders(nn.Module):
    """When it wanders, the root reads the last layer's weight, and that layer does not run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second, self.last = (nn.Linear(4, n, bias=False) for n in (4, 4, 3))
        self.double()
        self.wanders = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return F.linear(x, self.last.weight) if self.wanders else self.last(x)


@pytest.mark.ranks(2)
async def test_n7_a_parameter_that_is_used_elsewhere_later(coll: Communicator) -> None:
    """The step fails on all ranks and changes no weight; later forwards wait for the parameter before they begin."""
    module = Wanders()
    net = await Course.split(module, coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    held = Course.hold(net, lambda t: t.numel() == 12)
    await Course.train(net, opt, coll, range(2), held)
    await net.step(Course.loss_of, opt, net, coll.rank, 2)
    module.wanders = coll.rank == 1
    ran = asyncio.Event()
    loop = asyncio.get_running_loop()

    def forward() -> Tensor:
        if coll.rank == 0:  # its last layer waits
            loop.call_soon_threadsafe(ran.set)
        loss = Course.loss_of(net, coll.rank, 3)
        loop.call_soon_threadsafe(ran.set)
        return loss

    work = asyncio.ensure_future(net.step(forward, opt))
    await asyncio.wait_for(ran.wait(), 20)
    await Course.until(lambda: len(held) == 1)
    held.end()
    if coll.rank == 1:
        with pytest.raises(RuntimeError, match=r"last\.weight: used in this forward while the last"):
            await work
    else:
        await work
        with pytest.raises(aiodist.RemoteError, match=r"last\.weight: used in this forward") as caught:
            await opt.flush()
        assert caught.value.raised_by == 1
    await opt.flush()
    Course.check(module, Wanders(), 2, range(3))
    held.holding = lambda t: t.numel() == 12
    await Course.train(net, opt, coll, range(4, 7), held)
    Course.check(module, Wanders(), 2, [0, 1, 2, 4, 5, 6])


def fail() -> None:
    raise ArithmeticError("no more")


def fails(module: nn.Module, where: str, x: Tensor) -> Tensor:
    """Return the loss, unless something raises on the way: `where`."""
    if where == "before":
        fail()
    for i, layer in enumerate(module.children()):
        x = layer(x)
        if i == 2 and where == "forward":
            fail()
        if i == 2 and where == "backward":
            x = Course.wait(x, fail)
    if where == "after":
        fail()
    return (x * torch.arange(1.0, x.shape[-1] + 1, dtype=x.dtype)).tanh().square().mean()


@pytest.mark.drawn(1)
@pytest.mark.ranks(3)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("where", ["before", "forward", "after", "backward"])
async def test_n7_an_error_on_one_rank(coll: Communicator, where: str, bucket_bytes: int) -> None:
    """The rank raises its error, the others a RemoteError once; no rank makes the step, and all continue together."""

    def loss_of(step: int) -> Tensor:
        at = where if coll.rank == 1 and step == 2 else ""
        return fails(net.module, at, Course.batch(coll.rank, step))

    net = await Course.split(Course.mlp(), coll, bucket_bytes)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    held = Course.hold(net)
    raised: list[BaseException] = []
    for step in range(Course.STEPS):
        work = asyncio.ensure_future(net.step(loss_of, opt, step))
        await Course.until(work.done, held.release)
        try:
            await work
        except (ArithmeticError, aiodist.RemoteError) as error:
            raised.append(error)
    held.end()
    await opt.flush()
    [told] = raised
    if coll.rank == 1:
        assert isinstance(told, ArithmeticError)
    else:
        assert isinstance(told, aiodist.RemoteError)
        assert told.raised_by == 1
        assert "no more" in str(told)
    await assert_synchronized(list(net.parameters()), coll)
    Course.check(net.module, Course.mlp(), coll.size, [0, 1, 3])


@pytest.mark.ranks(2)
async def test_n7_an_error_in_the_last_step_is_told_by_flush(coll: Communicator) -> None:
    def forward() -> Tensor:
        if coll.rank == 0:
            raise ArithmeticError("no more")
        return Course.loss_of(net, coll.rank, 1)

    net = await DataParallel.create(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    await net.step(Course.loss_of, opt, net, coll.rank, 0)
    if coll.rank == 0:
        with pytest.raises(ArithmeticError):
            await net.step(forward, opt)
    else:
        await net.step(forward, opt)
        with pytest.raises(aiodist.RemoteError, match="no more"):
            await opt.flush()
    await opt.flush()
    Course.check(net.module, Course.mlp(), coll.size, range(1))


@pytest.mark.ranks(2)
async def test_n7_an_optimizer_that_raises_is_heard(coll: Communicator) -> None:
    """The error is raised even if no task awaits the update when it fails."""

    class Fragile(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            made.append(1)
            raise FloatingPointError("that is not a number")

    made: list[int] = []
    net = await DataParallel.create(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, lambda params: Fragile(params, lr=0.1))
    await net.step(Course.loss_of, opt, net, coll.rank, 0)
    await Course.until(lambda: made)
    with pytest.raises(FloatingPointError, match="not a number"):
        await opt.flush()
    await opt.flush()


@pytest.mark.ranks(2)
async def test_n7_what_raises_before_the_updates_of_a_step(coll: Communicator) -> None:
    """No update is made or retried: the rank is one step late until all ranks have loaded the same state."""

    class Fragile(torch.amp.GradScaler):
        def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
            if broken and broken.pop():
                raise FloatingPointError("that is not a number")
            super().unscale_(optimizer)

    broken = [bool(coll.rank)]
    net = await DataParallel.create(Course.mlp(), coll, scaler=Fragile("cpu", 64.0))
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    new = opt.state_dict()
    await net.step(Course.loss_of, opt, net, coll.rank, 0)
    with pytest.raises(FloatingPointError, match="not a number") if coll.rank else nullcontext():
        await opt.flush()
    assert not opt.pending
    await net.step(Course.loss_of, opt, net, coll.rank, 1)
    with pytest.raises(aiodist.MismatchError, match=r"rank 1: 0 steps made, since its optimizer raised Floating"):
        await opt.flush()
    net.load_state_dict(Course.mlp().state_dict())
    opt.load_state_dict(new)
    await net.step(Course.loss_of, opt, net, coll.rank, 0)
    await opt.flush()
    Course.check(net.module, Course.mlp(), coll.size, range(1))


@pytest.mark.ranks(2)
async def test_n7_a_step_that_is_cancelled_ends_all_the_same(coll: Communicator) -> None:
    net = await Course.split(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    for step in range(Course.STEPS):
        work = asyncio.ensure_future(net.step(Course.loss_of, opt, net, coll.rank, step))
        for _ in range(1 + 20 * coll.rank * (step % 2)):
            await asyncio.sleep(0)
        if step != 2:
            work.cancel()
        with suppress(asyncio.CancelledError):
            await work
    await opt.flush()
    Course.check(net.module, Course.mlp(), coll.size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["given", "left to the world"])
async def test_n7_closing_with_updates_pending_makes_them(coll: Communicator, how: str) -> None:
    net = await Course.split(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    for step in range(Course.STEPS):
        await net.step(Course.loss_of, opt, net, coll.rank, step)
    if how == "given":
        await net.aclose()
    else:
        await reducer_of(net).data.aclose()
    Course.check(net.module, Course.mlp(), coll.size)
    net.module(Course.batch(0, 0))
    with pytest.raises(RuntimeError, match="closed"):
        await opt.flush()


def test_n7_closing_while_another_rank_does_not_come() -> None:
    """Closing waits for the last updates up to its drain limit; the error then names the late rank."""
    waited: list[float] = []

    async def main(rank: int) -> None:
        async with opened(Limits(drain=2.0)) as coll:
            net = await DataParallel.create(Course.mlp(), coll)
            opt = await PipelinedOptimizer.create(net, Course.sgd)
            await net.step(Course.loss_of, opt, net, rank, 0)
            await opt.flush()
            if rank == 1:
                await coll.recv(src=0)  # until rank 0 has timed out and closed
            await net.step(Course.loss_of, opt, net, rank, 1)
            began = asyncio.get_running_loop().time()
            try:
                await net.aclose()
            finally:
                waited.append(asyncio.get_running_loop().time() - began)

    told = r"DataParallel of Sequential.* did not end in time; late: rank 1 \(.*waits for rank 0 in recv"
    with pytest.raises(aiodist.OperationTimeout, match=told):
        run_ranks(2, main)
    assert waited == [pytest.approx(2.0, abs=0.1)]


@pytest.mark.ranks(2)
async def test_n7_a_state_is_not_loaded_while_updates_are_pending(coll: Communicator) -> None:
    """The updates would silently change the loaded parameters."""
    net = await Course.split(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    state = opt.state_dict()
    held = Course.hold(net)
    await net.step(Course.loss_of, opt, net, coll.rank, 0)
    with pytest.raises(RuntimeError, match=r"await opt\.flush\(\)"):
        net.load_state_dict(Course.mlp().state_dict())
    with pytest.raises(RuntimeError, match=r"await opt\.flush\(\)"):
        opt.load_state_dict(state)
    held.end()
    await opt.flush()
    net.load_state_dict(Course.mlp().state_dict())
    Course.same(net.module, Course.mlp())


@pytest.mark.ranks(2)
async def test_n7_a_state_is_not_loaded_while_the_last_update_is_made(coll: Communicator) -> None:
    """The compute thread makes the update while the loop runs."""
    net = await DataParallel.create(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    begun, go_on = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        begun.set()
        assert go_on.wait(20)

    opt.optimizers[0].register_step_pre_hook(hold)
    await net.step(Course.loss_of, opt, net, coll.rank, 0)
    assert await asyncio.to_thread(begun.wait, 20)
    for look in (opt.state_dict, net.state_dict, lambda: net.load_state_dict(Course.mlp().state_dict())):
        with pytest.raises(RuntimeError, match=r"await opt\.flush\(\)"):
            look()
    go_on.set()
    await opt.flush()
    net.load_state_dict(Course.mlp().state_dict())
    Course.same(net.module, Course.mlp())


@pytest.mark.ranks(1)
async def test_n7_what_is_given_in_the_wrong_place_is_told(coll: Communicator) -> None:
    net = await DataParallel.create(nn.Linear(2, 2), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"net is a Linear: expected what `await DataParallel\.create"):
        await PipelinedOptimizer.create(net.module, lambda params: torch.optim.SGD(params, lr=0.1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="net is a SGD"):
        await PipelinedOptimizer.create(opt, net)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a function that makes one of its argument"):
        await PipelinedOptimizer.create(net, opt)  # type: ignore[arg-type]
    await net.aclose()
