"""N17, N20: a sharded optimizer continues from a checkpoint on other ranks, as one process does, and as a plain one."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import Communicator
from aiodist.checkpoints import Piece
from aiodist.nn import DataParallel, ShardedOptimizer
from aiodist.testing import run_ranks


class Mixed(nn.Module):
    """Odd sizes, a number, an empty tensor, unused parameters, a convolution in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(113, 301)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Linear(7, 3)
        self.narrow = nn.Linear(301, 7, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.first(x)
        square = self.conv(seen[:, :75].reshape(-1, 3, 5, 5)).square().mean()
        loss: Tensor = self.narrow(seen.tanh().bfloat16()).float().square().mean() * self.scale + square
        return loss + self.none.sum()


def mixed(seed: int) -> Mixed:
    torch.manual_seed(seed)
    return Mixed()


def groups_of(module: nn.Module, name: str) -> list[dict[str, Any]]:
    """Return two groups, in another order than that of the module."""
    first, *others = module.parameters()
    groups: list[dict[str, Any]] = [{"params": others}, {"params": [first], "lr": 0.003 if name == "adamw" else 0.2}]
    return groups


async def trained(coll: Communicator, name: str, seed: int, *, plain: bool, steps: range) -> tuple[DataParallel, Any]:
    """Return a net and its optimizer behind some steps, in which all ranks have the same batch."""
    net = await DataParallel.create(mixed(seed), coll, bucket_bytes=20_000)
    groups = groups_of(net.module, name)
    opt: Any = (
        made(name, groups) if plain else await ShardedOptimizer.create(net, lambda given: made(name, given), groups)
    )
    await train(net, opt, steps)
    return net, opt


async def train(net: DataParallel, opt: Any, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 113, generator=torch.Generator().manual_seed(step))
        await net.step(net, opt, x)
    if isinstance(opt, ShardedOptimizer):
        await opt.flush()


def same_bits(seen: Any, expected: Any, path: str = "") -> None:
    """Compare two states: kinds, keys, dtypes, shapes and all bits."""
    if isinstance(expected, (dict, list)):
        pairs = [dict(enumerate(each)) if isinstance(each, list) else each for each in (seen, expected)]
        assert pairs[0].keys() == pairs[1].keys(), path
        for key, value in pairs[1].items():
            same_bits(pairs[0][key], value, f"{path}/{key}")
    elif isinstance(expected, Tensor):
        assert (seen.dtype, seen.shape) == (expected.dtype, expected.shape), path
        assert torch.equal(seen, expected), path
    else:
        assert (type(seen), seen) == (type(expected), expected), path


def states_of(opt: Any, parts: list[Any] | None = None) -> Any:
    """Return the state dict of a plain optimizer; of the pieces of all ranks that which one would have."""
    if parts is None:
        return opt.state_dict()
    first = parts[0]
    if isinstance(first, dict):
        return {key: states_of(opt, [part[key] for part in parts]) for key in first if key != "names"}
    if not isinstance(first, Piece):
        return first
    flat = torch.cat([part.tensor for part in sorted(parts, key=lambda part: (part.start, part.tensor.numel()))])
    return flat.view(first.shape) if first.dims is None else flat.view(first.shape).permute(first.dims)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("plain_saved", [True, False], ids=["plain to sharded", "sharded to plain"])
def test_n20_plain_and_sharded_optimizers_load_each_other(tmp_path: Path, name: str, plain_saved: bool) -> None:
    """4 ranks save; the other kind has the same state bit by bit, on 1, 2, 3 and 5 ranks, and continues."""

    async def whole(opt: Any, coll: Communicator) -> Any:
        if not isinstance(opt, ShardedOptimizer):
            state = deepcopy(opt.state_dict())
            state["state"] = {k: v for k, v in state["state"].items() if all(t.numel() for t in v.values())}
            return state
        return states_of(opt, await coll.allgather_object(opt.pieces()))

    async def save() -> tuple[Any, Any]:
        async with aiodist.init() as coll:
            net, opt = await trained(coll, name, 0, plain=plain_saved, steps=range(3))
            await aiodist.save(tmp_path / "runs", net, opt)
            saved = await whole(opt, coll)
            await train(net, opt, range(3, 5))
            return saved, deepcopy(net.state_dict())

    async def load() -> None:
        async with aiodist.init() as coll:
            net, opt = await trained(coll, name, 7, plain=not plain_saved, steps=range(50, 51))
            await aiodist.load(tmp_path / "runs", net, opt)
            same_bits(await whole(opt, coll), saved)
            await train(net, opt, range(3, 5))
            for key, value in net.state_dict().items():
                torch.testing.assert_close(
                    value, after[key], rtol=2e-2 if value.dtype is torch.bfloat16 else 2e-5, atol=1e-5
                )

    saved, after = run_ranks(4, save)[0]
    assert len(saved["state"]) == len(list(mixed(0).parameters())) - 3  # unused parameters have none
    for loaded_by in (1, 2, 3, 5):
        run_ranks(loaded_by, load)


def made(name: str, groups: Any) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=0.01)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


async def sharded(training: Any, coll: Communicator, name: str, seed: int) -> Any:
    net = await DataParallel.create(training.module(seed), coll)
    return training(net, await ShardedOptimizer.create(net, lambda groups: made(name, groups)))


@pytest.mark.thorough
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
            saving = aiodist.save(tmp_path / "runs", run.net, run.opt, metadata=4)
            assert losses + await run.steps(4, 7) == pytest.approx(expected["losses"], rel=1e-9)
            await saving

    async def load() -> None:
        async with aiodist.init() as coll:
            run = await sharded(training, coll, name, 7)
            await run.steps(50, 51)
            found = await aiodist.load(tmp_path / "runs", run.net, run.opt)
            assert (found.metadata, found.ranks) == (4, saved_by)
            assert await run.steps(4, 7) == pytest.approx(expected["losses"][4:], rel=1e-9)

    run_ranks(1, alone)
    run_ranks(saved_by, save)
    for loaded_by in (1, 2, 3, 5):
        run_ranks(loaded_by, load)
