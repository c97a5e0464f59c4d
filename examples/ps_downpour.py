"""Downpour SGD: each worker trains separately, and adds its progress to the common weights every few steps.

aiodist run -n 2 --servers 1 examples/ps_downpour.py
aiodist run -n 2 examples/ps_downpour.py

No worker waits for another one. Fast workers contribute more than slow ones, so two runs end with different weights.
"""

import torch
import torch.nn.functional as F
from train_sequential import batches, build, load, report

import aiodist
from aiodist.ps import Downpour, ParameterServer

EVERY = 4  # steps


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    net = build()
    async with aiodist.init() as coll:
        async with ParameterServer(coll, net) as ps:  # the servers add each push on arrival
            if ps.is_worker:
                rate = 0.4 / len(ps.workers)  # the servers add up the workers' updates
                opt = torch.optim.SGD(net.parameters(), rate)  # one per worker
                async with Downpour(ps, net, opt, n_push=EVERY, n_pull=EVERY) as client:
                    for mine in batches(ps.workers.index(ps.rank), len(ps.workers)):  # (120 / workers,)
                        opt.zero_grad()
                        loss = F.cross_entropy(net(images[mine]), labels[mine])
                        loss.backward()
                        await client.step()  # the optimizer's step; every fourth time a push and a pull too
                await ps.sync()  # this worker's pushes are applied
                await ps.barrier()  # the other workers' pushes too
                await ps.pull(net)
        if coll.rank == 0:
            report(net, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
