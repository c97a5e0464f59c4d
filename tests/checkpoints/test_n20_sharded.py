"""N17, N20: a sharded optimizer goes on from a checkpoint, on another number of ranks, as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, ShardedOptimizer
from aiodist.testing import run_ranks


def made(name: str, groups: Any) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.01)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


async def sharded(training: Any, coll: Communicator, name: str, seed: int) -> Any:
    net = await DataParallel.create(training.module(seed), coll)
    return training(net, ShardedOptimizer(net, lambda groups: made(name, groups)))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("saved_by", [2, 4])
def test_n20_a_sharded_training_goes_on_with_another_number_of_ranks(
    training: Any, tmp_path: Path, saved_by: int, name: str
) -> None:
    expected: dict[str, Any] = {}

    async def alone() -> None:
        async with aiodist.init() as coll:
            net = await DataParallel.create(training.module(0), coll)
            run = training(net, made(name, net.parameters()))
            expected["losses"] = await run.steps(0, 7)

    async def save() -> None:
        async with aiodist.init() as coll:
            run = await sharded(training, coll, name, 0)
            losses = await run.steps(0, 4)  # whose last parameters are still being gathered
            saving = aiodist.save(tmp_path / "runs", run.net, run.opt, extra=4)
            assert losses + await run.steps(4, 7) == pytest.approx(expected["losses"], rel=1e-9)
            await saving

    async def load() -> None:
        async with aiodist.init() as coll:
            run = await sharded(training, coll, name, 7)
            await run.steps(50, 51)
            found = await aiodist.load(tmp_path / "runs", run.net, run.opt)
            assert (found.extra, found.ranks) == (4, saved_by)
            assert await run.steps(4, 7) == pytest.approx(expected["losses"][4:], rel=1e-9)

    run_ranks(1, alone)
    run_ranks(saved_by, save)
    for loaded_by in (1, 2, 3, 5):
        run_ranks(loaded_by, load)
