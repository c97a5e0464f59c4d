"""N3: all ranks freeze and thaw the same parameters during training; if they differ, every rank raises."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized
from tests.nn.conftest import Trial

each_size = pytest.mark.parametrize("sizes", [Trial.SMALL, Trial.FEW, {}], ids=["each", "few", "one"])

SCHEDULES: dict[str, list[set[str]]] = {
    "a layer": [set(), {"0.weight", "0.bias"}, {"0.weight", "0.bias"}, set(), {"0.weight", "0.bias"}, set()],
    "a part of a bucket": [set(), {"2.bias"}, {"2.bias", "4.weight"}, set(), set()],
    "from the beginning": [{"0.weight", "2.weight"}, {"0.weight", "2.weight"}, {"2.weight"}, set(), {"0.bias"}],
    "in turns": [{"0.weight", "0.bias"}, {"4.weight", "4.bias"}] * 4,
    "all but one": [set(), {"0.weight", "0.bias", "2.weight", "2.bias", "4.weight"}, set()],
}


def freeze(module: nn.Module, names: set[str]) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in names)


async def flushed(opt: Any) -> None:
    """Flush the optimizer if it is pipelined."""
    if isinstance(opt, PipelinedOptimizer):
        await opt.flush()


async def through(step: Awaitable[Any], opt: Any) -> None:
    """A step, and its updates."""
    await step
    await flushed(opt)


def alone(size: int, schedule: Sequence[set[str]], optimizer: str) -> nn.Module:
    """Return what one process makes of the joined batches."""
    module = Trial.Mlp()
    opt = Trial.OPTIMIZERS[optimizer](module.parameters())
    for step, names in enumerate(schedule):
        freeze(module, names)
        Trial.step_alone(module, opt, size, step)
    return module


@pytest.mark.drawn(4)
@pytest.mark.ranks(1, 2, 3)
@each_size
@pytest.mark.parametrize(
    ("schedule", "optimizer"), [(name, ("adam", "momentum")[i % 2]) for i, name in enumerate(SCHEDULES)]
)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n3_frozen_and_thawed_as_one_process(
    coll: Communicator, sizes: dict[str, Any], schedule: str, optimizer: str, pipelined: bool
) -> None:
    module = Trial.Mlp()
    freeze(module, SCHEDULES[schedule][0])
    net = await DataParallel.create(module, coll, **sizes)
    make = Trial.OPTIMIZERS[optimizer]
    opt: Any = await PipelinedOptimizer.create(net, make) if pipelined else make(net.parameters())
    for step, names in enumerate(SCHEDULES[schedule]):
        freeze(module, names)
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        if not pipelined:
            assert {name for name, p in module.named_parameters() if p.grad is None} == names
    await flushed(opt)
    Trial.assert_same(net, alone(coll.size, SCHEDULES[schedule], optimizer))
    await assert_synchronized(module, coll)


@pytest.mark.ranks(2)
@each_size
async def test_n3_only_what_is_trained_travels(coll: Communicator, sizes: dict[str, Any]) -> None:
    net, opt = await Trial.made(coll, **sizes)
    for step, names in enumerate(SCHEDULES["in turns"]):
        freeze(net.module, names)
        before = net.statistics().nbytes
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        sent = sum(p.nbytes for p in net.parameters() if p.requires_grad)
        assert net.statistics().nbytes - before == sent


@pytest.mark.ranks(2)
@each_size
@pytest.mark.parametrize("thaws", [False, True])
async def test_n3_frozen_while_gradients_add_up(coll: Communicator, sizes: dict[str, Any], thaws: bool) -> None:
    """Gradients from before the freeze are reduced with the rest: an optimizer uses every gradient there is."""
    module = Trial.Mlp()
    freeze(module, {"4.bias"})
    net = await DataParallel.create(module, coll, **sizes)
    opt = Trial.OPTIMIZERS["momentum"](net.parameters())
    expected = Trial.Mlp()
    theirs = Trial.OPTIMIZERS["momentum"](expected.parameters())
    for step in range(0, 6, 2):
        opt.zero_grad()
        theirs.zero_grad()
        for part, names in enumerate((set() if thaws else {"4.bias"}, {"0.weight", "2.bias", "4.bias"})):
            freeze(module, names)
            freeze(expected, names)
            if part == 0:
                with net.no_sync():
                    await net.backward(Trial.loss(net, coll.rank, step))
            else:
                await net.backward(Trial.loss(net, coll.rank, step + 1))
            Trial.joined(expected, 2, step + part).backward()
        Trial.assert_same_gradients(net, expected)
        await net.submit(opt.step)
        theirs.step()
    Trial.assert_same(net, expected)
    assert (module[4].bias.grad is not None) == thaws


@pytest.mark.ranks(2)
async def test_n3_a_frozen_gradient_is_left_alone(coll: Communicator) -> None:
    """A parameter that was reduced once, and is frozen, keeps what it had, the very value."""
    for op in ("mean", "sum"):
        net = await DataParallel.create(Trial.Mlp(), coll, op=op, **Trial.SMALL)
        await net.backward(Trial.loss(net, coll.rank, 0))
        kept = net.module.get_parameter("0.weight").grad
        assert kept is not None
        before = kept.clone()
        freeze(net.module, {"0.weight"})
        for step in range(3):
            await net.backward(Trial.loss(net, coll.rank, step))
            torch.testing.assert_close(net.module.get_parameter("0.weight").grad, before)
        await net.aclose()


class Paths(nn.Module):
    """Which layers run depends on rank and step, dtypes differ, one parameter is the module's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.single = nn.Linear(6, 6)
        self.on_rank_1 = nn.Linear(6, 6).double()
        self.sometimes = nn.Linear(6, 6).double()
        self.last = nn.Linear(6, 3).double()

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        x = torch.tanh(self.single((x * self.scale).float())).double()
        if rank == 1:
            x = self.on_rank_1(x)
        if step % 3 == 2:
            x = self.sometimes(x)
        out: Tensor = self.last(x)
        return out


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3)
@each_size
async def test_n3_freezing_where_parameters_are_used_seldom(coll: Communicator, sizes: dict[str, Any]) -> None:
    plan: list[set[str]] = [{"scale"}, {"on_rank_1.weight"}, {"single.weight", "last.bias"}, set()]
    plan += [{"sometimes.weight"}, set(), {"scale"}, set()]

    def loss_of(module: Any, rank: int, step: int) -> Tensor:
        x, y = Trial.batch(rank, step)
        return mse_loss(module(x, rank, step), y)

    net = await DataParallel.create(Paths(), coll, **sizes)
    opt = Trial.OPTIMIZERS["adam"](net.parameters())
    expected = Paths()
    theirs = Trial.OPTIMIZERS["adam"](expected.parameters())
    for step, names in enumerate(plan):
        freeze(net.module, names)
        freeze(expected, names)
        await net.step(partial(loss_of, net, coll.rank, step), opt)
        theirs.zero_grad()
        torch.stack([loss_of(expected, rank, step) for rank in range(coll.size)]).mean().backward()
        theirs.step()
        for (name, ours), other in zip(net.named_parameters(), expected.parameters(), strict=True):
            assert (ours.grad is None) == (other.grad is None), name
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-6, msg=f"{step} {name}: ".__add__)


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 3)
@each_size
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("first", [set(), {"0.bias"}], ids=["", "one frozen at first"])
@pytest.mark.parametrize("way", ["one alone", "all but one", "each another"])
async def test_n3_ranks_that_freeze_different_parameters(
    coll: Communicator, sizes: dict[str, Any], pipelined: bool, first: set[str], way: str
) -> None:
    """All ranks get a MismatchError with the names, none hangs, no weight changes; the next step works."""
    module = Trial.Mlp()
    freeze(module, first)
    net = await DataParallel.create(module, coll, **sizes)
    make = Trial.OPTIMIZERS["momentum"]
    opt: Any = await PipelinedOptimizer.create(net, make) if pipelined else make(net.parameters())
    await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
    last = coll.size - 1
    mine = {
        "one alone": {"2.weight"} if coll.rank == last else first,
        "all but one": first if coll.rank == last else {"2.weight"},
        "each another": {("2.weight", "0.weight", "4.bias")[coll.rank]},
    }[way]
    await flushed(opt)
    before = copy.deepcopy(dict(module.named_parameters()))
    for _ in range(2):
        freeze(module, mine)
        with pytest.raises(aiodist.MismatchError, match=r"disagree on the trained parameters: .*'2\.weight'"):
            await through(net.step(partial(Trial.loss, net, coll.rank, 1), opt), opt)
        torch.testing.assert_close(dict(module.named_parameters()), before, rtol=0, atol=0)
    for step, names in ((1, first), (2, {"2.weight"}), (3, set[str]())):
        freeze(module, names)
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    await flushed(opt)
    Trial.assert_same(net, alone(coll.size, [first, first, {"2.weight"}, set()], "momentum"))


@pytest.mark.ranks(2)
async def test_n3_names_of_many_are_cut(coll: Communicator) -> None:
    net = await DataParallel.create(nn.Sequential(*[nn.Linear(2, 2) for _ in range(9)]), coll)
    net.module.requires_grad_(coll.rank == 0)
    x = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(aiodist.MismatchError, match=r"0: '0\.bias' trained; rank 1: '0\.bias', .* and 13 more frozen"):
        await net.backward(net(x).sum())
    net.module.requires_grad_(True)
    await net.backward(net(x).sum())


@pytest.mark.ranks(2)
async def test_n3_all_frozen_for_a_while(coll: Communicator) -> None:
    """A backward through the net, for another's sake, reduces nothing and is no error."""
    net, opt = await Trial.made(coll)
    await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
    net.zero_grad()
    net.module.requires_grad_(False)
    x, y = Trial.batch(coll.rank, 1)
    x.requires_grad_()
    await net.backward(mse_loss(net(x), y))
    assert x.grad is not None
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(ValueError, match="depends on no parameter"):
        await net.step(partial(Trial.loss, net, coll.rank, 1), opt)
    net.module.requires_grad_(True)
    await net.step(partial(Trial.loss, net, coll.rank, 1), opt)
    Trial.assert_same(net, Trial.alone(2, 2))


@pytest.mark.ranks(2)
async def test_n3_what_thaws_may_belong_to_another_net(coll: Communicator) -> None:
    """Frozen, they serve in both; trained they are one's own, and the other net works once they are frozen again."""
    shared = nn.Linear(6, 6).double().requires_grad_(False)
    modules = [nn.Sequential(shared, nn.Linear(6, 3).double()) for _ in range(2)]
    nets = [await DataParallel.create(module, coll) for module in modules]
    opts = [Trial.OPTIMIZERS["sgd"](net.parameters()) for net in nets]
    shared.requires_grad_(True)
    await nets[0].step(partial(Trial.loss, nets[0], coll.rank, 0), opts[0])
    with pytest.raises(RuntimeError, match=r"'0\.weight' is not frozen any more, and belongs to another DataParallel"):
        await nets[1].step(partial(Trial.loss, nets[1], coll.rank, 0), opts[1])
    shared.requires_grad_(False)
    for net, opt in zip(nets, opts, strict=True):
        await net.step(partial(Trial.loss, net, coll.rank, 1), opt)
    await assert_synchronized([list(net.parameters()) for net in nets], coll)
    await nets[0].aclose()
    shared.requires_grad_(True)
    await nets[1].step(partial(Trial.loss, nets[1], coll.rank, 2), opts[1])
    await assert_synchronized(list(shared.parameters()), coll)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("where", ["before it freezes", "after it froze"])
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n3_a_rank_fails_where_the_others_freeze(coll: Communicator, where: str, pipelined: bool) -> None:
    """The rank raises its error, the others a RemoteError with the cause; the next step works."""
    net, opt = await Trial.made(coll, "momentum", pipelined=pipelined, **Trial.SMALL)
    await net.step(partial(Trial.loss, net, coll.rank, 0), opt)

    def forward() -> Tensor:
        if coll.rank == 1 and where == "before it freezes":
            raise ArithmeticError("no luck")
        freeze(net.module, {"0.weight", "4.bias"})
        if coll.rank == 1:
            raise ArithmeticError("no luck")
        return Trial.loss(net, coll.rank, 1)

    expected = ArithmeticError if coll.rank == 1 else aiodist.RemoteError
    with pytest.raises(expected, match="no luck"):
        await through(net.step(forward, opt), opt)
    freeze(net.module, {"0.weight", "4.bias"})
    await net.step(partial(Trial.loss, net, coll.rank, 1), opt)
    await flushed(opt)
    Trial.assert_same(net, alone(coll.size, [set(), {"0.weight", "4.bias"}], "momentum"))


@pytest.mark.ranks(2)
async def test_n3_a_cancelled_step_freezes_as_any(coll: Communicator) -> None:
    net, opt = await Trial.made(coll, "momentum", **Trial.FEW)
    await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
    freeze(net.module, {"0.weight"})
    task = asyncio.ensure_future(net.step(partial(Trial.loss, net, coll.rank, 1), opt))
    await asyncio.sleep(0)
    if coll.rank == 0:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await net.submit(lambda: None)
    freeze(net.module, set())
    await net.step(partial(Trial.loss, net, coll.rank, 2), opt)
    Trial.assert_same(net, alone(2, [set(), {"0.weight"}, set()], "momentum"))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n3_ranks_whose_data_have_ended_follow(coll: Communicator, pipelined: bool) -> None:
    """Ranks with data freeze and thaw; ranks without data reduce the same parameters, with no freeze of their own."""
    counts = (5, 2, 3)[: coll.size]
    plan = [set(), {"0.weight"}, {"0.weight", "2.bias"}, set(), {"4.weight"}]
    net, opt = await Trial.made(coll, "momentum", pipelined=pipelined, **Trial.SMALL)
    async with net.join(opt):
        for step in range(counts[coll.rank]):
            freeze(net.module, plan[step])
            await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    expected = Trial.Mlp()
    theirs = Trial.OPTIMIZERS["momentum"](expected.parameters())
    for step, names in enumerate(plan):
        freeze(expected, names)
        theirs.zero_grad()
        active = [rank for rank in range(coll.size) if counts[rank] > step]
        torch.stack([Trial.loss(expected, rank, step) for rank in active]).mean().backward()
        theirs.step()
    Trial.assert_same(net, expected)
    freeze(net.module, set())
    freeze(expected, set())
    await net.step(partial(Trial.loss, net, coll.rank, 9), opt)
    Trial.step_alone(expected, theirs, coll.size, 9)
    await flushed(opt)
    Trial.assert_same(net, expected)


@pytest.mark.ranks(3)
async def test_n3_ranks_that_freeze_differently_in_a_join_block(coll: Communicator) -> None:
    """Rank 2 has no data left and the others disagree: all raise, leave the block, and continue together."""
    net, opt = await Trial.made(coll, **Trial.SMALL)

    async def train() -> None:
        async with net.join(opt):
            await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
            if coll.rank < 2:
                freeze(net.module, {"0.weight"} if coll.rank == 0 else set())
                await net.step(partial(Trial.loss, net, coll.rank, 1), opt)

    with pytest.raises(aiodist.MismatchError, match=r"rank 0: '0\.weight' frozen; rank 1: '0\.weight' trained"):
        await train()
    freeze(net.module, set())
    await net.step(partial(Trial.loss, net, coll.rank, 1), opt)
    Trial.assert_same(net, Trial.alone(3, 2))
