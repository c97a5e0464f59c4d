"""N18: what local SGD has to do with joins, settings, kinds of parameters, freezing, compression, devices."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import ExponentialLR

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, Elastic, LocalSGD, SlowMo, assert_synchronized
from tests.nn.conftest import Trial
from tests.support.local_sgd import EVERY, OUTER, Alone
from tests.support.simulated_cuda.device import SimulatedCuda

each_rule = pytest.mark.parametrize("rule", OUTER)
each_overlap = pytest.mark.parametrize("overlap", [False, True], ids=["waits", "overlaps"])


@pytest.mark.ranks(1, 2, 3)
async def test_n18_refused_inside_join(coll: Communicator) -> None:
    """Every rank raises, a rank without data too: no rank waits for an average that another rank cannot make."""
    net = await DataParallel.create(Trial.Mlp(), coll)
    local = await LocalSGD.create(net, Trial.OPTIMIZERS["sgd"](net.parameters()), every=2)
    with pytest.raises((RuntimeError, aiodist.RemoteError), match=r"LocalSGD inside net\.join"):
        async with net.join(local):
            await Trial.train(net, local, range(min(coll.rank, 1) or coll.size == 1), coll.rank)


@pytest.mark.ranks(2)
async def test_n18_sparse_gradients_stay_on_their_rank(coll: Communicator) -> None:
    module = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(module.weight)
    net = await DataParallel.create(module, coll)
    local = await LocalSGD.create(net, torch.optim.SGD(net.parameters(), lr=1.0), every=2)
    for _ in range(2):
        await net.step(lambda: net(torch.tensor([coll.rank])).sum(), local)
    assert module.weight.tolist() == [[-1.0, -1.0]] * 2 + [[0.0, 0.0]] * 2


@pytest.mark.ranks(2)
async def test_n18_settings_look_at_the_gradients_of_this_rank(coll: Communicator) -> None:
    """Clipping, three closures a step, and a scaler that skips a step of rank 1; schedulers step in any case."""

    def part(module: Any, rank: int, step: int) -> Tensor:
        x, y = Trial.batch(rank, step, torch.float32)
        out: Tensor = module(x)
        return nn.functional.mse_loss(out, y)

    def bad(module: Any, rank: int, step: int) -> Tensor:
        return part(module, rank, step) * (float("inf") if rank == 1 and step == 4 else 1.0)

    net, opt = await Trial.made(coll, "momentum", Trial.Mlp().float(), clip_norm=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    net.configure(scaler=scaler, scheduler=ExponentialLR(opt, 0.9))
    local = await LocalSGD.create(net, opt, every=EVERY)
    modules = [Trial.Mlp().float() for _ in range(2)]
    optimizers: list[Any] = [Trial.OPTIMIZERS["momentum"](list(m.parameters())) for m in modules]
    schedulers = [ExponentialLR(each, 0.9) for each in optimizers]
    for step in range(2 * EVERY):
        closures = [partial(bad, net, coll.rank, step), partial(part, net, coll.rank, step + 50)]
        seen = await net.step(closures, local)
        assert torch.isfinite(seen) == ((coll.rank, step) != (1, 4))
        for rank in range(2):
            optimizers[rank].zero_grad()
            (part(modules[rank], rank, step) + part(modules[rank], rank, step + 50)).backward()
            nn.utils.clip_grad_norm_(modules[rank].parameters(), 0.2)
            if (rank, step) != (1, 4):
                optimizers[rank].step()
            else:
                optimizers[rank]._opt_called = True
            schedulers[rank].step()
        if step % EVERY == EVERY - 1:
            mean = torch.stack([parameters_to_vector(m.parameters()).detach() for m in modules]).mean(0)
            for module in modules:
                vector_to_parameters(mean.clone(), module.parameters())
        for ours, theirs in zip(net.parameters(), modules[coll.rank].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert scaler.get_scale() == (64 if coll.rank == 0 else 32)
    assert opt.param_groups[0]["lr"] == optimizers[0].param_groups[0]["lr"]
    await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.ranks(1, 2)
async def test_n18_autocast(coll: Communicator) -> None:
    seen: list[torch.dtype] = []

    def loss(step: int) -> Tensor:
        x, y = Trial.batch(coll.rank, step, torch.float32)
        out = net(x)
        seen.append(out.dtype)
        return nn.functional.mse_loss(out.float(), y)

    net = await DataParallel.create(Trial.Mlp().float(), coll, autocast=torch.bfloat16)
    local = await LocalSGD.create(net, Trial.OPTIMIZERS["sgd"](net.parameters()), every=2)
    for step in range(3):
        await net.step(loss, local, step)
    assert seen == [torch.bfloat16] * 3


class Odd(nn.Module):
    """Several dtypes, a tied weight, one that is never used, a frozen one, a batch norm, a transposed weight."""

    DTYPES = (torch.float32, torch.float64, torch.bfloat16)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(6, 6).to(dtype) for dtype in self.DTYPES])
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.layers[0].weight  # type: ignore[assignment]
        self.never = nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.turned = nn.Parameter(torch.randn(3, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(self.tied(x.float())))
        for layer, dtype in zip(self.layers, self.DTYPES, strict=True):
            x = torch.tanh(layer(x.to(dtype)))
        return (x.float() @ self.turned).double()


@pytest.mark.drawn(3)
@pytest.mark.ranks(1, 2, 3)
@each_rule
@pytest.mark.parametrize("sizes", [Trial.SMALL, {}], ids=["each", "all"])
@each_overlap
async def test_n18_many_kinds_of_parameters(
    coll: Communicator, rule: str, overlap: bool, sizes: dict[str, Any]
) -> None:
    net = await DataParallel.create(Odd(), coll, **sizes)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    local = await LocalSGD.create(net, opt, every=2, outer=OUTER[rule], overlap=overlap)
    modules = [Odd() for _ in range(coll.size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in modules]
    begin = [p.detach().double().clone() for p in modules[0].parameters()]
    for step in range(2):
        await net.step(Trial.loss, local, net, coll.rank, step)
        for rank, (module, theirs) in enumerate(zip(modules, optimizers, strict=True)):
            theirs.zero_grad()
            Trial.loss(module, rank, step).backward()
            theirs.step()
    await local.flush()
    factor = {"plain": 1.0, "slowmo": 0.9, "diloco": 0.7 * 1.8, "elastic": 0.2 * coll.size}[rule]
    for ours, before, *parts in zip(net.parameters(), begin, *(m.parameters() for m in modules), strict=True):
        expected = before + factor * (torch.stack([p.detach().double() for p in parts]).mean(0) - before)
        torch.testing.assert_close(
            ours.double(), expected, rtol=0.02, atol=0.02 if ours.dtype is torch.bfloat16 else 1e-3
        )
    await assert_synchronized(list(net.parameters()), coll)
    means = [m.get_buffer("norm.running_mean") for m in (net.module, modules[coll.rank])]
    torch.testing.assert_close(*means)  # each rank's own
    await net.synchronize_buffers(how="mean")
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
@each_overlap
async def test_n18_freezing_and_thawing(coll: Communicator, overlap: bool) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **Trial.FEW)
    net.get_submodule("0").requires_grad_(False)
    local = await LocalSGD.create(net, Trial.OPTIMIZERS["sgd"](net.parameters()), every=2, overlap=overlap)
    alone = Alone(2, "sgd", "plain", overlap=overlap)
    switches = {0: ("0", False), 3: ("0", True), 4: ("2", False), 9: ("2", True)}
    for step in range(12):
        if step in switches:
            which, able = switches[step]
            for module in (net.module, *alone.modules):
                module.get_submodule(which).requires_grad_(able)
        alone.step(step, every=2)
        await net.step(Trial.loss, local, net, coll.rank, step)
        Trial.assert_same(net, alone.modules[coll.rank])
    await local.flush()
    Trial.assert_same(net, alone.flush())


@pytest.mark.ranks(1)
async def test_n18_arguments(coll: Communicator) -> None:
    net, opt = await Trial.made(coll)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((net.module, opt), {}, TypeError, "net is a Mlp: expected what"),
        ((net, [opt]), {}, TypeError, "optimizer is a list: expected an optimizer"),
        ((net, torch.optim.LBFGS(net.parameters())), {}, TypeError, "LBFGS"),
        ((net, opt), {"every": 0}, ValueError, "every=0: expected a whole number of steps, at least 1"),
        ((net, opt), {"every": 2.0}, ValueError, r"every=2\.0"),
        ((net, opt), {"every": True}, ValueError, "every=True"),
        ((net, opt), {"start": -1}, ValueError, "start=-1"),
        ((net, opt), {"outer": opt}, TypeError, "outer is SGD, .*: expected a SlowMo"),
        ((net, opt), {"outer": 0.7}, TypeError, "outer is float"),
        ((net, opt), {"outer": len}, TypeError, "which gives int"),
        ((net, opt), {"outer": torch.optim.LBFGS}, TypeError, "LBFGS"),
    ]
    for args, how, error, text in wrong:
        with pytest.raises(error, match=text):
            await LocalSGD.create(*args, **{"every": 2, **how})
    for make, text in (
        (lambda: SlowMo(1.0), r"momentum=1\.0"),
        (lambda: SlowMo(0.5, lr=0.0), r"lr=0\.0"),
        (lambda: Elastic(0.0), r"alpha=0\.0"),
        (lambda: Elastic(float("nan")), "alpha=nan"),
    ):
        with pytest.raises(ValueError, match=text):
            make()
    assert repr(await LocalSGD.create(net, opt, every=2)).startswith(
        "<LocalSGD of SGD, every 2 steps, on <DataParallel of Mlp"
    )


@pytest.mark.ranks(2)
async def test_n18_parameters_of_one_rank_are_not_taken_for_those_of_all(coll: Communicator) -> None:
    net, opt = await Trial.made(coll)
    local = await LocalSGD.create(net, opt, every=2)
    await net.step(Trial.loss, local, net, coll.rank, 0)
    for call in (net.state_dict, lambda: net.load_state_dict({})):
        with pytest.raises(RuntimeError, match=r"await opt\.flush"):
            call()
    with pytest.raises(RuntimeError, match=r"await opt\.flush"):
        await net.step(Trial.loss, opt, net, coll.rank, 1)
    with pytest.raises(RuntimeError, match="no_sync"), net.no_sync():
        await net.step(Trial.loss, local, net, coll.rank, 1)
    await net.aclose()  # it averages
    alone = Alone(2, "sgd", "plain")
    alone.step(0)
    Trial.assert_same(net.module, alone.flush())
    with pytest.raises(RuntimeError, match="is closed"):
        await local.flush()


@pytest.mark.ranks(2)
async def test_n18_loaded_parameters_are_the_new_centre(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(1), coll)
    local = await LocalSGD.create(net, Trial.OPTIMIZERS["sgd"](net.parameters()), every=2, outer=OUTER["elastic"])
    await Trial.train(net, local, range(3), coll.rank)
    await local.flush()
    net.load_state_dict(Trial.Mlp().state_dict())
    alone = Alone(2, "sgd", "elastic")
    for step in range(2):
        alone.step(step, every=2)
    await Trial.train(net, local, range(2), coll.rank)
    Trial.assert_same(net, alone.modules[coll.rank])


@pytest.mark.ranks(2, 3)
async def test_n18_a_step_whose_await_is_cancelled_is_made(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    local = await LocalSGD.create(net, Trial.OPTIMIZERS["sgd"](net.parameters()), every=2)
    alone = Alone(coll.size, "sgd", "plain")
    begin = asyncio.get_running_loop().call_soon_threadsafe

    def loss(step: int, begun: asyncio.Event, cancelled: threading.Event) -> Tensor:
        begin(begun.set)
        assert cancelled.wait(30)
        return Trial.loss(net, coll.rank, step)

    for step in range(4):
        alone.step(step, every=2)
        begun, cancelled = asyncio.Event(), threading.Event()
        task = asyncio.ensure_future(net.step(loss, local, step, begun, cancelled))
        await begun.wait()
        if coll.rank == 1:
            task.cancel()
            await asyncio.wait([task])
        cancelled.set()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() == (coll.rank == 1)
    await local.flush()
    Trial.assert_same(net, alone.modules[0])


@pytest.mark.ranks(2, 3)
async def test_n18_a_rank_that_closes_in_the_middle_is_told(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    local = await LocalSGD.create(net, Trial.OPTIMIZERS["sgd"](net.parameters()), every=2)
    await Trial.train(net, local, range(2), coll.rank)
    end = net.aclose() if coll.rank == 1 else Trial.train(net, local, range(2, 4), coll.rank)
    with pytest.raises(aiodist.MismatchError, match=r"rank 1: closes the net after 1 steps.*net\.join"):
        await end


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3)
@each_rule
@each_overlap
async def test_n18_on_cuda_devices(coll: Communicator, simulated_cuda: SimulatedCuda, rule: str, overlap: bool) -> None:
    def loss(step: int) -> Tensor:
        x, y = Trial.batch(coll.rank, step)
        return nn.functional.mse_loss(net(x.to(coll.device)), y.to(coll.device))

    net, opt = await Trial.made(coll, "momentum", Trial.Mlp().to(coll.device), **Trial.FEW)
    local = await LocalSGD.create(net, opt, every=EVERY, outer=OUTER[rule], overlap=overlap)
    alone = Alone(coll.size, "momentum", rule, overlap=overlap)
    for step in range(3 * EVERY + 1):
        alone.step(step)
        await net.step(loss, local, step)
    await local.flush()
    expected = dict(alone.flush().named_parameters())
    for name, ours in net.named_parameters():
        torch.testing.assert_close(ours.detach().cpu(), expected[name].detach(), rtol=1e-6, atol=1e-9)
    await net.aclose()
