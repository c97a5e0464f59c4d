"""N3: what many ranks train equals what one process trains on the joined batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiodist import Communicator
from aiodist.nn import DataParallel, assert_synchronized

if TYPE_CHECKING:
    from tests.nn.conftest import Trial

STEPS = 4
SIZES: dict[str, dict[str, int]] = {
    "as they are": {},
    "one parameter each": {"bucket_bytes": 1, "first_bucket_bytes": 1},
    "everything": {"bucket_bytes": 1 << 20},
    "a few": {"bucket_bytes": 600, "first_bucket_bytes": 100},
}


@pytest.mark.ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
async def test_n3_equals_one_process_with_the_joined_batch(
    coll: Communicator, trial: type[Trial], optimizer: str
) -> None:
    module = trial.Mlp(0)
    opt = trial.OPTIMIZERS[optimizer](module.parameters())
    for step in range(STEPS):
        opt.zero_grad()
        trial.joined(module, coll.size, step).backward()
        opt.step()
    for sizes in SIZES.values():
        net = await DataParallel.create(trial.Mlp(coll.rank), coll, **sizes)
        ours = trial.OPTIMIZERS[optimizer](net.parameters())
        for step in range(STEPS):
            loss = await net.step(lambda step=step: trial.loss(net, coll.rank, step), ours)
            assert not loss.requires_grad
        trial.assert_same(net, module)
        await net.aclose()


@pytest.mark.ranks(2, 3, backend="mpi")
@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.ranks(2, backend="mpi", checked=False)
async def test_n3_equals_one_process_over_a_library(coll: Communicator, trial: type[Trial]) -> None:
    net = await DataParallel.create(trial.Mlp(coll.rank), coll, **SIZES["a few"])
    opt = trial.OPTIMIZERS["adam"](net.parameters())
    for step in range(STEPS):
        await net.step(lambda step=step: trial.loss(net, coll.rank, step), opt)
    trial.assert_same(net, trial.alone(coll.size, STEPS, optimizer="adam"))
    await assert_synchronized(net.module, coll)


