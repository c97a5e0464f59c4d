"""N19: parameters of the net's own module that each rank keeps for itself, as experts: neither shared nor reduced."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim import SGD

import aiodist
from aiodist import Communicator, nn
from aiodist.nn import DataParallel, assert_synchronized
from tests.nn.conftest import Trial

if TYPE_CHECKING:
    from pathlib import Path


class Expert(torch.nn.Module):
    """A body that all ranks share, and a head of each, which is of another shape on each rank."""

    def __init__(self, body: torch.nn.Module, rank: int, wide: int = 0) -> None:
        super().__init__()
        self.body = body
        torch.manual_seed(100 + rank)
        self.head = torch.nn.Sequential(
            torch.nn.Linear(3, 4 + wide, dtype=torch.float64), torch.nn.Linear(4 + wide, 3, dtype=torch.float64)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y


def alone(size: int, steps: int, clip: float | None, wide: bool) -> list[Expert]:
    """Return what one process makes of a body that all ranks share, and of the heads."""
    body = Trial.Mlp()
    every = [Expert(body, rank, rank * wide) for rank in range(size)]
    opt = SGD([*body.parameters(), *(p for each in every for p in each.head.parameters())], lr=0.1)
    for step in range(steps):
        opt.zero_grad()
        for rank, each in enumerate(every):
            Trial.loss(each, rank, step).backward()
        for p in body.parameters():
            assert p.grad is not None
            p.grad /= size
        if clip is not None:
            for module in (body, *(each.head for each in every)):
                torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        opt.step()
    return every


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("clip", [None, 0.05])
async def test_n19_experts_within_the_module(coll: Communicator, clip: float | None) -> None:
    module = Expert(Trial.Mlp(), coll.rank, coll.rank)
    net = await DataParallel.create(module, coll, clip_norm=clip, per_rank=module.head.parameters(), **Trial.SMALL)
    assert list(map(id, net.per_rank)) == list(map(id, module.head.parameters()))
    opt = SGD(net.parameters(), lr=0.1)
    for step in range(3):
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
    Trial.assert_same(net, alone(coll.size, 3, clip, True)[coll.rank])
    net.configure(per_rank=None)  # those of the module stay
    opt.zero_grad()
    await net.backward(Trial.loss(net, coll.rank, 3))
    opt.step()
    Trial.assert_same(net, alone(coll.size, 4, clip, True)[coll.rank]) if clip is None else None
    await assert_synchronized(module.body, coll)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["pipelined", "sharded", "local"])
async def test_n19_drivers_beside_experts(coll: Communicator, kind: str) -> None:
    """An optimizer of their own trains them."""
    module = Expert(Trial.Mlp(), coll.rank)
    net = await DataParallel.create(module, coll, per_rank=module.head.parameters())
    own = SGD(module.head.parameters(), lr=0.1)
    make = partial(SGD, lr=0.1)
    body = list(module.body.parameters())
    opt: Any = (
        await nn.PipelinedOptimizer.create(net, make)
        if kind == "pipelined"
        else await nn.ShardedOptimizer.create(net, make, body)
        if kind == "sharded"
        else await nn.LocalSGD.create(net, make(body), every=1)
    )
    for step in range(3):
        own.zero_grad()
        await net.step(partial(Trial.loss, net, coll.rank, step), opt)
        await net.submit(own.step)
    await opt.flush()
    Trial.assert_same(net, alone(2, 3, None, False)[coll.rank])


@pytest.mark.ranks(2)
async def test_n19_experts_where_data_end_unevenly(coll: Communicator) -> None:
    module = Expert(Trial.Mlp(), coll.rank)
    net = await DataParallel.create(module, coll, per_rank=module.head.parameters())
    opt, own = SGD(module.body.parameters(), lr=0.1), SGD(module.head.parameters(), lr=0.1)
    before = next(module.head.parameters()).detach().clone()
    async with net.join(opt):
        for step in range(1 + 2 * coll.rank):
            own.zero_grad()
            await net.step(partial(Trial.loss, net, coll.rank, step), opt)
            await net.submit(own.step)
    await assert_synchronized(module.body, coll)
    heads = await coll.allgather_object(next(module.head.parameters()).detach())
    assert not torch.equal(*heads)
    assert not torch.equal(before, next(module.head.parameters()))


@pytest.mark.ranks(2)
async def test_n17_a_checkpoint_has_the_experts_of_each_rank(coll: Communicator, tmp_path: Path) -> None:
    folder = await coll.broadcast_object(tmp_path)
    module = Expert(Trial.Mlp(), coll.rank)
    net = await DataParallel.create(module, coll, per_rank=module.head.parameters())
    own = SGD(module.head.parameters(), lr=0.1)
    await net.step(partial(Trial.loss, net, coll.rank, 0), SGD(module.body.parameters(), lr=0.1))
    await net.submit(own.step)
    saved = {name: t.clone() for name, t in net.state_dict().items()}
    await aiodist.save(folder / "it", net, per_rank=[own])
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    await aiodist.load(folder / "it", net, per_rank=[own])
    assert saved.keys() == net.state_dict().keys()
    assert all(torch.equal(t, saved[name]) for name, t in net.state_dict().items())


@pytest.mark.ranks(2)
async def test_n14_an_engine_with_experts(coll: Communicator) -> None:
    module = Expert(Trial.Mlp(), coll.rank)
    net = await DataParallel.create(module, coll, per_rank=module.head.parameters())
    engine = aiodist.Engine(net, SGD(net.parameters(), lr=0.1), mse_loss, debug=True)
    await engine.train([Trial.batch(coll.rank, step) for step in range(2)], epochs=1)
    Trial.assert_same(net, alone(2, 2, None, False)[coll.rank])


@pytest.mark.ranks(2)
async def test_n19_ranks_that_keep_other_parameters(coll: Communicator) -> None:
    module = Trial.Mlp()
    with pytest.raises(aiodist.MismatchError, match=r"0\.weight"):
        await DataParallel.create(module, coll, per_rank=module[0].parameters() if coll.rank else None)
    with pytest.raises(ValueError, match="no parameter to train"):
        await DataParallel.create(module, coll, per_rank=module.parameters())
