"""Data-parallel groups at a parameter server: a group reduces its gradients, and its first rank is the client.

aiodist run -n 4 --servers 1 examples/ps_data_parallel.py has two groups of two workers, and one server
aiodist run -n 2 examples/ps_data_parallel.py has one group of two ranks, which serve too

The server sees one client per group. Weights are sent once per group, for any number of ranks in it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from train_sequential import batches, build, load, optimizer, report

import aiodist
from aiodist.nn import DataParallel
from aiodist.ps import EASGD, ParameterServer, elastic_alpha

GROUP, TAU = 2, 8  # ranks, steps


async def train(net: DataParallel, client: EASGD, mine: list[Tensor], images: Tensor, labels: Tensor) -> None:
    for chosen in mine:  # (120 / workers,)
        net.zero_grad()
        loss = await net.submit(lambda: F.cross_entropy(net(images[chosen]), labels[chosen]))
        await net.backward(loss)  # the mean over the group
        await client.step()  # the optimizer's step; every eighth time group and centre move closer


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    module = build()
    async with aiodist.init() as coll, ParameterServer(coll, module) as ps:
        workers = len(ps.workers)
        number = ps.workers.index(ps.rank) if ps.is_worker else None
        group = await coll.split(None if number is None else number // GROUP)
        if number is not None:
            net = await DataParallel.create(module, group)
            opt = optimizer(net.parameters())
            alpha = elastic_alpha(0.9, -(-workers // GROUP))  # for this number of groups
            async with EASGD(ps, module, opt, tau=TAU, alpha=alpha, group=group, run=net.submit) as client:
                await train(net, client, list(batches(number, workers)), images, labels)
            await ps.sync()
            await ps.barrier()
            await ps.pull(module)  # the centre
        if coll.rank == 0:
            report(module, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
