"""Gradients as they arrive: `async for` during backward, and one update per parameter.

aiodist run -n 2 examples/train_async.py prints on rank 0 the output of examples/train_sequential.py

The gradients of the last layer are ready first. They are reduced, and that layer is updated, while backward continues
in the earlier layers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from train_sequential import MOMENTUM, RATE, batches, build, load, report

import aiodist
from aiodist.nn import DataParallel


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with aiodist.init() as coll:
        # One parameter per bucket; otherwise small gradients would share a bucket and arrive together.
        net = await DataParallel.create(build(), coll, bucket_bytes=1, first_bucket_bytes=1)
        velocity = {parameter: torch.zeros_like(parameter) for parameter in net.parameters()}

        def forward(mine: Tensor) -> Tensor:
            return F.cross_entropy(net(images[mine]), labels[mine])

        for mine in batches(coll.rank, coll.size):  # (120 / size,)
            net.zero_grad()
            loss = await net.submit(forward, mine)  # on the compute thread; the loop stays free
            async for parameter, gradient in net.backward_iter(loss):
                with torch.no_grad():  # SGD by hand: a torch optimizer would need all gradients
                    velocity[parameter].mul_(MOMENTUM).add_(gradient)
                    parameter.sub_(velocity[parameter], alpha=RATE)

        if coll.rank == 0:
            report(net.module, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
