"""N17: torch's optimizers and learning rate schedules go on bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import aiodist
from aiodist import Communicator

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
