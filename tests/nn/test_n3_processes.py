"""N3 where each rank is a process: over MPI and gloo."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, assert_synchronized
from aiodist.testing.seams.progress import reducer_of
from tests.nn.conftest import Trial

processes = pytest.mark.ranks(2, backend=("mpi", "gloo"))
over_mpi = pytest.mark.ranks(2, backend="mpi")


@pytest.mark.drawn(1)
@processes
@over_mpi
async def test_n3_equals_one_process_over_a_library(coll: Communicator) -> None:
    for bucket_bytes in (1, 600, 1 << 20):
        net, opt = await Trial.made(
            coll, "adam", Trial.Mlp(coll.rank), bucket_bytes=bucket_bytes, first_bucket_bytes=100
        )
        for step in range(4):
            await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        Trial.assert_same(net, Trial.alone(coll.size, 4, optimizer="adam"))
        await assert_synchronized(net.module, coll)
        await net.aclose()


@pytest.mark.drawn(1)
@processes
@over_mpi
async def test_n3_beside_a_task_that_communicates(coll: Communicator) -> None:
    """The task's awaits also poll for the reductions; calls that follow from a reduction do not count as the task's."""
    beside = await coll.dup()
    net = await DataParallel.create(Trial.Mlp(coll.rank), coll, **Trial.SMALL)
    over = False

    async def evaluation() -> None:
        while await beside.allreduce(int(over)) < coll.size:
            pass

    async with asyncio.TaskGroup() as group:
        group.create_task(evaluation())
        opt = Trial.OPTIMIZERS["sgd"](net.parameters())
        for step in range(20):
            if step % 5 == 4:
                with pytest.raises((ArithmeticError, aiodist.RemoteError), match="no luck"):
                    await net.step(raising if coll.rank == step % 2 else lambda: Trial.loss(net, coll.rank, 0), opt)
            await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        over = True
    Trial.assert_same(net, Trial.alone(2, 20))
    assert reducer_of(net).learnt
    await net.aclose()


def raising() -> Tensor:
    raise ArithmeticError("no luck")


@processes
async def test_n3_errors_and_time_outs_over_a_library(coll: Communicator) -> None:
    net, opt = await Trial.made(coll, "momentum", **Trial.FEW)
    for step in range(3):
        with pytest.raises((ArithmeticError, aiodist.RemoteError), match="no luck") as caught:
            await net.step(raising if coll.rank == step % 2 else lambda: Trial.loss(net, coll.rank, 0), opt)
        assert isinstance(caught.value, aiodist.RemoteError) == (coll.rank != step % 2)
        try:
            async with asyncio.timeout(1e-4 * step):
                await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        except TimeoutError:
            await net.submit(int)
            if net.statistics().passes == 2 * step + 1:  # it never began
                await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    Trial.assert_same(net, Trial.alone(2, 3, optimizer="momentum"))


@processes
async def test_n3_larger_gradients_over_a_library(coll: Communicator) -> None:
    """Some buckets are driven by the thread, some by the loop; the order stays."""
    torch.manual_seed(coll.rank)
    layers = [torch.nn.Linear(300, 300), torch.nn.Linear(300, 5), torch.nn.Linear(5, 300), torch.nn.Linear(300, 300)]
    net = await DataParallel.create(torch.nn.Sequential(*layers), coll, **Trial.SMALL)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(5):
        await net.step(lambda: net(torch.randn(4, 300)).square().mean(), opt)
        await assert_synchronized([p.grad for p in net.parameters()], coll)
    await assert_synchronized(net.module, coll)
