"""Data-parallel groups at a parameter server: gradients are reduced inside a group, its first rank talks to the server.

aiodist run -n 4 --servers 1 examples/ps_data_parallel.py has two groups of two workers, and one server
aiodist run -n 2 examples/ps_data_parallel.py has one group of two, which serve too

For the server a group is one worker, however many ranks it has: it exchanges weights once for all of them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_sequential import batches, build, load, optimizer, report

import aiodist
from aiodist.nn import DataParallel
from aiodist.ps import EASGD, ParameterServer, elastic_alpha

GROUP, TAU = 2, 8  # ranks, steps


async def train(ps: ParameterServer, group: aiodist.Communicator, net: nn.Module, images: Tensor, labels: Tensor) -> None:
    parallel = await DataParallel.create(net, group)
    opt = optimizer(net.parameters())
    alpha = elastic_alpha(0.9, len(ps.workers))  # counts groups
    async with EASGD(ps, net, opt, tau=TAU, alpha=alpha, group=group, run=parallel.run) as client:
        for batch in batches(ps.workers.index(ps.rank - group.rank), len(ps.workers)):  # (120 / groups,), the group's
            mine = batch[group.rank :: group.size]
            parallel.zero_grad()
            loss = await parallel.run(lambda: F.cross_entropy(parallel(images[mine]), labels[mine]))
            await parallel.backward(loss)  # the mean over the group
            await client.step()  # the optimizer's; every eighth time the group meets the centre
    await parallel.aclose()


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    net = build()
    async with aiodist.init() as coll:
        servers = aiodist.env.servers(coll.size) or 0
        working = coll.size - servers
        roots = range(0, working, GROUP)
        group = await coll.split(coll.rank // GROUP if coll.rank < working else None)
        async with ParameterServer(coll, net, workers=roots) as ps:
            if coll.rank < working:
                await train(ps, group, net, images, labels)
            if ps.is_worker:
                await ps.sync()
                await ps.barrier()
                await ps.pull(net)  # the centre
        if coll.rank == 0:
            report(net, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
