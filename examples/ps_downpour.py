"""Downpour SGD: workers train on their own, and now and then add what they have learned to the common weights.

aiodist run -n 2 --servers 1 examples/ps_downpour.py
aiodist run -n 2 examples/ps_downpour.py

Nobody waits for anybody: fast workers make more of the common weights than slow ones. So two runs do not end with the
same figures.
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
        async with ParameterServer(coll, net) as ps:  # what is pushed is added, as soon as it is there
            if ps.is_worker:
                rate = 0.4 / len(ps.workers)  # all that they find is added up
                opt = torch.optim.SGD(net.parameters(), rate)  # each worker's own
                async with Downpour(ps, net, opt, n_push=EVERY, n_pull=EVERY) as client:
                    for mine in batches(ps.workers.index(ps.rank), len(ps.workers)):  # (120 / workers,)
                        opt.zero_grad()
                        loss = F.cross_entropy(net(images[mine]), labels[mine])
                        loss.backward()
                        await client.step()  # the optimizer's, and every fourth time up and down
                await ps.sync()  # all that this worker pushed is applied
                await ps.barrier()  # and what the others pushed
                await ps.pull(net)
        if coll.rank == 0:
            report(net, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
