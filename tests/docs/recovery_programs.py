"""The loop of docs/recovery.md, with the changes of its table for other optimizers, an engine, data, and no net."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import torch
from torch import Tensor

import aiodist
from aiodist.data import IndexShards, ShardQueue
from aiodist.nn import DataParallel, LocalSGD, PipelinedOptimizer, ShardedOptimizer

Agree = Callable[[aiodist.Communicator, int, torch.nn.Module], Awaitable[int]]


def linear() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def loss_of(net: DataParallel) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        found: Tensor = net(torch.ones(3)).square().sum()
        return found

    return loss


def sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


async def train_by_hand(agree: Agree, steps: int) -> int:
    model, step, fresh = linear(), 0, True
    async with aiodist.init(elastic=True) as coll:
        while step < steps:
            try:
                if fresh:
                    step, fresh = await agree(coll, step, model), False
                    continue
                model(torch.ones(3)).backward()
                await coll.allreduce([p.grad for p in model.parameters() if p.grad is not None], op="mean")
                step += 1
            except aiodist.PeerError:
                coll, fresh = await coll.shrink(), True
        return coll.size


async def train_pipelined(steps: int) -> float:
    module, net, last = linear(), None, torch.zeros(())
    async with aiodist.init(elastic=True) as coll:
        while True:
            try:
                if net is None:
                    net = await DataParallel.create(module, coll, PipelinedOptimizer)
                    opt = await PipelinedOptimizer.create(net, sgd)
                await net.rebind(coll, opt)
                for _ in range(net.steps_done, steps):
                    last = await net.step(loss_of(net), opt)
                await opt.flush()
                await coll.barrier()
                return float(last)
            except aiodist.PeerError:
                coll = await coll.shrink()


async def train_locally(steps: int) -> int:
    module, net = linear(), None
    adam = torch.optim.Adam(module.parameters(), lr=0.1)
    async with aiodist.init(elastic=True) as coll:
        while True:
            try:
                if net is None:
                    net = await DataParallel.create(module, coll, LocalSGD)
                    local = await LocalSGD.create(net, adam, every=8)
                await net.rebind(coll, local)
                for _ in range(local.steps, steps):
                    await net.step(loss_of(net), local)
                await local.flush()
                await coll.barrier()
                return local.steps
            except aiodist.PeerError:
                coll = await coll.shrink()


async def train_shards(steps: int, folder: str) -> int:
    module, net = linear(), None
    async with aiodist.init(elastic=True) as coll:
        while True:
            try:
                if net is None:
                    net = await DataParallel.create(module, coll, ShardedOptimizer)
                    opt = await ShardedOptimizer.create(net, lambda groups: torch.optim.Adam(groups, lr=0.1))
                await net.rebind(coll, opt)
                first = (await aiodist.load(folder, net, opt)).metadata if opt.lost else 0
                for step in range(first, steps):
                    if step % 8 == 0:
                        await aiodist.save(folder, net, opt, metadata=step, keep_last=2)
                    await net.step(loss_of(net), opt)
                await opt.flush()
                await coll.barrier()
                return steps
            except aiodist.PeerError:
                coll = await coll.shrink()


class Halves:
    """The k-th batch of all ranks; each rank has a part."""

    def __init__(self, coll: aiodist.Communicator) -> None:
        self.part = slice(coll.rank, None, coll.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for k in range(16):
            x = torch.arange(12.0).view(4, 3).add(k).sin()
            yield x[self.part], x.sum(1, keepdim=True)[self.part]


async def train_by_engine() -> float:
    module, engine = linear(), None
    opt = torch.optim.SGD(module.parameters(), lr=0.1)
    async with aiodist.init(elastic=True) as coll:
        while True:
            try:
                if engine is None:
                    net = await DataParallel.create(module, coll, opt, op="sum")
                    engine = aiodist.Engine(net, opt, lambda out, y: (out - y).square().sum() / 4, progress=False)
                await engine.rebind(coll)
                figures = await engine.train(Halves(coll), epochs=3)
                await coll.barrier()
                return figures["loss"]
            except aiodist.PeerError:
                coll = await coll.shrink()


async def train_on_each_once() -> int:
    module = torch.nn.Embedding(1000, 1)
    torch.nn.init.zeros_(module.weight)  # what is trained here is how often each record was seen
    opt = torch.optim.SGD(module.parameters(), lr=1.0)
    net = queue = None

    def share(batch: list[int]) -> Tensor:
        found: Tensor = -module(torch.tensor(batch, dtype=torch.int64)).sum()
        return found

    async with aiodist.init(elastic=True) as coll:
        count = 1
        while count:
            try:
                net = net or await DataParallel.create(module, coll, opt, op="sum")
                await net.rebind(coll, opt)
                queue = queue or ShardQueue(IndexShards(1000), coll, batch_size=8, shuffle=True)
                await queue.rebind(coll, net.steps_done)
                batches = aiter(queue)
                while count:
                    batch: list[int] = await anext(batches, [])  # none are left for this rank, while others have some
                    count = await queue.agree(net.steps_done)  # records of all ranks in this step; 0 at the end
                    if count:
                        await net.step(share, opt, batch)
            except aiodist.PeerError:
                coll = await coll.shrink()
        return int((module.weight == 1).sum())
