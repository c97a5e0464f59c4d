"""Synchronous SGD at a parameter server: one call pushes the gradients and pulls the weights.

aiodist run -n 2 --servers 1 examples/ps_sync.py has two workers and one server
aiodist run -n 2 examples/ps_sync.py has two ranks that both serve and work

Both print on rank 0 the output of examples/train_sequential.py. A step of the server averages one push of each worker
and passes the mean to torch's optimizer, which runs at the server and keeps its momentum there.
"""

import torch
import torch.nn.functional as F
from train_sequential import MOMENTUM, RATE, batches, build, load, report

import aiodist
from aiodist.ps import SGD, ParameterServer, Synchronous


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    net = build()
    async with aiodist.init() as coll:
        async with ParameterServer(coll, net, rule=SGD(RATE, MOMENTUM), consistency=Synchronous("mean")) as ps:
            if ps.is_worker:  # a rank that only serves waits at the end of the block
                for mine in batches(ps.workers.index(ps.rank), len(ps.workers)):  # (120 / workers,)
                    net.zero_grad()
                    loss = F.cross_entropy(net(images[mine]), labels[mine])
                    loss.backward()
                    await ps.push_pull(net)  # one step of all workers
        if coll.rank == 0:
            report(net, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
