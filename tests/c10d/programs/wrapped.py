# A program as others write it, without types.
# mypy: ignore-errors
"""FSDP2 in a thread beside asyncio's communication, over one communicator."""

import asyncio

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler
from torchmetrics import MeanMetric

import aiodist
import aiodist.c10d


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


def train():
    torch.manual_seed(0)
    net = fully_shard(nn.Linear(8, 8))
    opt = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(5):
        opt.zero_grad()
        net(torch.ones(2, 8)).pow(2).sum().backward()
        opt.step()
    return net(torch.ones(2, 8)).pow(2).sum().item()


async def main():
    async with aiodist.init() as coll:
        await aiodist.c10d.wrap(coll)
        assert dist.is_initialized()
        training = asyncio.create_task(asyncio.to_thread(train))
        rounds = 0
        while not training.done():
            await coll.allreduce(torch.ones(4)) if rounds < 20 else await asyncio.sleep(0.01)
            rounds += 1
        for _ in range(rounds, 20):
            await coll.allreduce(torch.ones(4))
        losses = await coll.allgather(await training)
        assert await asyncio.to_thread(others) == 21 / 8
        assert losses[0] == losses[1], losses
        await asyncio.to_thread(dist.destroy_process_group)
    print("side by side")


aiodist.run(main)
