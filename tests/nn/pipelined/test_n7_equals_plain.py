"""N7: for any model and optimizer, the results of pipelined steps are those of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized
from tests.nn.pipelined.conftest import Course, Make


class Tied(nn.Module):
    """The embedding is the output matrix too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.inner(self.embed(_words(x))), self.embed.weight)


class TiedTheOtherWay(nn.Module):
    """The output matrix is the embedding too, and is read before the module that owns it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(F.embedding(_words(x), self.head.weight)))  # type: ignore[no-any-return]


class TiedModules(nn.Module):
    """Two modules have one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(_words(x))))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """`out_proj` is read, and never called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        seen = x.view(-1, 1, 4).expand(-1, 3, 4) * torch.arange(1.0, 4.0, dtype=x.dtype)[:, None]
        return self.out(self.attention(seen, seen, seen, need_weights=False)[0])  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.view(-1, 2, 2).repeat(1, 1, 2))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """One module is called twice, one parameter belongs to the root, one list has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.list = nn.ParameterList([torch.rand(4, 4), torch.rand(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(torch.tanh(self.first(x)))
        return torch.tanh(x @ self.list[0] + self.list[1]) * self.scale


class Branches(nn.Module):
    """What is used depends on the data: something different on each rank and in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.branches = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x[0, 0].item() * 1000) % 3
        return self.branches[chosen](torch.tanh(self.first(x)))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """Layers that run once more in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.last = nn.Linear(4, 2)
        self.reentrant = reentrant

    # The random state is the process's: while one rank put it back, another one would build its model from it.
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.inner, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return self.last(x)  # type: ignore[no-any-return]


def pruned() -> nn.Module:
    """Hooks of the modules themselves read the parameters before their forward."""
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    for i in (0, 2):
        prune.custom_from_mask(layers[i], "weight", torch.rand_like(layers[i].get_parameter("weight")) > 0.3)
    return layers


def parametrized() -> nn.Module:
    """Modules below the layers make their weights."""
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    nn.utils.parametrizations.weight_norm(layers[0])
    nn.utils.parametrizations.weight_norm(layers[2], dim=1)
    return layers


def frozen() -> nn.Module:
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    layers[2].requires_grad_(False)
    return layers


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3), nn.LayerNorm(3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "tied the other way": TiedTheOtherWay,
    "tied modules": TiedModules,
    "attention": Attention,
    "transformer": Transformer,
    "twice": Twice,
    "branches": Branches,
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed reentrantly": lambda: Checkpointed(True),
    "pruned": pruned,
    "parametrized": parametrized,
    "frozen": frozen,
    "normed": normed,
}


def _words(x: Tensor) -> Tensor:
    return (x * 1000).long().abs() % 6


def build(kind: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[kind]().double()


def decayed(module: nn.Module) -> Make:
    """Return what makes an AdamW with groups by the identity of the parameters."""
    biases = {p for p in module.parameters() if p.dim() < 2}

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [p for p in params if p not in biases], "weight_decay": 0.1},
            {"params": [p for p in params if p in biases], "weight_decay": 0.0, "lr": 0.003},
        ]
        return torch.optim.AdamW(groups, lr=0.02)

    return make


@pytest.mark.drawn(5)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("kind", MODELS)
async def test_n7_equals_the_plain_loop(coll: Communicator, kind: str, bucket_bytes: int) -> None:
    net = await Course.split(build(kind), coll, bucket_bytes)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    await Course.train(net, opt, coll, held=Course.hold(net))
    Course.check(net.module, build(kind), coll.size)
    await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("how", ["sgd", "adam", "adamw"])
async def test_n7_equals_the_plain_loop_with_each_optimizer(coll: Communicator, how: str) -> None:
    await _with(coll, how)


@pytest.mark.thorough
@pytest.mark.ranks(2, backend="mpi")
async def test_n7_equals_the_plain_loop_on_processes(coll: Communicator) -> None:
    await _with(coll, "adamw")


async def _with(coll: Communicator, how: str) -> None:
    def maker(module: nn.Module) -> Make:
        return {"sgd": Course.sgd, "adam": Course.adam, "adamw": decayed(module)}[how]

    net = await DataParallel.create(build("transformer"), coll, bucket_bytes=300, first_bucket_bytes=1)
    opt = await PipelinedOptimizer.create(net, maker(net.module))
    assert len(opt.optimizers) > 2
    await Course.train(net, opt, coll)
    expected = build("transformer")
    Course.check(net.module, expected, coll.size, make=maker(expected))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_n7_an_optimizer_made_later_and_the_sum(coll: Communicator, op: Literal["mean", "sum"]) -> None:
    """Plain steps come first, so the buckets are rebuilt before the pipelined optimizer is made."""
    net = await DataParallel.create(Course.mlp(), coll, op=op, bucket_bytes=100, first_bucket_bytes=1)
    plain = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(2):
        await net.step(Course.loss_of, plain, net, coll.rank, step)
    opt = await PipelinedOptimizer.create(net, lambda params: torch.optim.SGD(params, lr=0.05))
    await Course.train(net, opt, coll, range(2, 5), Course.hold(net))
    lr = 0.05 * (coll.size if op == "sum" else 1)
    Course.check(net.module, Course.mlp(), coll.size, range(5), lambda params: torch.optim.SGD(params, lr=lr))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["normed", "branches"])
async def test_n7_clipping_by_the_global_norm(coll: Communicator, kind: str) -> None:
    net = await Course.split(build(kind), coll)
    net.configure(clip_norm=0.01)
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    await Course.train(net, opt, coll, held=Course.hold(net))
    Course.same(net.module, Course.reference(build(kind), None, coll.size, clip=0.01))
    with pytest.raises(ValueError, match="clip_norm=0"):
        net.configure(clip_norm=0)


@pytest.mark.thorough
@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler ignores it, on one thread at a time
@pytest.mark.parametrize("way", ["module", "layer", "forward"])
async def test_n7_compiled_code(coll: Communicator, way: str) -> None:
    """The wrapped module, one of its layers, or the forward is compiled: no hook runs in compiled code."""
    module: Any = Course.mlp()
    if way == "module":
        module = torch.compile(module, backend="eager")
    elif way == "layer":
        module[2] = torch.compile(module[2], backend="eager")
    net = await Course.split(module, coll)
    call: Any = torch.compile(module, backend="eager") if way == "forward" else net
    opt = await PipelinedOptimizer.create(net, Course.sgd)
    await Course.train(net, opt, coll, held=Course.hold(net), call=call)
    expected = Course.reference(Course.mlp(), None, coll.size)
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
