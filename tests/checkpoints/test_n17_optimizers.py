"""N17: torch's optimizers and learning rate schedules continue bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import aiodist
from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer
from aiodist.testing import run_ranks
from tests.checkpoints.conftest import assert_same

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{
        name: getattr(torch.optim, name)
        for name in ("Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")
    },
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.5),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.02), amsgrad=True),
    "groups": lambda params: torch.optim.Adam([{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(params)]),
}
SCHEDULES: list[Callable[[Any], Any]] = [
    lambda opt: lr_scheduler.OneCycleLR(opt, 0.3, 20, cycle_momentum=False),
    lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 0.9**epoch),
    lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.ConstantLR(opt, 0.5, 2), lr_scheduler.ExponentialLR(opt, 0.8)], milestones=[2]
    ),
]


@pytest.mark.drawn(8)
@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
async def test_n17_optimizers_and_schedules_of_torch_go_on(
    coll: Communicator, training: Any, tmp_path: Path, name: str
) -> None:
    x = torch.randn(4, 110, dtype=torch.float64)

    def steps(net: nn.Module, opt: torch.optim.Optimizer, schedule: Any, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            opt.zero_grad()
            loss = net(x).square().sum()
            loss.backward()
            opt.step()
            if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                schedule.step(loss.item())
            else:
                schedule.step()
            losses.append(loss.item())
        return losses

    make = random.choice(SCHEDULES)
    first, second = training.module(), training.module(seed=9)
    opt = OPTIMIZERS[name](list(first.parameters()))
    schedule = make(opt)
    steps(first, opt, schedule, 3)
    await aiodist.save(tmp_path, first, opt, schedule, coll=coll)
    expected = steps(first, opt, schedule, 4)
    opt = OPTIMIZERS[name](list(second.parameters()))
    schedule = make(opt)
    steps(second, opt, schedule, 1)
    await aiodist.load(tmp_path, second, opt, schedule, coll=coll)
    assert steps(second, opt, schedule, 4) == expected


class WideMomentum(torch.optim.Optimizer):
    """Keeps its momentum in float64, with parameters of any dtype."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.float64))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_((group["lr"] * momentum).to(p.dtype))


class Mixed(nn.Module):
    """Parameters of several dtypes: one without elements, a scalar, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 7)
        self.coarse = nn.Parameter(torch.randn(7).half())
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.narrow = nn.Parameter(torch.randn(7).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.first(x).tanh() * self.coarse.float()) * self.scale
        y: Tensor = self.last(x + self.narrow.float() + self.empty.sum())
        return y


PIPELINED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-3, amsgrad=True),
    "groups": lambda params: torch.optim.Adam(
        [{"params": [p], "lr": 0.01 * (1 + p.dim()), "eps": 1e-3} for p in reversed(params)]
    ),
    "wide": WideMomentum,
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", PIPELINED)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "bucket_bytes"),
    [(1, 1, 100), (2, 2, 100), (3, 3, 100), (2, 2, 1), (2, 2, 1 << 20), (1, 2, 150), (2, 1, 100), (2, 3, 100)],
)
def test_n17_pipelined_optimizers_go_on_whatever_their_buckets(
    tmp_path: Path, name: str, saved_by: int, loaded_by: int, bucket_bytes: int
) -> None:
    async def make(coll: Communicator, seed: int, nbytes: int) -> tuple[DataParallel, PipelinedOptimizer]:
        torch.manual_seed(seed)
        net = await DataParallel.create(Mixed(), coll, bucket_bytes=nbytes, first_bucket_bytes=nbytes)
        return net, await PipelinedOptimizer.create(net, PIPELINED[name])

    async def steps(net: DataParallel, opt: PipelinedOptimizer, first: int, last: int) -> None:
        for i in range(first, last):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(i))
            await net.step(lambda x=x: net(x).square().mean(), opt)

    def state(net: DataParallel, opt: PipelinedOptimizer) -> dict[str, Tensor]:
        found = {key: t.clone() for key, t in net.state_dict().items()}
        kept = {number: values for one in opt.state_dict() for number, values in one["state"].items()}
        return found | {f"{n} {key}": t.clone() for n, values in kept.items() for key, t in values.items()}

    async def save() -> dict[str, Tensor]:
        async with aiodist.init() as coll:
            net, opt = await make(coll, 0, 100)
            assert len(opt.optimizers) > 3
            await steps(net, opt, 0, 3)
            saving = aiodist.save(tmp_path, net, opt)  # the last updates are made by it
            await steps(net, opt, 3, 6)
            await saving
            await opt.flush()
            return state(net, opt)

    async def load() -> dict[str, Tensor]:
        async with aiodist.init() as coll:
            net, opt = await make(coll, 9, bucket_bytes)
            await steps(net, opt, 50, 51)
            await aiodist.load(tmp_path, net, opt)
            await steps(net, opt, 3, 6)
            await opt.flush()
            return state(net, opt)

    expected = run_ranks(saved_by, save)[0]
    rounds = loaded_by != saved_by and 3 in (loaded_by, saved_by)  # the mean of gradients
    for seen in run_ranks(loaded_by, load):
        if rounds:
            torch.testing.assert_close(seen, expected, rtol=2e-2, atol=1e-2)
        else:
            assert_same(seen, expected)
