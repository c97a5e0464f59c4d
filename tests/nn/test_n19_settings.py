"""N19: clipping, scaled losses, schedulers, autocast and accumulated gradients as settings of a net."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized
from tests.nn.conftest import Trial

each_driver = pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipelined"])


async def optimizers(
    net: DataParallel, make: Callable[[Any], torch.optim.Optimizer], pipelined: bool
) -> tuple[Any, Any]:
    """Return what drives the steps of `net`, and the schedulers of its learning rates."""
    if pipelined:
        opt = await PipelinedOptimizer.create(net, make)
        return opt, [ExponentialLR(each, 0.7) for each in opt.optimizers]
    plain = make(net.parameters())
    return plain, ExponentialLR(plain, 0.7)


async def finished_step(net: DataParallel, opt: Any, *step: Any) -> None:
    """Make a step to its end, which raises its errors."""
    await net.step(step[0], opt, *step[1:])
    await finish(opt)


async def finish(opt: Any) -> None:
    if isinstance(opt, PipelinedOptimizer):
        await opt.flush()


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@each_driver
async def test_n19_clipping_and_a_scheduler(coll: Communicator, pipelined: bool) -> None:
    make = Trial.OPTIMIZERS["momentum"]
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.FEW, clip_norm=0.05)
    opt, scheduler = await optimizers(net, make, pipelined)
    assert net.configure(scheduler=scheduler).clip_norm == 0.05
    alone = Trial.Mlp()
    theirs = make(alone.parameters())
    other = ExponentialLR(theirs, 0.7)
    for step in range(4):
        if step == 3:
            net.configure(clip_norm=None)
        await net.step(Trial.loss, opt, net, coll.rank, step)
        theirs.zero_grad()
        Trial.joined(alone, coll.size, step).backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.05 if step < 3 else 1e9)
        assert norm > 0.05
        theirs.step()
        other.step()
    await finish(opt)
    Trial.assert_same(net, alone)
    assert {group["lr"] for group in opt.param_groups} == {group["lr"] for group in theirs.param_groups}


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3)
@each_driver
async def test_n19_a_scaler_leaves_out_steps_on_all_ranks(coll: Communicator, pipelined: bool) -> None:
    """The gradients of one rank, and in one layer alone, are infinite; no parameter moves, nor does the scheduler."""

    def loss(module: Any, step: int) -> Tensor:
        x, y = Trial.batch(coll.rank, step, torch.float32)
        first = mse_loss(module(x), y)
        if step == 2 and coll.rank == 1:
            first = first + (module.module[0].weight * float("inf")).sum()
        return first

    net = await DataParallel.create(Trial.Mlp().float(), coll, **Trial.SMALL)
    opt, scheduler = await optimizers(net, Trial.OPTIMIZERS["momentum"], pipelined)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    net.configure(scaler=scaler, scheduler=scheduler, clip_norm=0.3)
    alone = Trial.Mlp().float()
    theirs = Trial.OPTIMIZERS["momentum"](alone.parameters())
    other = ExponentialLR(theirs, 0.7)
    for step in range(5):
        seen = await net.step(loss, opt, net, step)
        await finish(opt)
        assert scaler.get_scale() == [1024, 1024, 512, 512, 512][step]
        if step == 2:
            assert torch.isfinite(seen) == (coll.rank != 1)
            Trial.assert_same(net, alone)
            continue
        x, y = Trial.batch(coll.rank, step, torch.float32)
        torch.testing.assert_close(seen, mse_loss(alone(x), y), rtol=1e-4, atol=1e-5)
        theirs.zero_grad()
        parts = [Trial.batch(rank, step, torch.float32) for rank in range(coll.size)]
        mse_loss(alone(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
        theirs.step()
        other.step()
    Trial.assert_same(net, alone)
    assert {group["lr"] for group in opt.param_groups} == {theirs.param_groups[0]["lr"]}
    await assert_synchronized(net.module, coll)
    net.configure(scaler=None)
    await net.step(loss, opt, net, 5)
    assert scaler.get_scale() == 512


@pytest.mark.ranks(1, 2)
async def test_n19_a_scaler_that_finds_no_gradient(coll: Communicator) -> None:
    """All ranks raise, and the next step works; without a scaler it moves nothing, as in torch."""

    def loss(used: range) -> Tensor:
        return torch.stack([module[i].weight.square().sum() for i in used]).sum()

    module: Any = Trial.Mlp()
    net = await DataParallel.create(module, coll)
    opt = torch.optim.SGD(module[0].parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for known in (scaler, None, torch.amp.GradScaler("cpu", enabled=False)):
        before = module[0].weight.detach().clone()
        net.configure(scaler=known, clip_norm=1.0)
        if known is scaler:
            with pytest.raises(RuntimeError, match=r"no parameter of the optimizer has a gradient.*expected a loss"):
                await net.step(loss, opt, range(2, 3))
        else:
            await net.step(loss, opt, range(2, 3))
        assert torch.equal(module[0].weight, before)
        await net.step(loss, opt, range(0, 3, 2))
        assert not torch.equal(module[0].weight, before)
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
@each_driver
async def test_n19_an_optimizer_that_fails_under_a_scaler(coll: Communicator, pipelined: bool) -> None:
    """The scaler works in the next step."""

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if failing:
                raise ArithmeticError("broken")
            return super().step(closure)

    failing = True
    net = await DataParallel.create(Trial.Mlp(), coll, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    opt, _ = await optimizers(net, lambda params: Fails(params, lr=0.1), pipelined)
    with pytest.raises(ArithmeticError, match="broken"):
        await finished_step(net, opt, Trial.loss, net, coll.rank, 0)
    await coll.barrier()
    failing = False
    net.load_state_dict(Trial.Mlp().state_dict())
    await Trial.train(net, opt, range(2), coll.rank)
    await finish(opt)
    Trial.assert_same(net, Trial.alone(2, 2))


@pytest.mark.ranks(1, 2)
@each_driver
@pytest.mark.parametrize("given", [torch.bfloat16, torch.autocast("cpu", torch.bfloat16)], ids=["dtype", "autocast"])
async def test_n19_autocast(coll: Communicator, given: Any, pipelined: bool) -> None:
    seen: list[torch.dtype] = []

    def loss(module: Any, rank: int, step: int) -> Tensor:
        x, y = Trial.batch(rank, step, torch.float32)
        out = module(x)
        seen.append(out.dtype)
        return mse_loss(out.float(), y)

    net = await DataParallel.create(Trial.Mlp().float(), coll, **Trial.SMALL, autocast=given)
    opt, _ = await optimizers(net, Trial.OPTIMIZERS["sgd"], pipelined)
    for step in range(3):
        await net.step(loss, opt, net, coll.rank, step)
    await finish(opt)
    assert seen == [torch.bfloat16] * 3
    assert not torch.is_autocast_enabled("cpu")

    def cast(*args: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(*args)

    expected = Trial.alone(coll.size, 3, make=lambda: Trial.Mlp().float(), loss=cast)
    Trial.assert_same(net, expected)
    net.configure(autocast=None)
    await net.step(loss, opt, net, coll.rank, 4)
    assert seen[-1] is torch.float32


@pytest.mark.thorough
@pytest.mark.ranks(1, 2, 3)
@each_driver
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_n19_a_list_of_closures(coll: Communicator, op: Any, pipelined: bool) -> None:
    """Three backward passes and one reduction are as the sum of the losses."""
    net = await DataParallel.create(Trial.Mlp(), coll, op=op, **Trial.FEW)
    opt, _ = await optimizers(net, Trial.OPTIMIZERS["adam"], pipelined)

    def summed(module: Any, rank: int, step: int) -> Tensor:
        return torch.stack([Trial.loss(module, rank, 3 * step + i) / 3 for i in range(3)]).sum()

    alone = Trial.Mlp()
    for step in range(4):
        before = alone if step == 0 else Trial.alone(coll.size, step, loss=summed, optimizer="adam", op=op)
        closures = [lambda module, i=i, step=step: Trial.loss(module, coll.rank, 3 * step + i) / 3 for i in range(3)]
        seen = await net.step(closures, opt, net)
        torch.testing.assert_close(seen, summed(before, coll.rank, step).detach())
        assert not seen.requires_grad
    await finish(opt)
    assert net.statistics().passes == 4
    Trial.assert_same(net, Trial.alone(coll.size, 4, loss=summed, optimizer="adam", op=op))


@pytest.mark.drawn(1)
@pytest.mark.ranks(2)
@each_driver
@pytest.mark.parametrize("where", [0, 1, 2])
async def test_n19_one_of_several_closures_fails(coll: Communicator, where: int, pipelined: bool) -> None:
    def closure(i: int, step: int) -> Tensor:
        if step == 1 and i == where and coll.rank == 1:
            raise KeyError("no data")
        return Trial.loss(net, coll.rank, step) / 3

    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.SMALL)
    opt, _ = await optimizers(net, Trial.OPTIMIZERS["sgd"], pipelined)
    for step in range(3):
        closures = [partial(closure, i, step) for i in range(3)]
        if step == 1:
            with pytest.raises(KeyError if coll.rank else aiodist.RemoteError, match="no data"):
                await finished_step(net, opt, closures)
        else:
            await net.step(closures, opt)
    await finish(opt)
    expected = Trial.alone(2, 2, loss=lambda module, rank, step: Trial.loss(module, rank, 2 * step))
    Trial.assert_same(net, expected)


@pytest.mark.ranks(1)
async def test_n19_settings_that_are_none(coll: Communicator) -> None:
    net, opt = await Trial.made(coll)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"clip_norm": 0}, ValueError, "clip_norm=0: expected"),
        ({"clip_norm": float("nan")}, ValueError, "clip_norm=nan"),
        ({"clip_norm": True}, TypeError, "clip_norm"),
        ({"scaler": 3.0}, TypeError, r"scaler is float.*GradScaler"),
        ({"autocast": True}, TypeError, r"autocast is bool.*dtype"),
        ({"scheduler": ReduceLROnPlateau(opt)}, TypeError, "ReduceLROnPlateau"),
        ({"scheduler": [opt, 3]}, TypeError, "scheduler is int"),
        ({"clip": 1.0}, TypeError, r"clip: expected.*clip_norm"),
    ]
    for given, error, text in wrong:
        with pytest.raises(error, match=text):
            net.configure(**given)
    for nothing in ([], [None], None):
        with pytest.raises(TypeError, match=r"step\(.*expected a function"):
            await net.step(nothing, opt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="clip_norm=-1"):
        await DataParallel.create(Trial.Mlp(), coll, clip_norm=-1)
    assert net.configure().clip_norm is None
