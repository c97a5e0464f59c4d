"""`PipelinedOptimizer`: the next forward starts while the last gradients are still in flight.

aiodist run -n 2 examples/train_pipelined.py prints on rank 0 the output of examples/train_sequential.py

`net.step` returns after backward. Each layer is updated when its own gradients have arrived, and the next forward waits
in each layer only for that update. The results are those of the plain loop.
"""

import torch
import torch.nn.functional as F
from train_sequential import batches, build, load, optimizer, report

import aiodist
from aiodist.nn import DataParallel, PipelinedOptimizer


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with aiodist.init() as coll:
        # Small buckets, so that even this small net has something to overlap.
        net = await DataParallel.create(build(), coll, bucket_bytes=4096, first_bucket_bytes=4096)
        opt = await PipelinedOptimizer.create(net, optimizer)  # calls `optimizer(parameters)` for each bucket
        for mine in batches(coll.rank, coll.size):  # (120 / size,)
            await net.step(lambda: F.cross_entropy(net(images[mine]), labels[mine]), opt)
        await opt.flush()  # finishes the last step
        if coll.rank == 0:
            report(net.module, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
