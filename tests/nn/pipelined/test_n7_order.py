"""N7: the next forward begins while reductions are in flight, and reductions are issued in the order of forward."""

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
from aiodist.nn import DataParallel, PipelinedOptimizer
from aiodist.nn.pass_machine import Phase
from aiodist.testing.seams.progress import reducer_of
from tests.nn.pipelined.conftest import Course

BACKWARD = [24, 56, 42, 30, 20]
"""Elements of the chain's layers, as backward comes to them."""


def recorded(module: nn.Module) -> list[int]:
    """Return a list to which each linear layer's forward adds its place."""
    ran: list[int] = []
    for i, layer in enumerate(module.children()):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    return ran


@pytest.mark.ranks(1, 2)
async def test_n7_forward_begins_while_the_last_bucket_is_on_its_way(coll: Communicator) -> None:
    """And so it does in each step, though the bucket of the step before came in the middle of it."""
    net = await Course.split(Course.chain(), coll)
    ran = recorded(net.module)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    await net.step(Course.loss_of, opt, net, coll.rank, 0)
    await opt.flush()
    held = Course.hold(net, lambda t: t.numel() == 24)
    await net.step(Course.loss_of, opt, net, coll.rank, 1)
    for step in range(2, 5):
        await Course.until(lambda: len(held) == 1)
        ran.clear()
        work = asyncio.ensure_future(net.step(Course.loss_of, opt, net, coll.rank, step))
        await Course.until(lambda: ran == [0, 1, 2, 3])
        assert len(held) == 1
        assert not work.done()
        held.release()
        await work
        assert ran == [0, 1, 2, 3, 4]
    held.end()
    await opt.flush()
    Course.check(net.module, Course.chain(), coll.size, range(5))


def has_status(reduction: Any) -> bool:
    return reduction.machine.status is not None


def is_agreeing(net: DataParallel) -> bool:
    return (last := reducer_of(net).last) is not None and last.machine.phase is Phase.AGREEING


def set_window(net: DataParallel, nbytes: int) -> None:
    reducer_of(net).window = nbytes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", [2, 3, 4])
async def test_n7_what_is_not_sent_when_backward_ends_goes_in_the_order_of_forward(
    coll: Communicator, first: int
) -> None:
    """One rank has sent two buckets by then, the other more: both continue with the first layer's bucket."""
    net = await Course.split(Course.chain(), coll)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    await Course.train(net, opt, coll, range(2))
    held = Course.hold(net)
    for step in (2, 3):
        mine = first if coll.rank == step % 2 else 2
        set_window(net, 1 if mine == 2 else 8 * sum(BACKWARD[:mine]))
        held.issued.clear()
        await net.step(Course.loss_of, opt, net, coll.rank, step)
        last = reducer_of(net).last
        assert last is not None
        await Course.until(partial(has_status, last))
        # Nothing came back yet, so it is for the window alone to say what may go.
        assert held.issued[:mine] == BACKWARD[:mine]
        assert len(held.issued) in (mine, first)
        flushed = asyncio.ensure_future(opt.flush())
        await Course.until(flushed.done, held.release)
        await flushed
        assert held.issued == BACKWARD[:first] + BACKWARD[first:][::-1]
    held.end()
    Course.check(net.module, Course.chain(), coll.size)


def test_n7_one_order_on_all_ranks_though_backward_ends_at_other_times() -> None:
    """One rank is in the middle of its backward when the others have finished theirs."""
    late = threading.Event()
    orders: dict[int, list[int]] = {}

    async def main(rank: int) -> None:
        async with aiodist.init() as coll:
            net = await Course.split(Course.chain(), coll)
            opt = await PipelinedOptimizer.create(net, Course.sgd)
            await Course.train(net, opt, coll, range(2))
            held = Course.hold(net, lambda t: False)
            set_window(net, 1)

            def forward() -> Tensor:
                x = Course.batch(rank, 2)
                for i, layer in enumerate(net.module.children()):
                    x = layer(x)
                    if rank == 1 and i == 3:
                        x = Course.wait(x, lambda: late.wait(20))
                return (x * torch.arange(1.0, 4.0, dtype=x.dtype)).tanh().square().mean()

            work = asyncio.ensure_future(net.step(forward, opt))
            if rank == 0:  # the second bucket waits for rank 1, and the third for that
                await Course.until(partial(is_agreeing, net))
                assert held.issued in (BACKWARD[:2], BACKWARD[:3])
                late.set()
            await work
            await opt.flush()
            orders[rank] = held.issued
            Course.check(net.module, Course.chain(), 3, range(3))

    aiodist.testing.run_ranks(3, main)
    assert orders[0] == orders[1] == orders[2]
    assert orders[0] in [BACKWARD[:i] + BACKWARD[i:][::-1] for i in range(2, 6)]


@pytest.mark.ranks(2)
async def test_n7_only_the_compute_thread_steps(coll: Communicator) -> None:
    threads: set[str] = set()

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            threads.add(threading.current_thread().name)
            return super().step(closure)

    net = await Course.split(Course.mlp(), coll)
    opt = await PipelinedOptimizer.create(net, lambda params: Spy(params, lr=0.1))
    held = Course.hold(net)
    await Course.train(net, opt, coll, held=held)
    held.holding = lambda t: False
    await Course.train(net, opt, coll)
    assert threads == {await net.submit(lambda: threading.current_thread().name)}


@pytest.mark.parametrize("slow", [0, 1])
def test_n7_a_clock_that_jumps_does_not_while_a_rank_computes(slow: int) -> None:
    """A forward waits for a timer, under a limit of a day: the clock of `run_ranks` must not jump to the limit."""
    due = threading.Event()

    async def main(rank: int) -> None:
        async with aiodist.init() as coll, asyncio.timeout(86_000):
            net = await Course.split(Course.mlp(), coll)
            opt = await PipelinedOptimizer.create(net, Course.sgd)
            loop = asyncio.get_running_loop()

            def forward(step: int) -> Tensor:
                if rank == slow:
                    loop.call_soon_threadsafe(loop.call_later, 0.2, due.set)
                    assert due.wait(20)
                return Course.loss_of(net, rank, step)

            for step in range(2):
                await net.step(forward, opt, step)
            await opt.flush()
            Course.check(net.module, Course.mlp(), 2, range(2))

    aiodist.testing.run_ranks(2, main)
