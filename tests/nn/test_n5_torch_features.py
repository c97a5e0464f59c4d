"""N5: clipping, scaled losses, compiled modules, checkpointed activations, and all else that torch users expect."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, assert_synchronized
from aiodist.testing import gather_ranks
from tests.nn.conftest import Trial


@pytest.mark.ranks(1, 2, 3)
async def test_n5_clipping_by_the_global_norm(coll: Communicator) -> None:
    net, opt = await Trial.made(coll, "momentum", **Trial.FEW)
    alone = Trial.Mlp()
    theirs = Trial.OPTIMIZERS["momentum"](alone.parameters())
    for step in range(3):
        opt.zero_grad()
        await net.backward(Trial.loss(net, coll.rank, step))
        norm = await net.submit(nn.utils.clip_grad_norm_, net.parameters(), 0.05)
        await net.submit(opt.step)
        theirs.zero_grad()
        Trial.joined(alone, coll.size, step).backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        theirs.step()
        torch.testing.assert_close(norm, expected)
        assert norm > 0.05
    Trial.assert_same(net, alone)


def loss_on(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(module(x), y)


@pytest.mark.ranks(2)
async def test_n5_grad_scaler(coll: Communicator) -> None:
    """All ranks skip a step if its gradients overflow on one rank."""
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp().float(), **Trial.FEW)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(6):
        opt.zero_grad()
        x, y = Trial.batch(coll.rank, step, torch.float32)
        loss = await net.submit(partial(loss_on, net, x, y))
        if step == 3 and coll.rank == 1:
            loss = loss * float("inf")
        before = [p.detach().clone() for p in net.parameters()]
        await net.backward(scaler.scale(loss))
        await net.submit(scaler.step, opt)
        scaler.update()
        unchanged = all(map(torch.equal, before, net.parameters()))
        assert unchanged == (step == 3)
        assert scaler.get_scale() == [1024, 2048, 2048, 1024, 1024, 2048][step]
    await assert_synchronized(net.module, coll)

    def loss_of(module: Any, rank: int, step: int) -> Tensor:
        x, y = Trial.batch(rank, step if step < 3 else step + 1, torch.float32)
        return mse_loss(module(x), y)

    expected = Trial.alone(2, 5, make=lambda: Trial.Mlp().float(), loss=loss_of)
    Trial.assert_same(net, expected)


@pytest.mark.asyncio(loop_factories=["asyncio"])
async def test_n5_compiled_modules() -> None:
    """A compiled module that is wrapped, and a compiled forward through one that was wrapped before."""

    async def main() -> None:
        async with aiodist.init() as coll:
            for way in ("module", "forward"):
                module = Trial.Mlp(coll.rank)
                compiled: Any = torch.compile(module, backend="aot_eager")
                net = await DataParallel.create(compiled if way == "module" else module, coll, **Trial.FEW)
                opt = Trial.OPTIMIZERS["adam"](net.parameters())
                for step in range(3):
                    await net.step(partial(Trial.loss, compiled, coll.rank, step), opt)
                Trial.assert_same(module, Trial.alone(2, 3, optimizer="adam"))
                await net.aclose()

    await asyncio.wait_for(gather_ranks(2, main), 100)


class Checkpointed(nn.Module):
    """Layers that recompute their activations in backward; one of them several times."""

    def __init__(self, reentrant: bool, times: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.before = nn.Linear(6, 6).double()
        self.shared = nn.Linear(6, 6).double()
        self.other = nn.Linear(6, 6).double()
        self.after = nn.Linear(6, 3).double()
        self.reentrant = reentrant
        self.times = times

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(x))

    # The random state is the process's: while one rank put it back, another one would build its model from it.
    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for _ in range(self.times):
            x = checkpoint(self.block, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        x = checkpoint(self.other, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return self.after(x)  # type: ignore[no-any-return]


@pytest.mark.drawn(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("reentrant", [True, False])
async def test_n5_activation_checkpointing(coll: Communicator, reentrant: bool, times: int) -> None:
    for sizes in (Trial.SMALL, Trial.FEW, {}):
        net = await DataParallel.create(Checkpointed(reentrant, times), coll, **sizes)
        opt = Trial.OPTIMIZERS["adam"](net.parameters())
        for step in range(4):
            await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        expected = Trial.alone(2, 4, make=lambda: Checkpointed(reentrant, times), optimizer="adam")
        Trial.assert_same(net, expected)
        await net.aclose()


@pytest.mark.ranks(2)
async def test_n5_checkpointing_that_changes(coll: Communicator) -> None:
    """A layer that runs once more than before: either it is right, or it is an error, on all ranks, and once."""
    module = Checkpointed(True, 1)
    net = await DataParallel.create(module, coll, **Trial.SMALL)
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())
    alone = Checkpointed(True, 1)
    theirs = Trial.OPTIMIZERS["sgd"](alone.parameters())
    for step, times in enumerate([1, 1, 3, 3, 1, 2, 3, 4, 4]):
        module.times = alone.times = times
        before = [p.detach().clone() for p in net.parameters()]
        try:
            await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        except RuntimeError as error:
            assert times in (3, 4)
            assert "shared" in str(error)  # noqa: PT017
            assert all(map(torch.equal, before, net.parameters()))
            await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        Trial.step_alone(alone, theirs, 2, step)
    Trial.assert_same(net, alone)


class Doubled(torch.autograd.Function):
    """Twice the product, with a gradient of our own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return 2 * x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return 2 * grads[0] @ w.t(), 2 * x.t() @ grads[0]


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.w = nn.Parameter(torch.randn(6, 6, dtype=torch.float64) / 6)
        self.last = nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        y = Doubled.apply(x, self.w)  # type: ignore[no-untyped-call]
        return self.last(Doubled.apply(y, self.w))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.ranks(2)
async def test_n5_custom_autograd_functions(coll: Communicator) -> None:
    net = await DataParallel.create(Custom(), coll, **Trial.SMALL)
    opt = Trial.OPTIMIZERS["adam"](net.parameters())
    for step in range(3):
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    Trial.assert_same(net, Trial.alone(2, 3, make=Custom, optimizer="adam"))


@pytest.fixture
def anomaly_mode() -> Iterator[None]:
    """Anomaly mode belongs to the process, with all ranks in it: one block per rank would leave the mode on."""
    with torch.autograd.detect_anomaly():
        yield


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in")
async def test_n5_anomaly_mode(coll: Communicator, anomaly_mode: None) -> None:
    net, opt = await Trial.made(coll, **Trial.SMALL)
    for step in range(2):
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    nan = torch.tensor(float("nan"), dtype=torch.float64) if coll.rank else 1.0
    with pytest.raises(RuntimeError if coll.rank else aiodist.RemoteError, match="returned nan"):
        await net.step(lambda: Trial.loss(lambda x: net(x) * nan, coll.rank, 2), opt)
    await net.step(lambda: Trial.loss(net, coll.rank, 2), opt)
    Trial.assert_same(net, Trial.alone(2, 3))


class Imaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
        self.double()
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sizes", [Trial.SMALL, Trial.FEW, {}], ids=["each", "few", "all"])
async def test_n5_channels_last(coll: Communicator, sizes: dict[str, Any]) -> None:
    def loss(module: Any, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * rank + step)
        drawn = torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=generator)
        out: Tensor = module(drawn.to(memory_format=torch.channels_last))
        return out

    net = await DataParallel.create(Imaging(), coll, **sizes)
    opt = Trial.OPTIMIZERS["momentum"](net.parameters())
    for step in range(3):
        await net.step(partial(loss, net, coll.rank, step), opt)
        for p in net.parameters():
            assert p.grad is not None
            assert p.grad.stride() == p.stride()
    Trial.assert_same(net, Trial.alone(coll.size, 3, make=Imaging, loss=loss, optimizer="momentum"))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.4), nn.Linear(9, 3)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.ranks(1, 3)
async def test_n5_dropout_with_the_same_rng(coll: Communicator) -> None:
    def loss(module: Any, rank: int, step: int) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(step)  # the same mask on all ranks
            return Trial.loss(module, rank, step)

    net = await DataParallel.create(Noisy(), coll)
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())
    turn = await coll.dup()
    for step in range(3):  # one rank after the other: the generator is the process's
        for rank in range(coll.size):
            if rank == coll.rank:
                value = await net.submit(loss, net, coll.rank, step)
            await turn.barrier()
        opt.zero_grad()
        await net.backward(value)
        await net.submit(opt.step)
    Trial.assert_same(net, Trial.alone(coll.size, 3, make=Noisy, loss=loss))
    assert net.eval() is net
    assert not net.module.training
    x, _ = Trial.batch(0, 0)
    assert torch.equal(net(x), net(x))
    assert net.train().module.training


class Normed(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(9)
        super().__init__(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3), nn.BatchNorm1d(3))
        self.double()


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
async def test_n5_batch_norm(coll: Communicator) -> None:
    """Each rank has statistics of its own; before a checkpoint all ranks get the root's, or the mean."""
    net = await DataParallel.create(Normed(), coll, **Trial.FEW)
    opt = Trial.OPTIMIZERS["momentum"](net.parameters())
    # One process with a set of statistics for each rank.
    alone = Normed()
    theirs = Trial.OPTIMIZERS["momentum"](alone.parameters())
    own = [{name: b.clone() for name, b in alone.named_buffers()} for _ in range(coll.size)]
    for step in range(3):
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        theirs.zero_grad()
        for rank in range(coll.size):
            alone.load_state_dict(own[rank], strict=False)
            (Trial.loss(alone, rank, step) / coll.size).backward()
            own[rank] = {name: b.clone() for name, b in alone.named_buffers()}
        theirs.step()
    Trial.assert_same(net, alone)

    def check(expected: dict[str, Tensor]) -> None:
        for name, buffer in net.module.named_buffers():
            torch.testing.assert_close(buffer, expected[name], msg=name)

    check(own[coll.rank])
    if coll.size > 1:
        assert not torch.equal(own[0]["1.running_mean"], own[1]["1.running_mean"])
    await net.synchronize_buffers("mean")
    mean = {name: torch.stack([o[name].double() for o in own]).mean(0).to(b.dtype) for name, b in own[0].items()}
    check(mean)
    for name, buffer in net.module.named_buffers():
        buffer.copy_(own[coll.rank][name])
    await net.synchronize_buffers()
    check(own[0])
    for name, buffer in net.module.named_buffers():
        buffer.copy_(own[coll.rank][name])
    await net.synchronize_buffers("root", root=coll.size - 1)
    check(own[-1])
    with pytest.raises(ValueError, match="how="):
        net.synchronize_buffers("median")


@pytest.mark.ranks(2)
async def test_n5_autocast_in_forward_and_around_a_step(coll: Communicator) -> None:
    results = []
    for around in (False, True):
        net, opt = await Trial.made(coll, "sgd", Trial.Mlp().float(), **Trial.FEW)
        seen: list[torch.dtype] = []

        def forward(step: int, net: DataParallel = net, seen: list[torch.dtype] = seen) -> Tensor:
            x, y = Trial.batch(coll.rank, step, torch.float32)
            out = net(x)
            seen.append(out.dtype)
            return mse_loss(out.float(), y)

        def own_mode(step: int, forward: Any = forward) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return forward(step)  # type: ignore[no-any-return]

        for step in range(3):
            if around:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    await net.step(partial(forward, step), opt)
            else:
                await net.step(partial(own_mode, step), opt)
            assert not await net.submit(torch.is_autocast_enabled, "cpu")
        assert seen == [torch.bfloat16] * 3
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in net.parameters())
        results.append([p.detach().clone() for p in net.parameters()])
        await net.aclose()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
