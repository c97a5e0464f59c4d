"""N3: a backward outside the net raises immediately, for any part of the module it runs through."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist import Communicator
from aiodist.nn import DataParallel, PipelinedOptimizer, assert_synchronized
from aiodist.testing.seams.progress import reducer_of
from tests.nn.conftest import Trial

OUTSIDE = r"got a gradient outside of net\.step and net\.backward.*net\.no_sync.*requires_grad_\(False\)"
SIZES: list[dict[str, Any]] = [Trial.SMALL, {}]
each_size = pytest.mark.parametrize("sizes", SIZES, ids=["each", "one"])


class Own(nn.Module):
    """A parameter of its own next to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.scale
        return out


class Bent(nn.Linear):
    """A layer that has more parameters than others."""

    def __init__(self, bends: int) -> None:
        super().__init__(6, 6)
        self.bends = [nn.Parameter(torch.ones(6)) for _ in range(bends)]
        for number, bend in enumerate(self.bends):
            self.register_parameter(f"bend{number}", bend)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for bend in self.bends:
            x = x * bend
        return x


class Model(nn.Module):
    """Parts of all kinds; `again` is `body`, the very module, and `tied` has its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = nn.Linear(6, 6)
        self.parts = nn.ModuleDict({"body": self.again, "head": nn.Linear(6, 6)})
        self.own = Own()
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.again.weight
        self.deep = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)))
        self.raw = nn.ParameterList([torch.ones(6), torch.ones(6)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.ways():
            x = torch.tanh(part(x))
        return x

    def ways(self) -> list[Any]:
        inner = self.deep.get_submodule("0.1")
        return [*self.parts.values(), self.own, self.again, self.tied, inner, self.deep, self.times_raw]

    def times_raw(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.raw[0] * self.raw[1]
        return out


def loss_of(module: Any, rank: int, step: int) -> Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))
    out: Tensor = module(x)
    return out.square().mean()


def check_all_told(model: Model) -> None:
    for part in model.ways():
        with pytest.raises(RuntimeError, match=OUTSIDE):
            part(torch.ones(2, 6)).sum().backward()


@pytest.mark.ranks(2)
@each_size
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n3_a_backward_outside_is_told_for_every_part(
    coll: Communicator, sizes: dict[str, Any], pipelined: bool
) -> None:
    net = await DataParallel.create(Model(), coll, **sizes)
    opt: Any = (
        await PipelinedOptimizer.create(net, lambda params: torch.optim.SGD(params, lr=0.1))
        if pipelined
        else torch.optim.SGD(net.parameters(), lr=0.1)
    )
    model: Any = net.module
    for step in range(3):
        if pipelined:
            await opt.flush()
        check_all_told(model)
        with net.no_sync():
            for part in model.ways():
                part(torch.ones(2, 6)).sum().backward()
        net.zero_grad()
        await net.step(partial(loss_of, net, coll.rank, step), opt)
    if pipelined:
        await opt.flush()
    await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.ranks(2)
@each_size
async def test_n3_what_is_frozen_does_not_hide_a_backward_outside(coll: Communicator, sizes: dict[str, Any]) -> None:
    """A trained parameter reports the backward, whichever is trained, after a step or a call of the net."""
    net = await DataParallel.create(Model(), coll, **sizes)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    model: Any = net.module
    names = [name for name, _ in model.named_parameters()]
    for step in range(4):
        # Freeze the first parameter of each module with several, then all others, then none.
        for name in names:
            first = name.endswith(("weight", ".0", "own.scale"))
            model.get_parameter(name).requires_grad_(step == 3 or first == (step == 2))
        trained = [p for p in model.parameters() if p.requires_grad]
        assert trained
        if step % 2:
            net(torch.ones(2, 6))
        else:
            await net.step(partial(loss_of, net, coll.rank, step), opt)
        check_trained_told(model)
        net.zero_grad()


def check_trained_told(model: Model) -> None:
    """Check that a backward through any part with a trained parameter raises."""
    for part in model.ways():
        out = part(torch.ones(2, 6)).sum()
        if out.requires_grad:
            with pytest.raises(RuntimeError, match=OUTSIDE):
                out.backward()


@pytest.mark.drawn(1)
@pytest.mark.ranks(2)
@each_size
async def test_n3_what_was_frozen_just_now_does_not_hide_it(coll: Communicator, sizes: dict[str, Any]) -> None:
    """One parameter is frozen, then all but one, with no call of the net in between: each backward raises."""
    net = await DataParallel.create(Model(), coll, **sizes)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    model: Any = net.module
    for step in range(2):
        await net.step(partial(loss_of, net, coll.rank, step), opt)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        check_trained_told(model)
        model.requires_grad_(False)
        parameter.requires_grad_(True)
        check_trained_told(model)
        model.requires_grad_(True)
    net.zero_grad()
    await net.step(partial(loss_of, net, coll.rank, 2), opt)
    await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.drawn(1)
@pytest.mark.ranks(2)
@each_size
@pytest.mark.parametrize("since", ["create", "a step", "a call"])
async def test_n3_what_was_thawed_just_now_is_told(coll: Communicator, sizes: dict[str, Any], since: str) -> None:
    """A backward raises for parts that were entirely frozen when the hooks were last placed."""
    model: Any = Model()
    model.requires_grad_(since != "create")
    model.raw.requires_grad_(True)
    net = await DataParallel.create(model, coll, **sizes)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    await net.step(partial(loss_of, net, coll.rank, 0), opt)
    if since != "create":
        model.requires_grad_(False)
        model.raw.requires_grad_(True)
        if since == "a step":
            await net.step(partial(loss_of, net, coll.rank, 1), opt)
        else:
            net(torch.ones(2, 6))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        check_trained_told(model)
    net.zero_grad()
    await net.step(partial(loss_of, net, coll.rank, 2), opt)
    await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["step", "call"])
async def test_n3_a_module_of_many_parameters(coll: Communicator, how: str) -> None:
    """Four of those that are trained are hooked: where all four are frozen, others are from the next step or call."""
    net = await DataParallel.create(nn.ParameterList([torch.ones(3) for _ in range(20)]), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    parts: list[Tensor] = list(net.parameters())
    for _ in range(3):
        await net.step(lambda: sum((p.square().sum() for p in parts if p.requires_grad), torch.zeros(())), opt)
    assert sum(bool(p._post_accumulate_grad_hooks) for p in parts) <= 5
    for p in parts[:3]:
        p.requires_grad_(False)
    with pytest.raises(RuntimeError, match=OUTSIDE):
        torch.cat(parts).sum().backward()
    for p in parts[:-1]:
        p.requires_grad_(False)
    net.zero_grad()
    if how == "step":
        await net.step(lambda: torch.cat(parts).sum(), opt)
    else:
        reducer_of(net).hooks.watch()  # as `net(...)` does; a list has no forward
    with pytest.raises(RuntimeError, match=OUTSIDE):
        parts[-1].sum().backward()


@pytest.mark.ranks(2)
async def test_n3_a_generator_and_its_discriminator(coll: Communicator) -> None:
    """The generator's backward runs through the other net: the error names two remedies, and each of them works."""
    torch.manual_seed(1)
    nets = [await DataParallel.create(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), coll) for _ in range(2)]
    maker, judge = nets

    def through_both(z: Tensor) -> Tensor:
        loss: Tensor = judge(maker(z)).square().mean()
        return loss

    opts = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    torch.manual_seed(coll.rank)
    for step in range(4):
        z = torch.randn(4, 6)
        await judge.step(lambda z: judge(maker(z).detach()).square().mean(), opts[1], z)
        with pytest.raises(RuntimeError, match=OUTSIDE):
            await maker.step(through_both, opts[0], z)
        judge.zero_grad()
        before = [p.detach().clone() for p in maker.parameters()]
        if step % 2:
            judge.module.requires_grad_(False)
            await maker.step(through_both, opts[0], z)
            assert all(p.grad is None for p in judge.parameters())
            judge.module.requires_grad_(True)
        else:
            with judge.no_sync():
                await maker.step(through_both, opts[0], z)
        assert not any(map(torch.equal, before, maker.parameters()))
        for net in nets:
            await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.ranks(2)
@each_size
async def test_n3_a_backward_on_the_loop_beside_a_step(coll: Communicator, sizes: dict[str, Any]) -> None:
    """The backward raises, because its gradients would be taken for the step's; the ranks stay synchronized."""
    net = await DataParallel.create(Model(), coll, **sizes)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    model: Any = net.module
    for step in range(2):
        await net.step(partial(loss_of, net, coll.rank, step), opt)
    loop = asyncio.get_running_loop()
    under_way = asyncio.Event()
    told: list[RuntimeError] = []

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            asyncio.run_coroutine_threadsafe(meanwhile(), loop).result(60)
            return grads[0]

    async def meanwhile() -> None:
        under_way.set()
        for part in model.ways():
            try:
                part(torch.ones(2, 6)).sum().backward()
            except RuntimeError as error:
                told.append(error)
        net.zero_grad()

    await net.step(lambda: Pause.apply(loss_of(net, coll.rank, 2)), opt)  # type: ignore[no-untyped-call]
    assert under_way.is_set()
    assert len(told) == len(model.ways())
    assert all("on the event loop's thread, while a step of this net is under way" in str(error) for error in told)
    await assert_synchronized(list(net.parameters()), coll)


@pytest.mark.ranks(2)
async def test_n3_few_hooks_fire(coll: Communicator) -> None:
    """At most four hooks of each module and one of each bucket fire after the order is known."""
    net = await DataParallel.create(nn.Sequential(*[Bent(10) for _ in range(10)], nn.Linear(6, 3)), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        x, y = Trial.batch(coll.rank, step, torch.float32)
        await net.step(lambda x, y: nn.functional.mse_loss(net(x), y), opt, x, y)
    hooked = [p for p in net.parameters() if p._post_accumulate_grad_hooks]
    assert len(hooked) in (42, 43)  # the hook of a bucket may be one of the four
    await net.aclose()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
