"""N20: the results of sharded steps are those of a plain loop, with a p-th of its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aiodist import Communicator
from aiodist.nn import BlockSequential, DataParallel, ShardedOptimizer, assert_synchronized
from tests.nn.conftest import Trial

SIZES: dict[str, dict[str, Any]] = {
    "each": Trial.SMALL,
    "some": Trial.FEW,
    "one": {},
}
each_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3, 4, 5)
@each_size
@pytest.mark.parametrize("how", ["sgd", "momentum", "adam"])
async def test_n20_equals_the_plain_loop(coll: Communicator, how: str, sizes: Any) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **sizes)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS[how])
    for step in range(5):
        loss = await net.step(Trial.loss, opt, net, coll.rank, step)
        assert not loss.requires_grad
        assert all(parameter.grad is None for parameter in net.parameters())
    await opt.flush()
    Trial.assert_same(net, Trial.alone(coll.size, 5, optimizer=how))
    await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3)
async def test_n20_the_sum(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, op="sum", **SIZES["some"])
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["momentum"])
    await Trial.train(net, opt, range(4), coll.rank)
    await opt.flush()
    Trial.assert_same(net, Trial.alone(coll.size, 4, optimizer="momentum", op="sum"))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["mean", "sum"])
async def test_n20_bit_equal_where_the_order_of_sums_is_the_same(
    coll: Communicator, op: Literal["mean", "sum"], dtype: torch.dtype
) -> None:
    """Two ranks: a + b is b + a; and SGD computes each element alike wherever it lies."""

    def loss(net: DataParallel, step: int) -> Tensor:
        x, y = Trial.batch(coll.rank, step, dtype)
        return F.mse_loss(net(x), y)

    plain = await DataParallel.create(Trial.Mlp().to(dtype), coll, op=op)
    sharded = await DataParallel.create(Trial.Mlp().to(dtype), coll, op=op)
    opt = Trial.OPTIMIZERS["momentum"](plain.parameters())
    ours_opt = await ShardedOptimizer.create(sharded, Trial.OPTIMIZERS["momentum"])
    for step in range(4):
        expected = await plain.step(loss, opt, plain, step)
        assert torch.equal(await sharded.step(loss, ours_opt, sharded, step), expected)
    await ours_opt.flush()
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Tied(nn.Module):
    """Two modules have one parameter, and one reads that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.second.weight = self.first.weight
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.out(F.linear(x, self.last.weight) + self.last(x))  # type: ignore[no-any-return]


class Branches(nn.Module):
    """What is used depends on the data, by rank and step; one part never is, and one has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(6, 5) for _ in range(3)])
        self.never = nn.Linear(4, 4)
        self.empty = nn.Parameter(torch.empty(0))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = int(x[0, 0].item() * 1000) % 3
        return self.out(torch.tanh(self.branches[chosen](x)) * self.scale) + self.empty.sum()  # type: ignore[no-any-return]


class Mixed(nn.Module):
    """Two dtypes, and parts that are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, 3).to(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(torch.tanh(self.first(x))).float()).double()  # type: ignore[no-any-return]

    def double(self) -> Mixed:
        self.first.double()
        self.frozen.double()
        return self


class Images(nn.Module):
    """Weights in another order of memory than that of their dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.out = nn.Linear(4 * 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.conv(x.view(-1, 1, 2, 3).expand(-1, 2, -1, -1))).flatten(1).repeat(1, 1))  # type: ignore[no-any-return]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "branches": Branches,
    "mixed": Mixed,
    "images": Images,
    "blocks": lambda: BlockSequential([nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)], 3),
    "normed": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3)),
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(7)
    return MODULES[kind]().double()


@pytest.mark.drawn(4)
@pytest.mark.ranks(1, 2, 3)
@each_size
@pytest.mark.parametrize("kind", MODULES)
async def test_n20_modules(coll: Communicator, kind: str, sizes: Any) -> None:
    """Adam counts the steps of each parameter: one that no rank has used is left alone."""
    net = await DataParallel.create(build(kind), coll, **sizes)
    strides = [parameter.stride() for parameter in net.parameters()]
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["adam"])
    await Trial.train(net, opt, range(6), coll.rank)
    await opt.flush()
    expected = Trial.alone(coll.size, 6, make=lambda: build(kind), optimizer="adam")
    rtol = 1e-4 if kind == "mixed" else 1e-6  # of its float32
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 1000)
    assert strides == [parameter.stride() for parameter in net.parameters()]


@pytest.mark.drawn(2)
@pytest.mark.ranks(2, 3)
@each_size
async def test_n20_freezing_and_thawing(coll: Communicator, sizes: Any) -> None:
    def freeze(module: nn.Module, step: int) -> None:
        module.get_submodule("2").requires_grad_(step not in (2, 3))
        module.get_submodule("0").requires_grad_(step != 3)

    net = await DataParallel.create(Trial.Mlp(), coll, **sizes)
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["adam"])
    expected = Trial.Mlp()
    plain = Trial.OPTIMIZERS["adam"](expected.parameters())
    for step in range(6):
        freeze(net.module, step)
        freeze(expected, step)
        await net.step(Trial.loss, opt, net, coll.rank, step)
        Trial.step_alone(expected, plain, coll.size, step)
    await opt.flush()
    Trial.assert_same(net, expected)


def decayed(module: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in module.named_parameters() if p.dim() < 2], "lr": 0.003},
    ]


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 4)
@each_size
async def test_n20_parameter_groups(coll: Communicator, sizes: Any) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll, **sizes)
    opt = await ShardedOptimizer.create(net, lambda groups: torch.optim.AdamW(groups, lr=0.02), decayed(net.module))
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.01]
    await Trial.train(net, opt, range(4), coll.rank)
    await opt.flush()

    def plain(params: Any) -> torch.optim.Optimizer:
        module = nn.ParameterList(params)
        groups = [
            {**group, "params": [x[-1] if isinstance(x, tuple) else x for x in group["params"]]}
            for group in decayed(module)
        ]
        return torch.optim.AdamW(groups, lr=0.02)

    Trial.assert_same(net, Trial.alone(coll.size, 4, optimizer=plain))


@pytest.mark.ranks(2)
async def test_n20_parameters_of_no_group_stay_as_they_are(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    before = Trial.Mlp()
    opt = await ShardedOptimizer.create(net, Trial.OPTIMIZERS["sgd"], net.module.get_submodule("2").parameters())
    await net.step(Trial.loss, opt, net, coll.rank, 0)
    await opt.flush()
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before.get_parameter(name)) == (not name.startswith("2."))


def state_bytes(opt: torch.optim.Optimizer) -> int:
    return sum(x.nbytes for state in opt.state.values() for x in state.values() if isinstance(x, Tensor))


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3, 5)
@each_size
async def test_n20_each_rank_has_a_pth_of_the_state(coll: Communicator, sizes: Any) -> None:
    def make() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(6, 101), nn.Tanh(), nn.Linear(101, 103), nn.Tanh(), nn.Linear(103, 3)).double()

    net = await DataParallel.create(make(), coll, **sizes)
    opt = await ShardedOptimizer.create(net, torch.optim.Adam)
    await net.step(Trial.loss, opt, net, coll.rank, 0)
    await opt.flush()
    expected = make()
    plain = torch.optim.Adam(expected.parameters())
    Trial.joined(expected, coll.size, 0).backward()
    plain.step()
    assert 0 < state_bytes(opt.optimizer) <= 1.05 * state_bytes(plain) / coll.size
