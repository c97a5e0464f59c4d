"""N5: gradients that add up, and parameters that are used seldom, often, or not at all, as in one process."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from aiodist import Communicator
from aiodist.nn import DataParallel, assert_synchronized
from aiodist.testing.seams.progress import reducer_of
from tests.nn.conftest import Trial

BUCKETS: list[dict[str, Any]] = [Trial.SMALL, Trial.FEW, {}]
each_op = pytest.mark.parametrize("op", ["mean", "sum"])
each_bucket = pytest.mark.parametrize("sizes", BUCKETS, ids=["each", "few", "all"])


def gradients_of(size: int, steps: range, op: str) -> nn.Module:
    """Return a module with the gradients of one process that took these steps."""
    module = Trial.Mlp()
    for step in steps:
        losses = torch.stack([Trial.loss(module, rank, step) for rank in range(size)])
        (losses.mean() if op == "mean" else losses.sum()).backward()
    return module


@pytest.mark.ranks(1, 2, 3)
@each_op
@each_bucket
async def test_n5_no_sync_adds_up_locally(
    coll: Communicator, op: Literal["mean", "sum"], sizes: dict[str, Any]
) -> None:
    net, opt = await Trial.made(coll, "adam", op=op, **sizes)
    every = 3
    for step in range(3 * every):
        if step % every == 0:
            opt.zero_grad()
        if step % every < every - 1:
            issued = reducer_of(net).data.seq
            with net.no_sync():
                await net.backward(Trial.loss(net, coll.rank, step))
            assert reducer_of(net).data.seq == issued
        else:
            await net.backward(Trial.loss(net, coll.rank, step))
            await net.submit(opt.step)
    Trial.assert_same(net, Trial.alone(coll.size, 3 * every, optimizer="adam", op=op, every=every))


@pytest.mark.ranks(2)
@each_bucket
async def test_n5_no_sync_with_backward_of_torch(coll: Communicator, sizes: dict[str, Any]) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **sizes)
    for begin in (0, 3):
        net.zero_grad()
        with net.no_sync():
            Trial.loss(net, coll.rank, begin).backward()
            with net.no_sync():
                await net.submit(Trial.loss(net, coll.rank, begin + 1).backward)
        await net.backward(Trial.loss(net, coll.rank, begin + 2))
        Trial.assert_same_gradients(net, gradients_of(2, range(begin, begin + 3), "mean"))


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@each_op
@each_bucket
async def test_n5_gradients_that_are_not_forgotten_add_up(
    coll: Communicator, op: Literal["mean", "sum"], sizes: dict[str, Any]
) -> None:
    """Backward onto gradients that are reduced already: the total is that of one process."""
    net = await DataParallel.create(Trial.Mlp(), coll, op=op, **sizes)
    for step in range(4):
        await net.backward(Trial.loss(net, coll.rank, step))
        Trial.assert_same_gradients(net, gradients_of(coll.size, range(step + 1), op))
    with net.no_sync():
        await net.backward(Trial.loss(net, coll.rank, 4))
    await net.backward(Trial.loss(net, coll.rank, 5))
    Trial.assert_same_gradients(net, gradients_of(coll.size, range(6), op))


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 3)
@each_op
@each_bucket
@pytest.mark.parametrize("how", ["net", "torch"])
async def test_n5_no_sync_behind_a_step_whose_gradients_are_kept(
    coll: Communicator, op: Literal["mean", "sum"], sizes: dict[str, Any], how: str
) -> None:
    """A block without a backward changes nothing; what was reduced counts once, where it was used here again or not."""
    net = await DataParallel.create(Trial.Mlp(), coll, op=op, **sizes)
    await net.step(partial(Trial.loss, net, coll.rank, 0), torch.optim.SGD(net.parameters(), lr=0.0))
    for part in range(1, 4):
        expected = gradients_of(coll.size, range(part), op)
        with net.no_sync(), net.no_sync():
            Trial.assert_same_gradients(net, expected)
            torch.autograd.grad(Trial.loss(net, coll.rank, part), list(net.parameters()))  # adds nothing to them
        Trial.assert_same_gradients(net, expected)
        with net.no_sync():
            some = list(net.parameters())[-1:]  # the others' gradients stay the sum
            loss = Trial.loss(net, coll.rank, part)
            await net.backward(loss, inputs=some) if how == "net" else loss.backward(inputs=some)
        others = list(net.parameters())[:-1]
        await net.backward(Trial.loss(net, coll.rank, part), inputs=others)
    Trial.assert_same_gradients(net, gradients_of(coll.size, range(4), op))


@pytest.mark.ranks(3)
@each_op
@each_bucket
async def test_n5_no_sync_with_parameters_that_are_thawed_in_it(
    coll: Communicator, op: Literal["mean", "sum"], sizes: dict[str, Any]
) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, op=op, **sizes)
    await net.backward(Trial.loss(net, coll.rank, 0))
    net.module.requires_grad_(False).get_submodule("0").requires_grad_(True)
    with net.no_sync():
        with net.no_sync():
            net.module.requires_grad_(True)
            loss = Trial.loss(net, coll.rank, 1)
        loss.backward()
    await net.backward(Trial.loss(net, coll.rank, 2))
    Trial.assert_same_gradients(net, gradients_of(coll.size, range(3), op))


@pytest.mark.ranks(2)
@each_op
@each_bucket
async def test_n5_retain_graph(coll: Communicator, op: Literal["mean", "sum"], sizes: dict[str, Any]) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, op=op, **sizes)
    for _ in range(2):
        net.zero_grad()
        loss = Trial.loss(net, coll.rank, 0)
        for times in range(1, 4):
            await net.backward(loss, retain_graph=times < 3)
            expected = gradients_of(2, range(1), op)
            for p in expected.parameters():
                assert p.grad is not None
                p.grad *= times
            Trial.assert_same_gradients(net, expected)
        with pytest.raises(RuntimeError, match="second time"):
            await net.backward(loss)


@pytest.mark.ranks(2)
@each_bucket
async def test_n5_a_gradient_is_given(coll: Communicator, sizes: dict[str, Any]) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **sizes)
    x, _ = Trial.batch(coll.rank, 0)
    await net.backward(net(x), torch.full((4, 3), float(coll.rank + 1), dtype=torch.float64))
    expected = Trial.Mlp()
    for rank in range(2):
        expected(Trial.batch(rank, 0)[0]).backward(torch.full((4, 3), (rank + 1) / 2, dtype=torch.float64))
    Trial.assert_same_gradients(net, expected)


@pytest.mark.ranks(2)
@each_bucket
async def test_n5_inputs(coll: Communicator, sizes: dict[str, Any]) -> None:
    """Only those that are named get a gradient, in each of several backwards."""
    net = await DataParallel.create(Trial.Mlp(), coll, **sizes)
    expected = Trial.Mlp()
    for layer in (4, 0, 2, 4):
        await net.backward(Trial.loss(net, coll.rank, layer), inputs=[net.module.get_parameter(f"{layer}.weight")])
        Trial.joined(expected, 2, layer).backward(inputs=[expected[layer].weight])
        Trial.assert_same_gradients(net, expected)


class Parts(nn.Module):
    """A layer for each way of being used; `frozen` ones have no gradient, `tied` one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.always = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.on_rank_1 = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.half_frozen = nn.Linear(6, 6)
        self.half_frozen.weight.requires_grad_(False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.always.weight
        self.double()

    def forward(self, x: Tensor, rank: int, step: int) -> Tensor:
        x = self.frozen(self.tied(torch.tanh(self.half_frozen(self.always(x)))))
        if rank == 1:
            x = self.on_rank_1(x)
        if step % 3 == 2:
            x = self.sometimes(torch.tanh(x))
        out: Tensor = self.tied(x)
        return out[:, :3]


def loss_of_parts(module: Any, rank: int, step: int) -> Tensor:
    drawn = torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * rank + step), dtype=torch.float64)
    out: Tensor = module(drawn[:, :6], rank, step)
    return mse_loss(out, drawn[:, 6:])


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@each_op
@each_bucket
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
async def test_n5_unused_shared_and_frozen_parameters(
    coll: Communicator, op: Literal["mean", "sum"], sizes: dict[str, Any], optimizer: str
) -> None:
    """Adam and weight decay distinguish a gradient of zeros from None."""
    module = Parts()
    net = await DataParallel.create(module, coll, op=op, **sizes)
    never = [p.detach().clone() for p in module.never.parameters()]
    opt = Trial.OPTIMIZERS[optimizer](net.parameters())
    for step in range(7):
        await net.step(partial(loss_of_parts, net, coll.rank, step), opt)
        assert module.never.weight.grad is None
        assert module.frozen.weight.grad is None
        assert (module.on_rank_1.weight.grad is None) == (coll.size == 1)
        assert (module.sometimes.weight.grad is None) == (step % 3 != 2)
    expected = Trial.alone(coll.size, 7, make=Parts, loss=loss_of_parts, optimizer=optimizer, op=op)
    Trial.assert_same(net, expected)
    assert all(map(torch.equal, never, module.never.parameters()))
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
async def test_n5_unused_in_some_backwards_of_an_accumulation(coll: Communicator) -> None:
    net = await DataParallel.create(Parts(), coll, **Trial.SMALL)
    opt = Trial.OPTIMIZERS["adam"](net.parameters())
    for step in range(8):
        if step % 2 == 0:
            opt.zero_grad()
        await net.backward(loss_of_parts(net, coll.rank, step))
        if step % 2:
            await net.submit(opt.step)
    Trial.assert_same(net, Trial.alone(2, 8, make=Parts, loss=loss_of_parts, optimizer="adam", every=2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
async def test_n5_either_form_of_zero_grad(coll: Communicator, set_to_none: bool) -> None:
    for who in ("net", "opt"):
        net = await DataParallel.create(Parts(), coll)
        opt = Trial.OPTIMIZERS["adam"](net.parameters())
        alone = Parts()
        theirs = Trial.OPTIMIZERS["adam"](alone.parameters())
        for step in range(6):
            (net if who == "net" else opt).zero_grad(set_to_none=set_to_none)
            theirs.zero_grad(set_to_none=set_to_none)
            await net.backward(loss_of_parts(net, coll.rank, step))
            torch.stack([loss_of_parts(alone, rank, step) for rank in range(2)]).mean().backward()
            Trial.assert_same_gradients(net, alone)
            await net.submit(opt.step)
            theirs.step()
        Trial.assert_same(net, alone)
        await net.aclose()


class Mixed(nn.Module):
    """Layers of four dtypes."""

    DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.Linear(6, 6).to(dtype) for dtype in self.DTYPES * 2])

    def forward(self, x: Tensor) -> Tensor:
        for layer, dtype in zip(self.layers, self.DTYPES * 2, strict=True):
            x = torch.tanh(layer(x.to(dtype)))
        return x[:, :3].double()


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@each_op
@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
async def test_n5_mixed_dtypes(coll: Communicator, op: Literal["mean", "sum"], bucket_bytes: int) -> None:
    net = await DataParallel.create(Mixed(), coll, op=op, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    expected = Trial.alone(coll.size, 3, make=Mixed, op=op)
    for (name, ours), theirs in zip(net.named_parameters(), expected.parameters(), strict=True):
        assert ours.dtype is theirs.dtype
        assert ours.grad is not None
        assert ours.grad.dtype is ours.dtype
        rough = ours.dtype in (torch.bfloat16, torch.float16)
        # All layers feed one another, so that the roughest dtype says how near any of them comes.
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0.02, atol=0.02 if rough else 5e-3, msg=name)
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
@each_bucket
async def test_n5_several_parameter_groups(coll: Communicator, sizes: dict[str, Any]) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        groups = [{"params": [first], "lr": 0.2}, {"params": others, "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.5)

    net = await DataParallel.create(Trial.Mlp(), coll, **sizes)
    opt = make(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    alone = Trial.Mlp()
    theirs = make(alone.parameters())
    other_schedule = torch.optim.lr_scheduler.StepLR(theirs, 1, 0.5)
    for step in range(4):
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        schedule.step()
        Trial.step_alone(alone, theirs, 2, step)
        other_schedule.step()
    Trial.assert_same(net, alone)
