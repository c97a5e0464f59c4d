"""N3: cancelling an await stops neither a step nor a transfer; the next step works, and all ranks stay in step."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel
from aiodist.testing import run_ranks
from aiodist.testing.seams.progress import reducer_of
from tests.nn.conftest import Trial
from tests.support.in_backward import in_backward

STEPS = 3


class Gate:
    """A point at which the compute thread stops until the test lets it continue."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()
        self.go = threading.Event()

    def __call__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.reached.set)
        assert self.go.wait(30)


def pausing(net: Any, where: str, gate: Gate) -> Callable[[Any], Tensor]:
    """Return a forward that goes through the gate there."""

    def forward(x: Any) -> Tensor:
        first, *others = net.module
        if where == "forward":
            gate()
        y = first(x)
        if where == "backward":  # the last layers' gradients are in flight by then
            y = in_backward(y, gate)
        return torch.nn.Sequential(*others)(y)  # type: ignore[no-any-return]

    return forward


async def give_up(work: asyncio.Task[Any]) -> None:
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", [{0}, {1}, {0, 1}], ids=str)
@pytest.mark.parametrize("where", ["forward", "backward"])
async def test_n3_a_step_that_has_begun_ends(coll: Communicator, where: str, who: set[int]) -> None:
    net, opt = await Trial.made(coll, "momentum", **Trial.SMALL)
    for step in range(STEPS):
        gate = Gate()
        forward = pausing(net, where, gate)
        work = asyncio.ensure_future(net.step(partial(Trial.loss, forward, coll.rank, step), opt))
        await gate.reached.wait()
        if coll.rank in who:
            await give_up(work)
            gate.go.set()
        else:
            gate.go.set()
            await work
    await net.submit(int)  # runs after the last step
    Trial.assert_same(net, Trial.alone(2, STEPS, optimizer="momentum"))


def has_another_that_is_closed(net: DataParallel, last: object) -> bool:
    newest = reducer_of(net).last
    return newest is not None and newest is not last and newest.times.backward_ended is not None


@pytest.mark.ranks(2)
async def test_n3_cancelled_while_the_others_are_late(coll: Communicator, until: Any) -> None:
    """This rank's backward has finished; its reductions wait for the other rank."""
    net, opt = await Trial.made(coll, "adam", **Trial.SMALL)
    for step in range(STEPS):
        last = reducer_of(net).last
        if coll.rank == step % 2:
            await coll.barrier()
            await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        else:
            work = asyncio.ensure_future(net.step(partial(Trial.loss, net, coll.rank, step), opt))
            await until(partial(has_another_that_is_closed, net, last))
            await give_up(work)
            await coll.barrier()
    await net.submit(int)
    Trial.assert_same(net, Trial.alone(2, STEPS, optimizer="adam"))


async def _cancel(work: Awaitable[Any], passed: asyncio.Event) -> None:
    task = asyncio.ensure_future(work)
    await passed.wait()
    await give_up(task)


async def _wait_for(work: Awaitable[Any], passed: asyncio.Event) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(work, 0.1)


async def _timeout(work: Awaitable[Any], passed: asyncio.Event) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await work


async def _our_timeout(work: Awaitable[Any], passed: asyncio.Event) -> None:
    with pytest.raises(aiodist.OperationTimeout):
        async with aiodist.timeout(0.1):
            await work


async def _task_group(work: Awaitable[Any], passed: asyncio.Event) -> None:
    async def step() -> None:
        await work

    with pytest.raises(ExceptionGroup):  # noqa: PT012  - the test is about a group
        async with asyncio.TaskGroup() as group:
            group.create_task(step())
            await passed.wait()
            raise ValueError


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", [_cancel, _wait_for, _timeout, _our_timeout, _task_group])
async def test_n3_any_way_of_giving_up(coll: Communicator, way: Any) -> None:
    net, opt = await Trial.made(coll, "momentum", **Trial.SMALL)
    for step in range(STEPS):
        gate = Gate()
        forward = pausing(net, "backward", gate)
        await way(net.step(partial(Trial.loss, forward, coll.rank, step), opt), gate.reached)
        gate.go.set()
    gate = Gate()
    await net.submit(net.zero_grad)
    loss = await net.submit(Trial.loss, pausing(net, "backward", gate), coll.rank, STEPS)
    await way(net.backward(loss), gate.reached)
    gate.go.set()
    await net.submit(opt.step)
    Trial.assert_same(net, Trial.alone(2, STEPS + 1, optimizer="momentum"))


@pytest.mark.drawn(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", [{0}, {1}, {0, 1}], ids=str)
async def test_n3_cancelled_at_every_point(coll: Communicator, who: set[int]) -> None:
    net, opt = await Trial.made(coll, "momentum", **Trial.SMALL)
    points = 15
    for step in range(points):
        made: list[int] = []

        def forward(step: int = step, made: list[int] = made) -> Tensor:
            made.append(step)
            return Trial.loss(net, coll.rank, step)

        work = asyncio.ensure_future(net.step(forward, opt))
        if coll.rank not in who:
            await work
            continue
        for _ in range(step):
            await asyncio.sleep(0)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        await net.submit(int)
        if not made:  # it never began
            await net.step(forward, opt)
    Trial.assert_same(net, Trial.alone(2, points, optimizer="momentum"))


@pytest.mark.drawn(1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", [{0}, {1}, {0, 1}], ids=str)
async def test_n3_a_backward_cancelled_at_every_point(coll: Communicator, who: set[int]) -> None:
    net, opt = await Trial.made(coll, **Trial.SMALL)
    points = 15
    for step in range(points):
        await net.submit(opt.zero_grad)
        loss = await net.submit(Trial.loss, net, coll.rank, step)
        work = asyncio.ensure_future(net.backward(loss))
        if coll.rank in who:
            for _ in range(step):
                await asyncio.sleep(0)
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            await net.submit(int)
            if net.statistics().passes == step:
                await net.backward(loss)
        else:
            await work
        await net.submit(opt.step)
    Trial.assert_same(net, Trial.alone(2, points))


def test_n3_a_late_rank_is_told_and_the_step_goes_on() -> None:
    told = asyncio.Event()

    async def main() -> None:
        async with aiodist.init(timeout=5) as coll:
            net, opt = await Trial.made(coll, "momentum", **Trial.SMALL)
            await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
            if coll.rank == 0:
                with pytest.raises(aiodist.OperationTimeout, match="late: rank 1") as caught:
                    await net.step(lambda: Trial.loss(net, coll.rank, 1), opt)
                assert list(caught.value.late) == [1]
                told.set()
            else:
                await told.wait()
                await net.step(lambda: Trial.loss(net, coll.rank, 1), opt)
            await net.step(lambda: Trial.loss(net, coll.rank, 2), opt)
            Trial.assert_same(net, Trial.alone(2, 3, optimizer="momentum"))

    run_ranks(2, main)


@pytest.mark.ranks(2)
async def test_n3_no_sync_behind_a_backward_that_was_given_up(coll: Communicator) -> None:
    """Gradients accumulated here must not be added to gradients in reduction, nor to a sum that all ranks share."""
    for op in ("mean", "sum"):
        net = await DataParallel.create(Trial.Mlp(), coll, op=op, **Trial.SMALL)
        gate = Gate()
        work = asyncio.ensure_future(net.backward(Trial.loss(pausing(net, "backward", gate), coll.rank, 0)))
        await gate.reached.wait()
        await give_up(work)
        with net.no_sync():
            gate.go.set()
            await net.backward(Trial.loss(net, coll.rank, 1))
        await net.backward(Trial.loss(net, coll.rank, 2))
        expected = Trial.Mlp()
        for step in range(3):
            losses = torch.stack([Trial.loss(expected, rank, step) for rank in range(2)])
            (losses.mean() if op == "mean" else losses.sum()).backward()
        Trial.assert_same_gradients(net, expected)
        await net.aclose()


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2))
def test_n3_a_rank_that_is_cancelled_while_a_net_is_made(seed: int) -> None:
    """The other ranks raise, even if they have a communicator that the cancelled rank has not made yet."""

    async def program(ticks: int) -> tuple[str, float]:
        async with aiodist.init() as coll:
            loop = asyncio.get_running_loop()
            began, task = loop.time(), asyncio.ensure_future(DataParallel.create(Trial.Mlp(), coll))
            if coll.rank == 0:
                for _ in range(ticks):
                    await asyncio.sleep(0)
                task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                await asyncio.sleep(20)  # it does something else
            except aiodist.CommunicatorAborted as error:
                return str(error), loop.time() - began
            return "", 0.0

    for ticks in range(1, 24):
        _, (seen, seconds) = run_ranks(2, partial(program, ticks), seed)
        assert "rank 0 was cancelled" in seen, ticks
        assert seconds < 10, ticks
