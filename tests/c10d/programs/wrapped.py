# A program as others write it, without types.
# mypy: ignore-errors
"""FSDP2 in a thread during communication on the loop, over one communicator."""

import asyncio

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler
from torchmetrics import MeanMetric

import aiodist
import aiodist.c10d
import aiodist.data


def others():
    """Return what a sampler, a metric and object collectives make of the group that they find."""
    assert dist.is_initialized()
    sampler = DistributedSampler(range(7), shuffle=False)
    metric = MeanMetric()
    for index in sampler:
        metric.update(float(index))
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, list(sampler))
    assert every == [[0, 2, 4, 6], [1, 3, 5, 0]], every
    return metric.compute().item()


class Training:
    """FSDP2, a step at a time."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = fully_shard(nn.Linear(8, 8))
        self.opt = torch.optim.SGD(self.net.parameters(), 0.01)

    def step(self, x):
        self.opt.zero_grad()
        loss = self.net(x).pow(2).sum()
        loss.backward()
        self.opt.step()
        return loss.item()


async def beside(coll, done):
    """Sum on the loop while a thread trains; ranks make as many sums."""
    for _ in range(20):
        assert (await coll.allreduce(torch.ones(4))).tolist() == [2.0] * 4
    await done.wait()


async def main():
    async with aiodist.init() as coll:
        await aiodist.c10d.wrap(coll)
        assert dist.is_initialized()
        done = asyncio.Event()
        summing = asyncio.create_task(beside(coll, done))
        training = await asyncio.to_thread(Training)
        batches = (torch.full((2, 8), 1.0 + number + coll.rank) for number in range(10))
        async with aiodist.data.prefetch(batches) as ahead:  # prepared by a thread, handed on by the loop
            losses = [await asyncio.to_thread(training.step, x) async for x in ahead]
        done.set()
        await summing
        assert len(losses) == 10
        lasts = await coll.allgather(await asyncio.to_thread(training.step, torch.ones(2, 8)))
        assert lasts[0] == lasts[1], lasts  # the ranks' weights are one
        assert await asyncio.to_thread(others) == 21 / 8
        await asyncio.to_thread(dist.destroy_process_group)
    print("side by side")


aiodist.run(main)
