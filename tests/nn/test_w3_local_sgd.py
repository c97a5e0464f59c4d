"""W3: `LocalSGD` continues with other ranks from its last average; checked against the formulas in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import PeerError
from aiodist.nn import DataParallel, Elastic, LocalSGD, SlowMo
from tests.support.elastic import build, bytes_of, share, survivors

pytestmark = pytest.mark.timeout(100)

STEPS, EVERY, SAMPLES = 33, 4, 12


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.02)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def plain(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@dataclass(frozen=True)
class Case:
    """How ranks train."""

    inner: Any
    options: dict[str, Any] = field(default_factory=dict)
    grows: bool = False
    scheduled: bool = False


CASES = {
    "plain": Case(momentum),
    "start": Case(adam, {"start": 9}),
    "overlap": Case(adam, {"overlap": True}, scheduled=True),
    "slowmo": Case(momentum, {"outer": SlowMo(0.5)}),
    "elastic": Case(adam, {"outer": Elastic(0.2)}),
    "diloco": Case(adam, {"outer": lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)}),
    "joined": Case(plain, {"start": 5, "overlap": True, "outer": SlowMo(0.3)}, grows=True),
}

Log = dict[int, tuple[int, list[int]]]
"""Number of steps before each generation, and its processes in order of rank."""


async def train(number: int, case: Case, log: Log) -> Any:
    module = build(0)
    inner = case.inner(module)
    settings: Any = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(inner, 0.95)} if case.scheduled else {}
    net: DataParallel | None = None
    async with aiodist.init(elastic=True) as coll:
        while True:
            try:
                if net is None:
                    net = await DataParallel.create(module, coll, LocalSGD, **settings)
                    local = await LocalSGD.create(net, inner, every=EVERY, **case.options)
                await net.rebind(coll, local)
                log[coll.generation] = local.steps, await coll.allgather_object(number)
                for step in range(local.steps, STEPS):
                    if case.grows and step > STEPS // 2 and coll.size < 4:
                        await local.flush()
                        coll = await coll.grow(4 - coll.size)
                        break
                    await net.step(partial(share, net, step, coll.rank, coll.size), local)
                else:
                    await local.flush()
                    await coll.barrier()
                    return bytes_of(module), local.steps, module
            except PeerError:
                coll = await coll.shrink()


class Replay:
    """The formulas, for one generation after another; the ranks are modules in a list."""

    def __init__(self, case: Case) -> None:
        self.options = case.options
        self.inner = case.inner
        self.scheduled = case.scheduled
        self.centre = [p.detach().clone() for p in build(0).parameters()]
        self.states: dict[int, Any] = {}
        self.slow = [torch.zeros_like(p) for p in self.centre]
        self.outer: Any = None
        if callable(outer := case.options.get("outer")):
            self.outer = outer([nn.Parameter(p) for p in self.centre])

    def run(self, members: list[int], first: int, last: int, *, ends: bool) -> None:  # noqa: C901 - one for each case
        modules = [build(0) for _ in members]
        opts = [self.inner(module) for module in modules]
        for number, module, opt in zip(members, modules, opts, strict=True):
            self.put(module, self.centre)
            if number in self.states:
                opt.load_state_dict(self.states[number])
        local, waiting = 0, None
        for step in range(first, last):
            for rank, (module, opt) in enumerate(zip(modules, opts, strict=True)):
                opt.zero_grad()
                share(module, step, rank, len(members)).backward()
            if step < self.options.get("start", 0):
                for group in zip(*(module.parameters() for module in modules), strict=True):
                    mean = sum(p.grad for p in group) / len(group)
                    for p in group:
                        p.grad = mean.clone()
            for opt in opts:
                if self.scheduled:
                    opt.param_groups[0]["lr"] = opt.defaults["lr"] * 0.95**step
                opt.step()
            if step < self.options.get("start", 0):
                self.centre = [p.detach().clone() for p in modules[0].parameters()]
                continue
            local += 1
            if local % EVERY and not (ends and step == last - 1):
                continue
            if waiting is not None:
                self.settle(modules, *waiting)
            sent = [[p.detach().clone() for p in module.parameters()] for module in modules]
            waiting = sent, self.mean(sent)
            if not self.options.get("overlap"):
                self.settle(modules, *waiting)
                waiting = None
        if waiting is not None:
            self.settle(modules, *waiting)
        self.states = {number: copy.deepcopy(opt.state_dict()) for number, opt in zip(members, opts, strict=True)}

    def mean(self, sent: list[list[Tensor]]) -> list[Tensor]:
        """Return centre minus average, or for elastic averaging by how much the centre moves."""
        away = [[c - p for c, p in zip(self.centre, params, strict=True)] for params in sent]
        scale = 1.0 if not isinstance(self.options.get("outer"), Elastic) else self.options["outer"].alpha * len(sent)
        return [sum(each) / len(sent) * scale for each in zip(*away, strict=True)]

    def settle(self, modules: list[nn.Module], sent: list[list[Tensor]], mean: list[Tensor]) -> None:
        outer: Any = self.options.get("outer")
        elastic = isinstance(outer, Elastic)
        before = self.centre
        if isinstance(outer, SlowMo):
            rate = 0.1
            self.slow = [outer.momentum * u + g / rate for u, g in zip(self.slow, mean, strict=True)]
            self.centre = [c - outer.lr * rate * u for c, u in zip(before, self.slow, strict=True)]
        elif self.outer is not None:
            held = self.outer.param_groups[0]["params"]
            for p, c, g in zip(held, before, mean, strict=True):
                p.data.copy_(c)
                p.grad = g.clone()
            self.outer.step()
            self.centre = [p.detach().clone() for p in held]
        else:
            self.centre = [c - g for c, g in zip(before, mean, strict=True)]
        for module, params in zip(modules, sent, strict=True):
            for p, at, c, new in zip(module.parameters(), params, before, self.centre, strict=True):
                with torch.no_grad():
                    p.copy_(p + outer.alpha * (c - at) if elastic else new + (p - at))

    @staticmethod
    def put(module: nn.Module, values: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(module.parameters(), values, strict=True):
                p.copy_(value)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("case", CASES)
def test_w3_local_steps_go_on_from_the_last_average(case: str, size: int, seed: int) -> None:
    """One or two ranks are killed at any moment: what was made since the last average is made again by the others."""
    log: Log = {}
    drawn = f"{case} {size} {seed}"
    said = survivors(size, lambda number: train(number, CASES[case], log), seed, within=900, drawn=drawn, dead=size - 2)
    held, steps, modules = zip(*said, strict=True)
    assert len(said) >= 2
    assert set(steps) == {STEPS}
    assert all(each == held[0] for each in held), "bit by bit the same on all ranks"
    replay = Replay(CASES[case])
    worlds = [log[generation] for generation in sorted(log)]
    for (first, members), (last, _) in zip(worlds, [*worlds[1:], (STEPS, [])], strict=True):
        grown = CASES[case].grows and last > STEPS // 2
        replay.run(members, first, last, ends=last == STEPS or grown)
    for p, expected in zip(modules[0].parameters(), replay.centre, strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-9, atol=1e-11)
