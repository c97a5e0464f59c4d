"""N20: clipping, scaled losses, learning rates, closures and uneven data are as with the plain optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

from aiodist import Communicator
from aiodist.nn import DataParallel, ShardedOptimizer, assert_synchronized
from tests.nn.conftest import Trial


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3, 5)
@pytest.mark.parametrize("sizes", [Trial.SMALL, {}], ids=["each", "one"])
async def test_n20_clipping_by_the_norm_over_all_ranks(coll: Communicator, sizes: Any) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, clip_norm=0.05, **sizes)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["momentum"])
    expected = Trial.Mlp()
    plain = Trial.OPTIMIZERS["momentum"](expected.parameters())
    for step in range(4):
        await net.step(Trial.loss, opt, net, coll.rank, step)
        plain.zero_grad()
        Trial.joined(expected, coll.size, step).backward()
        assert nn.utils.clip_grad_norm_(expected.parameters(), 0.05) > 0.05
        plain.step()
    await opt.flush()
    Trial.assert_same(net, expected)


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
async def test_n20_a_scaler_leaves_out_a_step_on_all_ranks(coll: Communicator, clip_norm: float | None) -> None:
    """Only one element of one parameter is not finite, and so only the shard of one rank."""

    def loss(module: Any, rank: int, step: int) -> Tensor:
        x, y = Trial.batch(rank, step)
        worse = torch.inf if step == 2 and rank == coll.size - 1 else 1.0
        out: Tensor = module(x)
        bias: Tensor = module.get_parameter("4.bias")
        return mse_loss(out, y) + bias[1] * worse * 0.01

    scaler, mine = torch.amp.GradScaler("cpu", 64.0), torch.amp.GradScaler("cpu", 64.0)
    net = await DataParallel.create(Trial.Mlp(), coll, clip_norm=clip_norm, **Trial.SMALL)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["adam"])
    net.configure(scaler=scaler, scheduler=ExponentialLR(opt.optimizer, 0.5))
    expected = Trial.Mlp()
    plain = Trial.OPTIMIZERS["adam"](expected.parameters())
    for step in range(5):
        await net.step(loss, opt, net, coll.rank, step)
        plain.zero_grad()
        mine.scale(torch.stack([loss(expected, rank, step) for rank in range(coll.size)]).mean()).backward()
        mine.unscale_(plain)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(expected.parameters(), clip_norm)
        mine.step(plain)
        mine.update()
        if step != 2:
            plain.param_groups[0]["lr"] *= 0.5
        assert scaler.get_scale() == mine.get_scale() == (64.0 if step < 2 else 32.0)
        assert opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    await opt.flush()
    Trial.assert_same(net, expected)
    await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.ranks(2)
async def test_n20_learning_rates_by_hand_and_by_a_scheduler(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["momentum"])
    schedule = CosineAnnealingLR(opt.optimizer, 6)
    expected = Trial.Mlp()
    plain = Trial.OPTIMIZERS["momentum"](expected.parameters())
    theirs = CosineAnnealingLR(plain, 6)
    for step in range(4):
        for one in (opt, plain):
            one.param_groups[0]["momentum"] = 0.9 if step % 2 else 0.5
        await net.step(Trial.loss, opt, net, coll.rank, step)
        schedule.step()
        Trial.step_alone(expected, plain, coll.size, step)
        theirs.step()
    await opt.flush()
    Trial.assert_same(net, expected)


@pytest.mark.ranks(2, 3)
async def test_n20_closures_and_autocast(coll: Communicator) -> None:
    """A list of closures adds up on this rank; `no_sync` is for `net.backward`, whose gradients no step takes."""
    net = await DataParallel.create(Trial.Mlp(), coll)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["adam"])
    for step in range(3):
        closures = [partial(Trial.loss, net, coll.rank, 10 * step + k) for k in range(3)]
        with net.no_sync():
            await net.backward(Trial.loss(net, coll.rank, 99)) if step == 0 else None
        net.zero_grad()
        await net.step(closures, opt)
    await opt.flush()
    expected = Trial.Mlp()
    plain = Trial.OPTIMIZERS["adam"](expected.parameters())
    for step in range(3):
        plain.zero_grad()
        for k in range(3):
            Trial.joined(expected, coll.size, 10 * step + k).backward()
        plain.step()
    Trial.assert_same(net, expected)
    seen: list[torch.dtype] = []
    net.configure(autocast=torch.bfloat16)

    def forward() -> Tensor:
        out: Tensor = net(Trial.batch(coll.rank, 0)[0].float())
        seen.append(out.dtype)
        return out.float().square().mean()

    net.module.float()
    with pytest.raises(TypeError, match=r"was float64 when DataParallel was made"):
        await net.step(forward, opt)
    assert seen == [torch.bfloat16]


UNEVEN: dict[int, list[tuple[int, ...]]] = {2: [(3, 1), (0, 2), (2, 2)], 3: [(1, 4, 2), (0, 0, 3)]}


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sizes", [Trial.SMALL, {}], ids=["each", "one"])
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_n20_uneven_data(coll: Communicator, sizes: Any, op: Literal["mean", "sum"]) -> None:
    """A rank that runs dry steps its shard all the same, and clips it, at the rate of its scheduler."""
    net = await DataParallel.create(Trial.Mlp(), coll, op=op, clip_norm=0.3, **sizes)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["adam"])
    net.configure(scheduler=ExponentialLR(opt.optimizer, 0.8))
    expected = Trial.Mlp()
    plain = Trial.OPTIMIZERS["adam"](expected.parameters())
    rates = ExponentialLR(plain, 0.8)
    for epoch, counts in enumerate([*UNEVEN[coll.size], (1,) * coll.size]):
        async with net.join():
            for step in range(counts[coll.rank]):
                await net.step(Trial.loss, opt, net, coll.rank, 10 * epoch + step)
        for step in range(max(counts)):
            active = [rank for rank, count in enumerate(counts) if step < count]
            plain.zero_grad()
            for rank in active:
                (Trial.loss(expected, rank, 10 * epoch + step) / (len(active) if op == "mean" else 1)).backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.3)
            plain.step()
            rates.step()
        assert not opt.pending
        Trial.assert_same(net, expected)
        assert opt.param_groups[0]["lr"] == pytest.approx(plain.param_groups[0]["lr"])
    await net.step(Trial.loss, opt, net, coll.rank, 77)
    await opt.flush()
    await assert_synchronized(list(net.parameters()), coll)
