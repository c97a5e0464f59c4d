"""N12 on CUDA devices: gradients travel as codes, which are made on the host, as those of parameters on the CPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from aiodist import AiodistError, Communicator
from aiodist.codecs import BFloat16, Codec, Int8, PowerSGD, Sign, TopK
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized, compression
from tests.support.simulated_cuda.device import SimulatedCuda

if TYPE_CHECKING:
    from tests.nn.conftest import Trial

STEPS = 4


def loss_on(place: torch.device | str, trial: type[Trial], module: Any, rank: int, step: int) -> Tensor:
    x, y = trial.batch(rank, step)
    return mse_loss(module(x.to(place)), y.to(place))


async def trained(
    coll: Communicator,
    trial: type[Trial],
    place: torch.device | str,
    codec: Codec,
    *,
    pipelined: bool = False,
    **how: Any,
) -> DataParallel:
    net = await DataParallel.create(trial.Mlp(coll.rank).to(place), coll, compress=codec, **how)
    make = trial.OPTIMIZERS["momentum"]
    opt: Any = PipelinedOptimizer(net, make) if pipelined else make(net.parameters())
    for step in range(STEPS):
        await net.step(partial(loss_on, place, trial, net, coll.rank, step), opt)
    if pipelined:
        await opt.flush()
    return net


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("codec", [TopK(0.2), Int8(), BFloat16(), PowerSGD(2), Sign(vote=True)], ids=str)
async def test_n12_cuda_trains_as_on_the_cpu(
    coll: Communicator,
    simulated_cuda: SimulatedCuda,
    trial: type[Trial],
    monkeypatch: pytest.MonkeyPatch,
    codec: Codec,
    pipelined: bool,
) -> None:
    """Buckets of one parameter and of several, and some in parts; weights, residuals and bytes are the same."""
    monkeypatch.setattr(compression, "_PART", 29)
    for sizes in (trial.SMALL, trial.FEW):
        expected = await trained(coll, trial, "cpu", codec, pipelined=pipelined, **sizes)
        net = await trained(coll, trial, coll.device, codec, pipelined=pipelined, **sizes)
        for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
            assert ours.is_cuda
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-9, atol=1e-12)
        assert net.statistics().sent_nbytes == expected.statistics().sent_nbytes
        assert net.compressor is not None
        assert expected.compressor is not None
        seen, kept = (each.state_dict()["residuals"] for each in (net.compressor, expected.compressor))
        assert seen.keys() == kept.keys()
        for name, residual in kept.items():
            torch.testing.assert_close(seen[name], residual, rtol=1e-9, atol=1e-12)
        await net.aclose()
        await expected.aclose()


@pytest.mark.ranks(2)
async def test_n12_cuda_that_keeps_all_is_the_plain_loop(
    coll: Communicator, simulated_cuda: SimulatedCuda, trial: type[Trial]
) -> None:
    """Also where gradients add up over two backwards, and where a rank's data end early."""
    net = await trained(coll, trial, coll.device, TopK(1.0), **trial.FEW)
    for ours, theirs in zip(net.parameters(), trial.alone(2, STEPS, optimizer="momentum").parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-6, atol=1e-9)
    await net.aclose()
    net = await DataParallel.create(trial.Mlp(coll.rank).to(coll.device), coll, compress=TopK(1.0), **trial.FEW)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with net.no_sync():
        await net.backward(loss_on(coll.device, trial, net, coll.rank, 0))
    await net.backward(loss_on(coll.device, trial, net, coll.rank, 1))
    await net.run(opt.step)
    for ours, theirs in zip(net.parameters(), trial.alone(2, 2, every=2).parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-6, atol=1e-9)
    async with net.join(opt):
        for step in range(2 + coll.rank):
            await net.step(partial(loss_on, coll.device, trial, net, coll.rank, step), opt)
    await net.run(lambda: None)
    await assert_synchronized(net.module, coll)
    await net.aclose()


class Halves(nn.Module):
    """Two layers, each in a place of its own."""

    def __init__(self, mlp: nn.Sequential, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(*list(mlp)[:2]).to(first), nn.Sequential(*list(mlp)[2:]).to(second)
        self.places = first, second

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.places
        return self.second(self.first(x.to(first)).to(second)).to(x.device)  # type: ignore[no-any-return]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("places", [("cuda:0", "cpu"), ("cuda:1", "cuda:0")])
async def test_n12_cuda_several_devices(
    coll: Communicator, simulated_cuda: SimulatedCuda, trial: type[Trial], places: tuple[str, str]
) -> None:
    net = await DataParallel.create(Halves(trial.Mlp(coll.rank), *places), coll, compress=PowerSGD(9), **trial.FEW)
    opt = trial.OPTIMIZERS["adam"](net.parameters())
    for step in range(STEPS):
        await net.step(trial.loss, opt, net, coll.rank, step)
    await net.run(lambda: None)
    for ours, theirs in zip(net.parameters(), trial.alone(2, STEPS, optimizer="adam").parameters(), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-6, atol=1e-9)
    await net.aclose()


class Fragile:
    """A codec that fails on one rank."""

    def __init__(self, broken: bool) -> None:
        self._broken = broken

    def __repr__(self) -> str:
        return "Fragile"

    def encode(self, t: Tensor) -> Tensor:
        if self._broken:
            raise ArithmeticError("no code")
        return t.clone().view(torch.uint8)

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        return code.clone().view(dtype)


@pytest.mark.ranks(2)
async def test_n12_cuda_a_codec_that_fails_on_one_rank_ends_it_for_all(
    coll: Communicator, simulated_cuda: SimulatedCuda, trial: type[Trial]
) -> None:
    net = await DataParallel.create(trial.Mlp().to(coll.device), coll, compress=Fragile(coll.rank == 1), **trial.SMALL)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ArithmeticError if coll.rank == 1 else AiodistError):
        await net.step(partial(loss_on, coll.device, trial, net, coll.rank, 0), opt)
    with pytest.raises((ArithmeticError, AiodistError)):
        await net.step(partial(loss_on, coll.device, trial, net, coll.rank, 1), opt)
