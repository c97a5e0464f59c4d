"""N3: parameters that no net reduces are refused in an optimizer of a net, unless each rank keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam

from aiodist import Communicator, Engine, nn
from aiodist.engine import WithCriterion
from aiodist.nn import DataParallel, assert_synchronized
from tests.nn.conftest import Trial

if TYPE_CHECKING:
    from aiodist.engine import State

FOREIGN = (
    r"has a parameter that no net reduces: a float64\[3, 3\], number \d of its group \d\. .*WithCriterion.*per_rank"
)


class Head(torch.nn.Linear):
    """A head of this rank alone."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(100 + rank)
        super().__init__(3, 3, dtype=torch.float64)


def loss_of(net: Any, head: torch.nn.Module, rank: int, step: int) -> Tensor:
    x, y = Trial.batch(rank, step)
    return mse_loss(head(net(x)), y)


async def one_step(net: DataParallel, opt: Any, loss: Callable[[], Tensor], way: str) -> None:
    if way == "step":
        await net.step(loss, opt)
        return
    opt.zero_grad()
    await net.backward(loss())
    opt.step() if way == "own" else await net.submit(opt.step)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("way", ["step", "own", "run"])
@pytest.mark.parametrize("when", ["made", "later", "in_place"])
async def test_n3_an_optimizer_with_foreign_parameters(coll: Communicator, when: str, way: str) -> None:
    net, head = await DataParallel.create(Trial.Mlp(), coll, clip_norm=0.5), Head(coll.rank)
    extra = list(head.parameters()) if when == "made" else []
    opt = SGD([*net.parameters(), *extra], lr=0.1)
    loss = partial(loss_of, net, head, coll.rank)
    if when != "made":
        await one_step(net, opt, partial(Trial.loss, net, coll.rank, 0), way)
        if when == "later":
            opt.add_param_group({"params": list(head.parameters())})
        else:
            opt.param_groups[0]["params"][-1:] = head.parameters()
    before = [p.detach().clone() for p in net.parameters()]
    for step in range(2):
        with pytest.raises(ValueError, match=FOREIGN):
            await one_step(net, opt, partial(loss, step), way)
    assert all(map(torch.equal, before, net.parameters()))
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
async def test_n3_a_foreign_parameter_that_has_a_name(coll: Communicator) -> None:
    net, head = await DataParallel.create(Trial.Mlp(), coll), Head(coll.rank)
    opt = Adam([*net.named_parameters(), *head.named_parameters("head")])
    with pytest.raises(ValueError, match=r"reduces: 'head\.weight', a float64\[3, 3\]"):
        await net.step(partial(loss_of, net, head, coll.rank, 0), opt)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("later", [True, False])
@pytest.mark.parametrize("kind", ["local", "pipelined", "sharded", "engine"])
async def test_n3_a_driver_with_foreign_parameters(coll: Communicator, kind: str, later: bool) -> None:
    net, head = await DataParallel.create(Trial.Mlp(), coll), Head(coll.rank)

    optimizers: list[SGD] = []

    def make(params: Any) -> SGD:
        mine = params if isinstance(params[0], dict) else [{"params": params}]
        optimizers.append(SGD([*mine, *([] if later else groups)], lr=0.1))
        return optimizers[-1]

    async def made() -> Any:
        if kind == "local":
            return await nn.LocalSGD.create(net, make(list(net.parameters())), every=2)
        if kind == "engine":
            return Engine(net, make(list(net.parameters())), torch.nn.MSELoss())
        if kind == "pipelined":
            return await nn.PipelinedOptimizer.create(net, make)
        return await nn.ShardedOptimizer.create(net, make)

    groups = [{"params": list(head.parameters())}]
    wrong = pytest.raises(ValueError, match=r"no net reduces|No net reduces|expected the \d")
    if not later:
        with wrong:
            await made()
        return
    opt = await made()
    if kind == "engine":
        optimizers[0].add_param_group(groups[0])
        with wrong:
            await opt.train([Trial.batch(coll.rank, 0)], epochs=1)
        return
    await net.step(partial(Trial.loss, net, coll.rank, 0), opt)
    await opt.flush()
    optimizers[0].add_param_group(groups[0])
    with wrong:
        await net.step(partial(Trial.loss, net, coll.rank, 0), opt)


@pytest.mark.ranks(2)
async def test_n3_one_optimizer_of_two_nets(coll: Communicator) -> None:
    net, other = await DataParallel.create(Trial.Mlp(), coll), await DataParallel.create(Trial.Mlp(1), coll)
    opt = SGD([*net.parameters(), *other.parameters()], lr=0.1)
    for step in range(2):
        opt.zero_grad()
        await net.backward(Trial.loss(net, coll.rank, step))
        await other.backward(Trial.loss(other, coll.rank, step))
        opt.step()
    Trial.assert_same(net, Trial.alone(2, 2))
    Trial.assert_same(other, Trial.alone(2, 2, make=partial(Trial.Mlp, 1)))


@pytest.mark.ranks(2)
async def test_n3_what_does_not_train_may_be_there(coll: Communicator) -> None:
    net, head = await DataParallel.create(Trial.Mlp(), coll), Head(coll.rank)
    opt = SGD([*net.parameters(), *head.requires_grad_(False).parameters()], lr=0.1)
    await net.step(partial(loss_of, net, head, coll.rank, 0), opt)
    head.requires_grad_(True)
    with pytest.raises(ValueError, match=FOREIGN):
        await net.step(partial(loss_of, net, head, coll.rank, 0), opt)


@pytest.mark.ranks(2)
async def test_n14_a_criterion_may_have_parameters_that_are_frozen(coll: Communicator) -> None:
    """An example is a loss on the features of another network."""

    class Features(torch.nn.Linear):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
            return mse_loss(super().forward(output), super().forward(target))

    net = await DataParallel.create(Trial.Mlp(), coll)
    criterion = Features(3, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"the criterion has a parameter 'weight' that the net does not train"):
        Engine(net, SGD(net.parameters(), lr=0.1), criterion)
    engine = Engine(net, SGD(net.parameters(), lr=0.1), criterion.requires_grad_(False))
    await engine.train([Trial.batch(coll.rank, step) for step in range(2)], epochs=1)
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
async def test_n14_a_criterion_trains_with_its_network(coll: Communicator) -> None:
    both = WithCriterion(Trial.Mlp(), Head(coll.rank))
    net = await DataParallel.create(both, coll, clip_norm=0.5)
    opt = SGD(net.parameters(), lr=0.1)
    for step in range(2):
        await net.step(partial(loss_of, net, both.criterion, coll.rank, step), opt)
    await assert_synchronized(both, coll)


def plain(heads: list[Head], steps: int, clip: float | None) -> tuple[torch.nn.Module, list[Head]]:
    """Return what one process makes of a body that all ranks share, and a head of each."""
    body = Trial.Mlp()
    opt, own = SGD(body.parameters(), lr=0.1), [SGD(head.parameters(), lr=0.1) for head in heads]
    for step in range(steps):
        for each in (opt, *own):
            each.zero_grad()
        for rank, head in enumerate(heads):
            loss_of(body, head, rank, step).backward()
        for p in body.parameters():
            assert p.grad is not None
            p.grad /= len(heads)
        for module in (body, *heads):
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        for each in (opt, *own):
            each.step()
    return body, heads


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("where", ["create", "settings"])
async def test_n19_each_rank_keeps_a_head(coll: Communicator, clip: float | None, scaled: bool, where: str) -> None:
    head = Head(coll.rank)
    known: Any = {"per_rank": head.parameters(), "clip_norm": clip}
    if scaled:
        known["scaler"] = torch.amp.GradScaler("cpu", init_scale=64.0)
    net = await DataParallel.create(Trial.Mlp(), coll, **(known if where == "create" else {}))
    if where == "settings":
        net.configure(**known)
    opt = SGD([*net.parameters(), *head.parameters()], lr=0.1)
    for step in range(3):
        await net.step(partial(loss_of, net, head, coll.rank, step), opt)
    body, heads = plain([Head(rank) for rank in range(coll.size)], 3, clip)
    Trial.assert_same(net, body)
    Trial.assert_same(head, heads[coll.rank])
    net.configure(per_rank=None)
    with pytest.raises(ValueError, match=FOREIGN):
        await net.step(partial(loss_of, net, head, coll.rank, 3), opt)


@pytest.mark.ranks(2)
async def test_n19_a_head_that_overflows_holds_up_no_other_rank(coll: Communicator) -> None:
    head, scaler = Head(coll.rank), torch.amp.GradScaler("cpu", init_scale=8.0)
    net = await DataParallel.create(Trial.Mlp(), coll, per_rank=head.parameters(), scaler=scaler)
    opt = SGD([*net.parameters(), *head.parameters()], lr=0.1)
    before = head.weight.detach().clone()

    def spoil(gradient: Tensor) -> Tensor:
        return gradient / 0 if coll.rank else gradient

    head.weight.register_hook(spoil)
    await net.step(partial(loss_of, net, head, coll.rank, 0), opt)
    assert torch.equal(before, head.weight) is (coll.rank == 1)
    assert scaler.get_scale() == 8.0
    body, _ = plain([Head(rank) for rank in range(2)], 1, None)
    Trial.assert_same(net, body)


@pytest.mark.ranks(2)
async def test_n19_local_steps_with_a_head(coll: Communicator) -> None:
    head = Head(coll.rank)
    net = await DataParallel.create(Trial.Mlp(), coll, per_rank=head.parameters(), clip_norm=0.1)
    local = await nn.LocalSGD.create(net, SGD([*net.parameters(), *head.parameters()], lr=0.1), every=2)
    for step in range(3):
        await net.step(partial(loss_of, net, head, coll.rank, step), local)
    await local.flush()
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
async def test_n14_an_engine_with_a_criterion_of_each_rank(coll: Communicator) -> None:
    class Scored(Head):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
            return mse_loss(super().forward(output), target)

    head = Scored(coll.rank)
    net = await DataParallel.create(Trial.Mlp(), coll, per_rank=head.parameters())
    engine = Engine(net, SGD([*net.parameters(), *head.parameters()], lr=0.1), head)
    steps: list[int] = []

    @engine.on("update")
    def note(state: State) -> None:
        steps.append(state.step)

    await engine.train([Trial.batch(coll.rank, step) for step in range(3)], epochs=1)
    assert len(steps) == 3
    await assert_synchronized(net.module, coll)


@pytest.mark.ranks(2)
async def test_n19_what_a_rank_cannot_keep(coll: Communicator) -> None:
    net = await DataParallel.create(Trial.Mlp(), coll)
    with pytest.raises(TypeError, match="per_rank has int: expected parameters"):
        net.configure(per_rank=[torch.nn.Linear(1, 1), 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"per_rank has '0\.weight', a parameter of the net"):
        net.configure(per_rank=net.parameters())
