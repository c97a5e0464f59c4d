"""N17: parameters on CUDA devices, simulated ones: into a checkpoint and back, also to the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel
from tests.checkpoints.conftest import assert_same
from tests.support.simulated_cuda.device import SimulatedCuda


@pytest.mark.ranks(1, 2)
async def test_n17_cuda_parameters(
    coll: Communicator, simulated_cuda: SimulatedCuda, training: Any, tmp_path: Path
) -> None:
    path = Path(await coll.broadcast_object(str(tmp_path / "cuda")))
    net = await DataParallel.create(training.module().to(coll.device), coll)
    opt = torch.optim.Adam(net.parameters(), lr=0.01)

    def loss(step: int) -> torch.Tensor:
        drawn = torch.randn(4, 113, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return mse_loss(net(drawn[:, :110].to(coll.device)), drawn[:, 110:].to(coll.device))

    for step in range(2):
        await net.step(loss, opt, step)
    saving = aiodist.save(path, net, opt)
    state = net.submit(lambda: {name: t.cpu().clone() for name, t in net.state_dict().items()})
    losses = [float((await net.step(loss, opt, step)).cpu()) for step in (2, 3)]
    await saving
    await aiodist.load(path, net, opt)
    assert_same({name: t.cpu() for name, t in net.state_dict().items()}, await state)
    assert all(t.device == coll.device for t in net.state_dict().values())
    assert [float((await net.step(loss, opt, step)).cpu()) for step in (2, 3)] == losses
    plain = training.module(seed=3)
    await aiodist.load(path, plain, torch.optim.Adam(plain.parameters()), coll=coll)
    assert_same(plain.state_dict(), await state)
