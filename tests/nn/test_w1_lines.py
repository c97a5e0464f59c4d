"""W1: reports name each collective of a net with the program's line that began it."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator, nn
from aiodist.communicator import parts_of
from aiodist.testing import run_ranks
from aiodist.testing.seams.progress import reducer_of
from tests.nn.conftest import Trial


def newest(net: nn.DataParallel) -> list[str]:
    """Return the names in reports of the newest collective of gradients and the newest one of their status."""
    logs = [parts_of(comm).dispatcher.oplog for comm in (reducer_of(net).data, reducer_of(net).consensus.comm)]
    return [log.text(log.seq - 1) for log in logs]


def line_below() -> str:
    """Return how a report names the line under that of the call."""
    frame: Any = inspect.currentframe()
    caller = frame.f_back
    return f" at {__file__}:{caller.f_lineno + 1} in {caller.f_code.co_qualname}"


@pytest.mark.ranks(2, backend=("local", "shm"))
async def test_w1_reductions_are_told_with_the_line_of_the_step(coll: Communicator) -> None:
    async with await nn.DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL) as net:
        opt = Trial.OPTIMIZERS["sgd"](net.parameters())
        for step in range(3):
            line = line_below()
            await net.step(lambda step=step: Trial.loss(net, coll.rank, step), opt)
            assert all(text.endswith(line) for text in newest(net)), newest(net)
        opt.zero_grad()
        loss = Trial.loss(net, coll.rank, 0)
        line = line_below()
        await net.backward(loss)
        assert all(text.endswith(line) for text in newest(net)), newest(net)
        next(net.parameters()).requires_grad_(False)  # which ranks compare first
        opt.zero_grad()
        line = line_below()
        await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
        assert all(text.endswith(line) for text in newest(net)), newest(net)


async def in_gather(call: Coroutine[Any, Any, Any]) -> None:
    await asyncio.gather(call, asyncio.sleep(0))


async def in_wait_for(call: Coroutine[Any, Any, Any]) -> None:
    await asyncio.wait_for(call, 60.0)


async def in_task(call: Coroutine[Any, Any, Any]) -> None:
    await asyncio.create_task(call)


async def in_group(call: Coroutine[Any, Any, Any]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(call)


async def later(call: Coroutine[Any, Any, Any]) -> None:
    await call


@pytest.mark.ranks(2, backend=("local", "shm"))
@pytest.mark.parametrize("how", [in_gather, in_wait_for, in_task, in_group, later])
async def test_w1_a_step_that_is_a_task_is_told_with_the_line_of_its_call(
    coll: Communicator, how: Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, None]]
) -> None:
    log = parts_of(coll).dispatcher.oplog
    line = line_below()
    made = nn.DataParallel.create(Trial.Mlp(), coll)
    await how(made)
    assert log.text(log.seq - 1).endswith(line), log.text(log.seq - 1)
    async with await nn.DataParallel.create(Trial.Mlp(), coll) as net:
        opt = Trial.OPTIMIZERS["sgd"](net.parameters())
        for _ in range(2):
            line = line_below()
            step = net.step(lambda: Trial.loss(net, coll.rank, 0), opt)
            await how(step)
            assert all(text.endswith(line) for text in newest(net)), newest(net)
        line = line_below()
        backward = net.backward(Trial.loss(net, coll.rank, 1))
        await how(backward)
        assert all(text.endswith(line) for text in newest(net)), newest(net)
        line = line_below()
        compared = nn.synchronize_parameters(net.module, coll)  # its collectives take the compiled path
        await how(compared)
        assert log.text(log.seq - 1).endswith(line), log.text(log.seq - 1)


@pytest.mark.ranks(1)
async def test_w1_a_step_that_nobody_awaits_is_reported_with_its_line(coll: Communicator) -> None:
    async with await nn.DataParallel.create(Trial.Mlp(), coll) as net:
        opt = Trial.OPTIMIZERS["sgd"](net.parameters())
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            line = line_below()
            net.step(lambda: Trial.loss(net, coll.rank, 0), opt)  # type: ignore[unused-coroutine]
    assert [str(each.message) for each in seen] == [
        f"DataParallel.step called{line} was never awaited, so it did nothing"
    ]
    assert net.steps_done == 0


@pytest.mark.ranks(2)
async def test_w1_sharded_and_pipelined_steps_are_told_too(coll: Communicator) -> None:
    for kind in (nn.ShardedOptimizer, nn.PipelinedOptimizer):
        async with await nn.DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL) as net:
            opt = await kind.create(net, Trial.OPTIMIZERS["sgd"])
            for step in range(3):
                line = line_below()
                await net.step(lambda step=step: Trial.loss(net, coll.rank, step), opt)
            await opt.flush()
            assert all(text.endswith(line) for text in newest(net)), newest(net)


INSIDE: dict[str, Callable[[Communicator], torch.nn.Module]] = {
    "column": lambda coll: nn.ColumnLinear(4, 6, coll),
    "row": lambda coll: nn.RowLinear(4, 6, coll),
    "embedding": lambda coll: nn.VocabEmbedding(10, 6, coll),
    "batch norm": lambda coll: nn.SyncBatchNorm(4, coll),
}


@pytest.mark.ranks(2, backend=("local", "shm"))
@pytest.mark.parametrize("kind", INSIDE)
async def test_w1_collectives_of_layers_are_told_with_the_line_of_their_forward(coll: Communicator, kind: str) -> None:
    own = await coll.dup(thread=True)
    log = parts_of(own).dispatcher.oplog
    module = torch.nn.Sequential(INSIDE[kind](own), torch.nn.Sequential())
    x = torch.arange(12).view(3, 4) % 9 if kind == "embedding" else torch.rand(3, 4, requires_grad=True)

    def forward() -> torch.Tensor:
        lines.append(line_below())
        loss: torch.Tensor = module(x).sum()
        return loss

    for inside in (False, True):  # in a thread of asyncio, and in that of the net
        net = await nn.DataParallel.create(module, await coll.dup()) if inside else None
        lines: list[str] = []
        before = log.seq
        if net is None:
            loss = await asyncio.to_thread(forward)
            await asyncio.to_thread(loss.backward)
        else:
            await net.backward(await net.submit(forward))
            await net.aclose()
        assert log.seq > before
        assert all(log.text(seq).endswith(lines[0]) for seq in range(before, log.seq)), log.text(log.seq - 1)


@pytest.mark.ranks(2, backend=("local", "shm"))
async def test_w1_collectives_of_autograd_are_told_with_the_line_of_their_forward(coll: Communicator) -> None:
    """The line also names collectives in a backward of backward."""
    own = await coll.dup(thread=True)
    log = parts_of(own).dispatcher.oplog
    x = torch.rand(4, requires_grad=True)
    line = line_below()
    y = await nn.functional.allgather(x, own)
    (g,) = await asyncio.to_thread(torch.autograd.grad, y.pow(3).sum(), x, create_graph=True)
    await asyncio.to_thread(g.pow(2).sum().backward)
    assert log.seq == 4
    assert all(log.text(seq).endswith(line) for seq in range(4)), log.text(3)
    line = line_below()
    await own.allreduce(torch.ones(1))
    assert log.text(4).endswith(line)


def test_w1_a_rank_that_does_not_step_is_reported_with_the_others_line(caplog: pytest.LogCaptureFixture) -> None:
    lines = []

    async def rank() -> None:
        async with aiodist.init(report_after=1.0) as coll:
            net = await nn.DataParallel.create(Trial.Mlp(), coll)
            opt = Trial.OPTIMIZERS["sgd"](net.parameters())
            if coll.rank:
                await asyncio.sleep(2.5)
            lines.append(line_below())
            await net.step(lambda: Trial.loss(net, coll.rank, 0), opt)

    run_ranks(2, rank)
    (report,) = [record.getMessage() for record in caplog.records]
    assert f"rank 0 waits for rank 1 in net.step issued{lines[0]}" in report
