"""N3 on CUDA devices: what ranks train there equals what one process trains on the CPU, on the joined batch."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from aiodist import Communicator, MismatchError
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized
from tests.nn.conftest import Trial
from tests.support.simulated_cuda.device import SimulatedCuda

if TYPE_CHECKING:
    from tests.conftest import NcclOnDevices

STEPS = 4


class Halves(nn.Module):
    """Two layers, each on a device of its own."""

    def __init__(self, mlp: nn.Sequential, first: str | torch.device, second: str | torch.device) -> None:
        super().__init__()
        layers = list(mlp)
        self.first = nn.Sequential(*layers[:2]).to(first)
        self.second = nn.Sequential(*layers[2:]).to(second)
        self.places = first, second

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.places
        hidden: Tensor = self.second(self.first(x.to(first)).to(second))
        return hidden.to(x.device)


def loss_on(device: torch.device | str, module: Any, rank: int, step: int) -> Tensor:
    x, y = Trial.batch(rank, step, next(iter(module.parameters())).dtype)
    return mse_loss(module(x.to(device)), y.to(device))


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("optimizer", "dtype"), [("momentum", torch.float64), ("adam", torch.float64), ("momentum", torch.float32)]
)
async def test_n3_cuda_equals_one_process(
    coll: Communicator, simulated_cuda: SimulatedCuda, optimizer: str, dtype: torch.dtype
) -> None:
    expected = Trial.alone(coll.size, STEPS, optimizer=optimizer)
    net, opt = await Trial.made(coll, optimizer, Trial.Mlp(coll.rank).to(coll.device, dtype), **Trial.FEW)
    for step in range(STEPS):
        loss = await net.step(partial(loss_on, coll.device, net, coll.rank, step), opt)
        assert loss.is_cuda
        assert not loss.requires_grad
    if dtype is torch.float64:
        Trial.assert_same(net, expected)
    else:
        Trial.assert_same(net, expected.float(), rtol=1e-3, atol=1e-5)
    await net.aclose()


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n3_cuda_over_nccl(coll: Communicator, fake_nccl: NcclOnDevices, pipelined: bool) -> None:
    net = await DataParallel.create(Trial.Mlp(coll.rank).to(coll.device), coll, **Trial.SMALL)
    assert coll.size == 1 or coll.availability().of("allreduce", "nccl", "cuda").state == "available"
    make = Trial.OPTIMIZERS["momentum"]
    opt: Any = await PipelinedOptimizer.create(net, make) if pipelined else make(net.parameters())
    for step in range(STEPS):
        await net.step(partial(loss_on, coll.device, net, coll.rank, step), opt)
    if pipelined:
        await opt.flush()
    await coll.barrier()  # a rank that looks at parameters holds up the loop of all
    Trial.assert_same(net, Trial.alone(coll.size, STEPS, optimizer="momentum"))
    await net.aclose()


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("places", [("cuda:0", "cpu"), ("cpu", "cuda:1"), ("cuda:1", "cuda:0")])
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n3_cuda_modules_on_several_devices(
    coll: Communicator,
    simulated_cuda: SimulatedCuda,
    places: tuple[str, str],
    pipelined: bool,
) -> None:
    net = await DataParallel.create(Halves(Trial.Mlp(coll.rank), *places), coll, **Trial.FEW)
    make = Trial.OPTIMIZERS["momentum"]
    opt: Any = await PipelinedOptimizer.create(net, make) if pipelined else make(net.parameters())
    for step in range(STEPS):
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    if pipelined:
        await opt.flush()
    expected = [p.detach() for p in Trial.alone(coll.size, STEPS, optimizer="momentum").parameters()]
    torch.testing.assert_close([p.detach().cpu() for p in net.parameters()], expected, rtol=1e-6, atol=1e-9)
    await net.aclose()


@pytest.mark.ranks(2)
async def test_n3_cuda_ranks_must_have_the_same_on_devices(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    module = Trial.Mlp()
    if coll.rank:
        module[2].to("cuda")
    with pytest.raises(
        MismatchError, match=r"place of net .*: rank 0: all on the CPU; rank 1: .*module: 2\.weight, 2\.bias"
    ):
        await DataParallel.create(module, coll)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_n5_cuda_accumulated_gradients(
    coll: Communicator, simulated_cuda: SimulatedCuda, op: Literal["mean", "sum"]
) -> None:
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp(coll.rank).to(coll.device), op=op, **Trial.FEW)
    for step in range(STEPS):
        if step % 2 == 0:
            opt.zero_grad()
            with net.no_sync():
                await net.backward(loss_on(coll.device, net, coll.rank, step))
        else:
            await net.backward(loss_on(coll.device, net, coll.rank, step))
            await net.submit(opt.step)
    Trial.assert_same(net, Trial.alone(coll.size, STEPS, op=op, every=2))
    await net.aclose()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_n5_cuda_gradients_are_added_to_reduced_ones(
    coll: Communicator, simulated_cuda: SimulatedCuda, op: Literal["mean", "sum"]
) -> None:
    net = await DataParallel.create(Trial.Mlp().to(coll.device), coll, op=op, **Trial.FEW)
    alone = Trial.Mlp()
    for step in range(STEPS):
        await net.backward(loss_on(coll.device, net, coll.rank, step))
        losses = torch.stack([Trial.loss(alone, rank, step) for rank in range(coll.size)])
        (losses.mean() if op == "mean" else losses.sum()).backward()
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
    await net.aclose()


@pytest.mark.ranks(1, 2)
async def test_n8_cuda_gradients_as_they_come(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    net = await DataParallel.create(Trial.Mlp().to(coll.device), coll, **Trial.SMALL)
    side = torch.cuda.Stream(coll.device)
    for step in range(STEPS):
        alone = Trial.Mlp()
        torch.stack([Trial.loss(alone, rank, step) for rank in range(coll.size)]).mean().backward()
        expected = dict(zip(net.parameters(), alone.parameters(), strict=True))
        net.zero_grad()
        async for parameter, gradient in net.backward_iter(loss_on(coll.device, net, coll.rank, step)):
            with torch.cuda.stream(side):  # it is there: on any stream
                seen = gradient.clone()
                torch.testing.assert_close(seen.cpu(), expected.pop(parameter).grad)
        assert not expected
    await net.aclose()


@pytest.mark.ranks(3)
async def test_n11_cuda_join(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    counts = [2, 5, 3]
    alone = Trial.Mlp()
    theirs = Trial.OPTIMIZERS["momentum"](alone.parameters())
    for step in range(max(counts)):
        theirs.zero_grad()
        torch.stack([Trial.loss(alone, rank, step) for rank in range(3) if step < counts[rank]]).mean().backward()
        theirs.step()
    net, opt = await Trial.made(coll, "momentum", Trial.Mlp().to(coll.device), **Trial.FEW)
    async with net.join():
        for step in range(counts[coll.rank]):
            await net.step(partial(loss_on, coll.device, net, coll.rank, step), opt)
    Trial.assert_same(net, alone)
    for ours, other in zip(net.parameters(), alone.parameters(), strict=True):
        momentum = opt.state[ours]["momentum_buffer"]
        assert momentum.device == ours.device
        torch.testing.assert_close(momentum.cpu(), theirs.state[other]["momentum_buffer"])
    await net.aclose()


@pytest.mark.ranks(2)
async def test_n7_cuda_clipped(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    net = await DataParallel.create(Trial.Mlp().to(coll.device), coll, **Trial.FEW)
    net.configure(clip_norm=0.05)
    opt = await PipelinedOptimizer.create(net, Trial.OPTIMIZERS["sgd"])
    alone = Trial.Mlp()
    theirs = Trial.OPTIMIZERS["sgd"](alone.parameters())
    for step in range(STEPS):
        await net.step(partial(loss_on, coll.device, net, coll.rank, step), opt)
        theirs.zero_grad()
        torch.stack([Trial.loss(alone, rank, step) for rank in range(coll.size)]).mean().backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05)
        theirs.step()
    await opt.flush()
    Trial.assert_same(net, alone)
    await net.aclose()


@pytest.mark.ranks(2)
async def test_n3_cuda_under_any_delays(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    """Each rank uses a random set of layers; streams are late in turns."""
    chance = random.Random(3)
    alone = nn.ModuleList([nn.Linear(6, 6).double() for _ in range(5)])
    module = copy.deepcopy(alone).to(coll.device)
    net = await DataParallel.create(module, coll, **Trial.FEW)
    alone.load_state_dict({name: t.cpu() for name, t in net.state_dict().items()})  # rank 0's
    opt, theirs = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)

    def forward(layers: Any, used: list[int], x: Tensor) -> Tensor:
        for i in used:
            x = layers[i](x).tanh()
        return x.square().mean()

    for step in range(8):
        simulated_cuda.delay = chance.choice([0.0, 2e-4, 1e-3])
        used = [chance.sample(range(5), 3) for _ in range(coll.size)]
        xs = [Trial.batch(rank, step)[0] for rank in range(coll.size)]
        await net.step(partial(forward, module, used[coll.rank], xs[coll.rank].to(coll.device)), opt)
        theirs.zero_grad()
        for rank in range(coll.size):
            (forward(alone, used[rank], xs[rank]) / coll.size).backward()
        theirs.step()
    Trial.assert_same(net, alone)
    await assert_synchronized(module, coll)
    await net.aclose()
