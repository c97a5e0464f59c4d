"""Data parallelism by hand: an ordinary torch loop with one more line, which averages the gradients.

aiodist run -n 2 examples/train_allreduce.py prints on rank 0 the output of examples/train_sequential.py
"""

import torch
import torch.nn.functional as F
from train_sequential import batches, build, load, optimizer, report

import aiodist
from aiodist.nn import synchronize_gradients, synchronize_parameters


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    net = build()
    async with aiodist.init() as coll:
        await synchronize_parameters(net, coll)  # all ranks start with rank 0's weights
        opt = optimizer(net.parameters())
        for mine in batches(coll.rank, coll.size):  # (120 / size,)
            opt.zero_grad()
            loss = F.cross_entropy(net(images[mine]), labels[mine])
            loss.backward()
            await synchronize_gradients(net, coll, op="mean")  # the additional line
            opt.step()
        if coll.rank == 0:
            report(net, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
