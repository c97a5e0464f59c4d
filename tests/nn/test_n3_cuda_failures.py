"""N3 on CUDA devices that have no memory left, or are lost: every rank learns the cause, and no rank hangs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from aiodist import AiodistError, Communicator
from aiodist.communicator import parts_of
from aiodist.nn import DataParallel
from aiodist.testing.seams.progress import compute_of, reducer_of
from tests.nn.conftest import Trial
from tests.support.blocking import blocked_until
from tests.support.simulated_cuda.device import Event, SimulatedCuda, Stream

Until = Callable[[Callable[[], object]], Awaitable[None]]

LOST = "device-side assert triggered"


@pytest.fixture
def strict_cuda(simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    """Devices which, once lost, refuse to record events and to wait for them, as CUDA's do."""
    record: Any = Event.record
    wait_event: Any = Stream.wait_event

    def checked_record(event: Event, stream: Any = None) -> None:
        simulated_cuda.check((torch.cuda.current_stream() if stream is None else stream).device_index)
        record(event, stream)

    def checked_wait(stream: Stream, event: Event) -> None:
        simulated_cuda.check(stream.device_index)
        wait_event(stream, event)

    monkeypatch.setattr(Event, "record", checked_record)
    monkeypatch.setattr(Stream, "wait_event", checked_wait)
    return simulated_cuda


async def run_out(net: DataParallel, opt: Any, forward: Any, match: str, *, fails: bool) -> None:
    """Make a step that fails on this or another rank, a second step, and close: each raises the cause."""
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError if fails else AiodistError, match=match):
            await net.step(forward, opt)
        with pytest.raises((RuntimeError, AiodistError), match=match):
            await net.step(forward, opt)
        await close(net, match)


async def close(net: DataParallel, match: str) -> None:
    try:
        await net.aclose()
    except (RuntimeError, AiodistError) as error:  # it may well end with none
        assert match in str(error)  # noqa: PT017


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("failing", [{0}, {0, 1, 2}], ids=str)
async def test_n3_cuda_no_memory_for_gradients(
    coll: Communicator, simulated_cuda: SimulatedCuda, failing: set[int]
) -> None:
    net = await DataParallel.create(Trial.Mlp(coll.rank).to(coll.device), coll)
    await coll.barrier()  # the net exists on all ranks before one aborts it
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())
    x, y = (t.to(coll.device) for t in Trial.batch(coll.rank, 0))
    before = [p.detach().cpu() for p in net.parameters()]

    def full() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def forward() -> Tensor:
        if coll.rank in failing:
            for bucket in reducer_of(net).buckets:
                bucket.memory = full  # type: ignore[method-assign]
        return mse_loss(net(x), y)

    await run_out(net, opt, forward, "CUDA out of memory", fails=coll.rank in failing)
    for p, was in zip(net.parameters(), before, strict=True):
        assert torch.equal(p.detach().cpu(), was)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
async def test_n3_cuda_a_device_that_is_lost(
    coll: Communicator, strict_cuda: SimulatedCuda, until: Until, where: str, steps: int
) -> None:
    """All that rank 1 asks of its device fails from then on."""
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp().to(coll.device), **Trial.SMALL)
    x, y = (t.to(coll.device) for t in Trial.batch(coll.rank, 0))
    module: Any = net.module

    def lose(*_: Any) -> None:
        if coll.rank == 1:
            strict_cuda.fail(1, LOST)

    def forward() -> Tensor:
        if where == "forward":
            lose()
        hidden = module[0](x)
        if where == "backward":
            hidden.register_hook(lose)
        return mse_loss(nn.Sequential(*list(module)[1:])(hidden), y)

    for _ in range(steps):
        await net.step(lambda: mse_loss(net(x), y), opt)
    await until(
        lambda: not parts_of(reducer_of(net).data).dispatcher.lifetime.pending()
    )  # else what these steps lent is freed later
    await coll.barrier()
    await run_out(net, opt, forward, LOST, fails=coll.rank == 1)
    gc.collect()  # errors hold the frames of the step, and these the net


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3)
async def test_n3_cuda_a_device_that_is_lost_after_the_reduction_of_a_bucket(
    coll: Communicator, strict_cuda: SimulatedCuda
) -> None:
    """Torch ends the process if memory that other streams may use is freed on a lost device: no gradient has such."""
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp().to(coll.device), **Trial.SMALL)
    x, y = (t.to(coll.device) for t in Trial.batch(coll.rank, 0))
    module: Any = net.module
    lent = list[int]()
    for _ in range(3):
        await net.step(lambda: mse_loss(net(x), y), opt)

    def lose(*_: Any) -> None:
        reduction = reducer_of(net).last
        if coll.rank == 1 and reduction is not None:
            assert blocked_until(lambda: len(reduction.times.spans))
            lent.append(strict_cuda.memory.lent(1))
            strict_cuda.fail(1, LOST)

    def forward() -> Tensor:
        hidden = module[0](x)
        hidden.register_hook(lose)
        return mse_loss(nn.Sequential(*list(module)[1:])(hidden), y)

    await coll.barrier()
    await run_out(net, opt, forward, LOST, fails=coll.rank == 1)
    assert lent == [0] * (coll.rank == 1)


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_n3_cuda_a_device_that_is_lost_between_steps(
    coll: Communicator, strict_cuda: SimulatedCuda, op: Literal["mean", "sum"]
) -> None:
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp().to(coll.device), op=op, **Trial.SMALL)
    x, y = (t.to(coll.device) for t in Trial.batch(coll.rank, 0))
    for _ in range(3):
        await net.step(lambda: mse_loss(net(x), y), opt)
    await net.submit(compute_of(net).finish)
    await coll.barrier()
    if coll.rank == 1:
        strict_cuda.fail(1, LOST)
    await run_out(net, opt, lambda: mse_loss(net(x), y), LOST, fails=coll.rank == 1)


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("delay", [0.0, 2e-3])
async def test_n3_cuda_a_device_that_is_lost_while_it_reduces(
    coll: Communicator, strict_cuda: SimulatedCuda, delay: float
) -> None:
    """The device is lost after backward: the reductions that the other ranks wait for never arrive."""
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp().to(coll.device), **Trial.SMALL)
    x, y = (t.to(coll.device) for t in Trial.batch(coll.rank, 0))
    for _ in range(3):
        await net.step(lambda: mse_loss(net(x), y), opt)
    await coll.barrier()
    strict_cuda.delay = delay

    def backward() -> None:
        compute_of(net).reduce(lambda: mse_loss(net(x), y))
        if coll.rank == 1:
            strict_cuda.fail(1, LOST)

    async with asyncio.timeout(20):
        await net.submit(backward)
        with pytest.raises((RuntimeError, AiodistError), match=LOST):
            await net.step(lambda: mse_loss(net(x), y), opt)
        await close(net, LOST)
