"""N17: parts of other kinds than those that were saved are errors before anything has changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, SequentialLR, StepLR

import aiodist
from aiodist import Communicator, codecs
from aiodist.data import IndexShards, ShardQueue
from aiodist.nn import DataParallel, LocalSGD, PipelinedOptimizer, ShardedOptimizer, SlowMo
from tests.support.awaited import awaited

Parts = list[Any]
Make = Callable[[DataParallel], Parts]


class MyAdam(Adam):
    """Another kind than Adam."""


class NamedAdam(Adam):
    """One that keeps what Adam keeps."""

    checkpoint_kind = "Adam"


def adam(net: DataParallel, kind: type[Any] = Adam) -> Any:
    return kind(net.parameters(), lr=0.01)


def schedules(net: DataParallel, *kinds: Callable[[Any], Any]) -> Parts:
    opt = adam(net)
    return [SequentialLR(opt, [kind(opt) for kind in kinds], [2])]


def constant(opt: Any) -> Any:
    return ConstantLR(opt)


def cosine(opt: Any) -> Any:
    return CosineAnnealingLR(opt, 9)


def step(opt: Any) -> Any:
    return StepLR(opt, 2)


def scaler(_: DataParallel) -> Any:
    return torch.amp.GradScaler("cpu")


def linear(inputs: int) -> nn.Module:
    """Return one that all ranks have alike."""
    module = nn.Linear(inputs, 1).requires_grad_(False)
    for p in module.parameters():
        p.fill_(0.5)
    return module


SAVED: list[tuple[str, Make, Make, str]] = [
    ("order", lambda n: [o := adam(n), step(o)], lambda n: [step(o := adam(n)), o], "part1 is StepLR, .* has Adam"),
    ("class", lambda n: [adam(n)], lambda n: [adam(n, SGD)], "part1 is SGD, .* has Adam"),
    ("subclass", lambda n: [adam(n)], lambda n: [adam(n, MyAdam)], "part1 is MyAdam, .* has Adam"),
    ("torch's own subclass", lambda n: [adam(n, AdamW)], lambda n: [adam(n)], "part1 is Adam, .* has AdamW"),
    ("scheduler", lambda n: [step(adam(n))], lambda n: [cosine(adam(n))], "CosineAnnealingLR, .* has StepLR"),
    (
        "schedulers within",
        lambda n: schedules(n, constant, cosine),
        lambda n: schedules(n, step, cosine),
        "SequentialLR of StepLR, CosineAnnealingLR, .* has SequentialLR of ConstantLR, CosineAnnealingLR",
    ),
    ("scaler", lambda n: [scaler(n), adam(n)], lambda n: [adam(n), scaler(n)], "part1 is Adam, .* has GradScaler"),
    ("sharded", lambda n: [ShardedOptimizer.create(n, Adam)], lambda n: [adam(n, SGD)], "part1 is SGD, .* has Adam"),
    (
        "pipelined",
        lambda n: [PipelinedOptimizer.create(n, Adam)],
        lambda n: [PipelinedOptimizer.create(n, SGD)],
        "PipelinedOptimizer of SGD, .* has PipelinedOptimizer of Adam",
    ),
    (
        "local",
        lambda n: [LocalSGD.create(n, adam(n), every=2)],
        lambda n: [LocalSGD.create(n, adam(n, SGD), every=2)],
        "LocalSGD of SGD, .* has LocalSGD of Adam",
    ),
    (
        "outer",
        lambda n: [LocalSGD.create(n, adam(n), every=2, outer=SlowMo(momentum=0.5))],
        lambda n: [LocalSGD.create(n, adam(n), every=2, outer=lambda ps: SGD(ps, lr=0.7))],
        "part1 is LocalSGD of Adam, SGD, .* has LocalSGD of Adam,",
    ),
    ("module", lambda _: [linear(2)], lambda n: [adam(n)], "part1 is Adam, .* has module"),
    ("shapes", lambda _: [linear(2)], lambda _: [linear(3)], r"part1: 'weight' has shape \[1, 2\]"),
    ("names", lambda _: [linear(2)], lambda _: [nn.Bilinear(2, 1, 1, bias=False)], "part1: .* has 'bias'"),
    (
        "parameters",
        lambda n: [adam(n)],
        lambda n: [Adam([{"params": p} for p in n.parameters()])],
        r"part1: the checkpoint has groups of \[2\] parameters: expected \[1, 1\]",
    ),
]


async def a_net(coll: Communicator, compress: Any = None) -> DataParallel:
    torch.manual_seed(0)
    return await DataParallel.create(nn.Linear(2, 1), coll, compress=compress)


@pytest.mark.drawn(9)
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("saved", "loaded", "seen"), [each[1:] for each in SAVED], ids=[each[0] for each in SAVED])
async def test_n17_parts_of_other_kinds_change_nothing(
    coll: Communicator, saved: Make, loaded: Make, seen: str, tmp_path: Path
) -> None:
    path = Path(await coll.broadcast_object(str(tmp_path)))
    async with await a_net(coll) as net:
        await aiodist.save(path, net, *[await awaited(each) for each in saved(net)])
    async with await a_net(coll) as net:
        parts = [await awaited(each) for each in loaded(net)]
        with torch.no_grad():
            net.module.weight.add_(1.0)  # type: ignore[operator]
        before = {name: t.clone() for name, t in net.state_dict().items()}
        with pytest.raises(ValueError, match=seen) as raised:
            await aiodist.load(path, net, *parts)
        assert not isinstance(raised.value, aiodist.errors.CheckpointDamaged)
        assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())


class Averaged:
    """Averaged weights with a module in it, whose state is more than the module's."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module)
        self.updates = 0

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["module"])
        self.updates = state["updates"]


def divided(net: DataParallel) -> Any:
    """Return an optimizer of a group for each parameter that takes the state of one group."""

    def divide(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        (group,) = state["param_groups"]
        return {**state, "param_groups": [{**group, "params": [number]} for number in group["params"]]}

    opt = Adam([{"params": p} for p in net.parameters()])
    opt.register_load_state_dict_pre_hook(divide)
    return opt


def extended() -> nn.Module:
    """Return a module that has one layer more than `nn.Sequential(linear(2))`, and allows it."""
    module = nn.Sequential(linear(2), linear(1))
    module.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())
    return module


def chained(net: DataParallel, several: type[Any]) -> Parts:
    opt = adam(net)
    return [opt, ChainedScheduler(several([step(opt), constant(opt)]), optimizer=opt)]


SAME: list[tuple[str, Make, Make]] = [
    ("a subclass that says so", lambda n: [adam(n)], lambda n: [adam(n, NamedAdam)]),
    ("sharded", lambda n: [ShardedOptimizer.create(n, Adam)], lambda n: [adam(n)]),
    ("modules", lambda _: [linear(2)], lambda _: [nn.utils.skip_init(nn.Linear, 2, 1)]),
    ("averaged weights", lambda n: [Averaged(n.module)], lambda n: [Averaged(n.module)]),
    ("hook of an optimizer", lambda n: [adam(n)], lambda n: [divided(n)]),
    ("hook of a module", lambda _: [nn.Sequential(linear(2))], lambda _: [extended()]),
    ("schedulers", lambda n: chained(n, list), lambda n: chained(n, tuple)),
]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("saved", "loaded"), [each[1:] for each in SAME], ids=[each[0] for each in SAME])
async def test_n17_what_is_of_one_kind_loads(coll: Communicator, saved: Make, loaded: Make, tmp_path: Path) -> None:
    path = Path(await coll.broadcast_object(str(tmp_path)))
    async with await a_net(coll) as net:
        parts = [await awaited(each) for each in saved(net)]
        if hasattr(parts[0], "step"):
            await net.step(lambda: net(torch.ones(2)).sum(), parts[0])
        await aiodist.save(path, net, *parts)
    async with await a_net(coll) as net:
        await aiodist.load(path, net, *[await awaited(each) for each in loaded(net)])
    await aiodist.load(path, nn.Linear(2, 1), *loaded(net), coll=coll)  # a plain module in the net's place


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("saved", "loaded", "seen"),
    [
        ([torch.Generator()], [random.Random(1)], r"per_rank\[0\] is random.Random, .* has Generator"),
        ([np.random.default_rng(1)], [np.random.Generator(np.random.MT19937(1))], "MT19937, .* has .* of PCG64"),
        ([np.random.RandomState(1)], [np.random.default_rng(1)], "Generator of PCG64, .* has .*RandomState of MT19937"),
    ],
)
async def test_n17_own_objects_of_other_kinds_change_nothing(
    coll: Communicator, saved: Sequence[Any], loaded: Sequence[Any], seen: str, tmp_path: Path
) -> None:
    async with await a_net(coll) as net:
        await aiodist.save(tmp_path, net, per_rank=saved)
        before = net.module.weight.clone()  # type: ignore[operator]
        with torch.no_grad():
            net.module.weight.add_(1.0)  # type: ignore[operator]
        with pytest.raises(ValueError, match=seen):
            await aiodist.load(tmp_path, net, per_rank=loaded)
        assert torch.equal(net.module.weight, before + 1.0)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
async def test_n17_residuals_of_another_codec_change_nothing(coll: Communicator, tmp_path: Path) -> None:
    path = Path(await coll.broadcast_object(str(tmp_path)))
    async with await a_net(coll, codecs.TopK(0.5)) as net:
        await aiodist.save(path, net)
    async with await a_net(coll, codecs.Int8()) as net:
        with pytest.raises(ValueError, match=r"compress=Int8, and the residuals of the checkpoint are of TopK"):
            await aiodist.load(path, net)


@pytest.mark.ranks(1)
async def test_n17_a_queue_is_no_loader(coll: Communicator, tmp_path: Path) -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError(state)

    async with await a_net(coll) as net:
        queue = ShardQueue(IndexShards(9), coll)
        await aiodist.save(tmp_path, net, per_rank=[queue])
        with pytest.raises(ValueError, match=r"per_rank\[0\] is Loader, and the checkpoint has ShardQueue"):
            await aiodist.load(tmp_path, net, per_rank=[Loader()])
