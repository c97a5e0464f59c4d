"""N17: what each rank has of its own: a LocalSGD's optimizer, residuals of compressed gradients, a queue of shards."""

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import aiodist
from aiodist import Communicator, codecs
from aiodist.data import IndexShards, ShardQueue
from aiodist.nn import DataParallel, LocalSGD, SlowMo


def module() -> nn.Sequential:
    """Return 20,000 weights, which two ranks divide, and some small ones."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(95, 211), nn.Tanh(), nn.Linear(211, 3)).double()


def batch(step: int, rank: int) -> Any:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 95, generator=random).double(), torch.randn(5, 3, generator=random).double()


def nesterov(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


class Local:
    """A training whose ranks have other batches and Adams."""

    def __init__(self, net: DataParallel, local: LocalSGD) -> None:
        self.net = net
        self.local = local

    @classmethod
    async def make(cls, coll: Communicator, **options: Any) -> "Local":
        net = await DataParallel.create(module(), coll)
        return cls(net, await LocalSGD.create(net, torch.optim.Adam(net.parameters(), lr=0.01), **options))

    async def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            x, y = batch(step, self.net.coll.rank)
            await self.net.step(lambda x=x, y=y: mse_loss(self.net(x), y), self.local)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.net.module.state_dict().items()}


@pytest.mark.drawn(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"every": 3},
        {"every": 3, "outer": SlowMo(0.5)},
        {"every": 3, "outer": nesterov},
        {"every": 3, "overlap": True},
        {"every": 4, "start": 6},
        {"every": 1},
    ],
    ids=["average", "slowmo", "diloco", "overlap", "post-local", "plain"],
)
async def test_n17_local_sgd_goes_on_to_the_bit(coll: Communicator, tmp_path: Path, options: dict[str, Any]) -> None:
    """Saved in the middle of a period, which the save ends: ranks have the same parameters in it."""
    folder = Path(await coll.broadcast_object(str(tmp_path)))
    run = await Local.make(coll, **options)
    await run.steps(0, 5)
    saving = aiodist.save(folder, run.net, run.local)
    await run.steps(5, 12)
    await saving
    expected = run.weights()
    again = await Local.make(coll, **options)
    await again.steps(0, 4)  # another training
    await aiodist.load(folder, again.net, again.local)
    states = await coll.allgather_object(again.weights())
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items())
    await again.steps(5, 12)
    for name, t in again.weights().items():
        assert torch.equal(t, expected[name]), name
    await run.local.flush()
    await again.local.flush()


@pytest.mark.ranks(3)
async def test_n17_local_sgd_on_fewer_ranks(coll: Communicator, tmp_path: Path) -> None:
    """Parameters, the outer momentum and rates continue; the momentum of each rank restarts."""
    folder = Path(await coll.broadcast_object(str(tmp_path)))
    run = await Local.make(coll, every=3, outer=nesterov)
    await run.steps(0, 8)
    for group in run.local.param_groups:
        group["lr"] = 0.003
    await aiodist.save(folder, run.net, run.local)
    two = await coll.group(range(2))
    if coll.rank < 2:
        again = await Local.make(two, every=3, outer=nesterov)
        await aiodist.load(folder, again.net, again.local)
        for name, t in again.weights().items():
            assert torch.equal(t, run.weights()[name])
        assert run.local.outer is not None
        assert again.local.outer is not None
        ours, theirs = again.local.outer.state_dict()["state"], run.local.outer.state_dict()["state"]
        assert theirs
        assert all(torch.equal(ours[i]["momentum_buffer"], theirs[i]["momentum_buffer"]) for i in theirs)
        assert again.local.param_groups[0]["lr"] == 0.003
        assert not again.local.optimizer.state
        await again.steps(8, 12)
        await again.local.flush()


@pytest.mark.drawn(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("codec", [codecs.TopK(0.1), codecs.PowerSGD(2), codecs.Sign()], ids=lambda c: type(c).__name__)
async def test_n17_residuals_go_on_to_the_bit(coll: Communicator, tmp_path: Path, codec: Any) -> None:
    folder = Path(await coll.broadcast_object(str(tmp_path)))
    weights = []
    for resumed in (False, True):
        net = await DataParallel.create(module(), coll, compress=codecs_of(codec))
        opt = torch.optim.Adam(net.parameters(), lr=0.01)
        if resumed:
            await aiodist.load(folder, net, opt)
        for step in range(4 if resumed else 0, 8):
            if step == 4 and not resumed:
                saving = aiodist.save(folder, net, opt)
            x, y = batch(step, coll.rank)
            await net.step(lambda net=net, x=x, y=y: mse_loss(net(x), y), opt)
        await saving
        weights.append({name: t.clone() for name, t in net.state_dict().items()})
    for name, t in weights[0].items():
        assert torch.equal(weights[1][name], t), name


@pytest.mark.ranks(1, 2, 3)
async def test_n17_running_statistics_are_those_of_each_rank(coll: Communicator, tmp_path: Path) -> None:
    folder = Path(await coll.broadcast_object(str(tmp_path)))
    net = await DataParallel.create(nn.Sequential(nn.Linear(95, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double(), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = batch(1, coll.rank)
    await net.step(lambda: mse_loss(net(x), y), opt)
    await aiodist.save(folder, net, opt)
    expected = {name: t.clone() for name, t in net.state_dict().items()}
    means = await coll.allgather(expected["1.running_mean"])
    assert all(not torch.equal(means[0], other) for other in means[1:])
    await net.step(lambda: mse_loss(net(y @ y.T @ x), y), opt)
    await aiodist.load(folder, net, opt)
    for name, t in net.state_dict().items():
        assert torch.equal(t, expected[name]), name


def codecs_of(codec: Any) -> Any:
    return aiodist.nn.Compression(codec, within_hosts=True)


def queue_of(coll: Communicator) -> ShardQueue[int]:
    return ShardQueue(IndexShards(101, 7), coll, batch_size=4, shuffle=True, seed=3)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("ranks", [1, 2, 3])
async def test_n17_a_queue_of_shards_as_own(coll: Communicator, tmp_path: Path, ranks: int) -> None:
    """Each record comes once, with any number of ranks."""
    folder = Path(await coll.broadcast_object(str(tmp_path)))
    queue = queue_of(coll)
    queue.set_epoch(2)
    net = await DataParallel.create(nn.Linear(2, 1), coll)
    mine: list[int] = []
    async with aiodist.data.prefetch(queue) as batches:
        for _ in range(1 + coll.rank):
            mine += await anext(batches)
        saving = aiodist.save(folder, net, per_rank=[queue])
        await anext(batches, None)  # after the save
        await saving
    group = await coll.group(range(ranks))
    if coll.rank < ranks:
        again = queue_of(group)
        fewer = await DataParallel.create(nn.Linear(2, 1), group)
        await aiodist.load(folder, fewer, per_rank=[again])
        again.set_epoch(2)
        async for records in again:
            mine += records
            await asyncio.sleep(0)
    assert sorted(chain(*await coll.allgather_object(mine))) == list(range(101))
