"""C15: the bits of a training do not depend on buckets and optimizers; those of the example not on the ranks either."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer, ShardedOptimizer
from aiodist.testing import run_ranks

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


async def trained(coll: Communicator, way: str, **buckets: Any) -> list[float]:
    """Return the weights after four steps, each rank on data of its own."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(17, 31), nn.Tanh(), nn.Linear(31, 13), nn.Tanh(), nn.Linear(13, 3))
    drivers: dict[str, Any] = {"pipelined": PipelinedOptimizer, "sharded": ShardedOptimizer}
    net = await DataParallel.create(module, coll, **buckets)
    opt: Any = await drivers[way].create(net, SGD) if way in drivers else SGD(net.parameters())
    random = torch.Generator().manual_seed(coll.rank)
    for _ in range(4):
        x, y = torch.randn(5, 17, generator=random), torch.randn(5, 3, generator=random)
        await net.step(lambda: mse_loss(net(x), y), opt)  # noqa: B023
    if way in drivers:
        await opt.flush()
    weights = parameters_to_vector(module.parameters()).tolist()
    await net.aclose()
    return weights


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ranks", [3, 4])
def test_c15_buckets_and_optimizers_keep_the_bits(ranks: int) -> None:
    async def main() -> None:
        async with aiodist.init(reproducible=True) as coll:
            weights = await trained(coll, "plain")
            for way in ("plain", "pipelined", "sharded"):
                for nbytes in (1, 700):
                    again = await trained(coll, way, bucket_bytes=nbytes, first_bucket_bytes=nbytes)
                    assert again == weights, (way, nbytes)

    run_ranks(ranks, main, timeout=300)


def example() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "examples" / "reproducible.py"
    spec = importlib.util.spec_from_file_location("reproducible", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("one_thread")
def test_c15_the_digits_on_1_2_4_and_8_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = example()
    monkeypatch.setattr(program, "EPOCHS", 1)
    printed = set()
    for ranks in (1, 2, 4, 8, 3):
        run_ranks(ranks, program.main)
        printed.add(capsys.readouterr().out)
    (line,) = printed
    assert line.startswith("weights ")
    assert float(line.split()[-1]) > 0.8


@pytest.mark.usefixtures("one_thread")
def test_c15_the_training_shows_another_order(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum of each rank's parts first, then by a ring, gives other weights on other ranks."""
    program = example()
    monkeypatch.setattr(program, "EPOCHS", 1)
    reduce = Communicator.allreduce

    def by_a_ring(coll: Communicator, *args: Any, **how: Any) -> Any:
        return reduce(coll, *args, **how, impl="ring") if how.get("across") else reduce(coll, *args, **how)

    monkeypatch.setattr(Communicator, "allreduce", by_a_ring)
    monkeypatch.setattr(aiodist, "init", lambda init=aiodist.init, **_: init())
    printed = set()
    for ranks in (1, 3):
        run_ranks(ranks, program.main)
        printed.add(capsys.readouterr().out)
    assert len(printed) == 2
