"""`ShardedOptimizer`: each rank holds a part of the optimizer's state, of the gradients and of the updates.

aiodist run -n 2 examples/train_sharded.py prints on rank 0 the output of examples/train_sequential.py

Each gradient goes to the rank that owns this part of the parameter. Only that rank keeps its momentum and updates it.
After that, all ranks gather the parameters; the next forward waits in each layer for the parameters of that layer. The
results are those of the plain loop.
"""

import torch
import torch.nn.functional as F
from train_sequential import batches, build, load, optimizer, report

import aiodist
from aiodist.nn import DataParallel, ShardedOptimizer


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with aiodist.init() as coll:
        net = await DataParallel.create(build(), coll)
        opt = await ShardedOptimizer.create(net, optimizer)  # calls `optimizer(groups)` with this rank's part
        for mine in batches(coll.rank, coll.size):  # (120 / size,)
            await net.step(lambda: F.cross_entropy(net(images[mine]), labels[mine]), opt)
        await opt.flush()  # waits for all parameters

        momentum = sum(state["momentum_buffer"].numel() for state in opt.optimizer.state.values())
        total = sum(parameter.numel() for parameter in net.parameters())
        assert momentum <= -(-total // coll.size) + coll.size  # blocks differ by a few elements
        if coll.rank == 0:
            report(net.module, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
