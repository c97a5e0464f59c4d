"""Elastic averaging (EASGD): each worker trains its own weights, which an elastic force ties to a common centre.

aiodist run -n 2 --servers 1 examples/ps_easgd.py
aiodist run -n 2 examples/ps_easgd.py

Every 8 steps a worker and the centre move towards each other. The worker requests the centre 4 steps earlier, so that
it arrives in time. No worker waits for another one. The result of training is the centre.
"""

import torch
import torch.nn.functional as F
from train_sequential import batches, build, load, optimizer, report

import aiodist
from aiodist.ps import EASGD, ParameterServer, elastic_alpha

TAU, PREFETCH = 8, 4  # steps


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    net = build()
    async with aiodist.init() as coll:
        async with ParameterServer(coll, net) as ps:
            if ps.is_worker:
                workers = len(ps.workers)
                opt = optimizer(net.parameters())  # any torch optimizer, one per worker
                alpha = elastic_alpha(0.9, workers)  # all workers together pull the centre with 0.9
                async with EASGD(ps, net, opt, tau=TAU, alpha=alpha, prefetch=PREFETCH) as client:
                    for mine in batches(ps.workers.index(ps.rank), workers):  # (120 / workers,)
                        opt.zero_grad()
                        loss = F.cross_entropy(net(images[mine]), labels[mine])
                        loss.backward()
                        await client.step()
                await ps.sync()
                await ps.barrier()
                await ps.pull(net)  # the centre replaces this worker's weights
        if coll.rank == 0:
            report(net, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
