"""Model and data parallelism: two ranks share each model, and each model trains on its own data.

aiodist run -n 4 examples/model_parallel.py

The first layer is divided by its outputs and the second by its inputs. Ranks that share a model therefore add up once
per forward. Gradients are averaged over the ranks that have the same part. The steps are those of train_sequential.py,
and so are the final weights.
"""

import torch
import torch.nn.functional as F
from torch import nn
from train_sequential import batches, load, optimizer, report
from train_sequential import build as build_whole

import aiodist
from aiodist.nn import ColumnLinear, DataParallel, RowLinear, full_state_dict


def build(sharing: aiodist.Communicator) -> nn.Sequential:
    """Return this rank's part of the model. Every rank draws the whole model, so all need the same seed."""
    torch.manual_seed(0)
    return nn.Sequential(
        ColumnLinear(64, 64, sharing, gather_output=False),  # (B, 64) -> (B, 32) on each of two ranks
        nn.ReLU(),
        RowLinear(64, 10, sharing, split_input=True),  # (B, 32) -> (B, 10) on both
    ).double()


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with aiodist.init() as coll:
        share = 1 if coll.size % 2 else 2
        grid = await coll.hierarchy(str(coll.rank // share))  # level 1: the ranks that share a model
        models = grid[1].inter  # the ranks with the same part, one per model
        # Layers communicate from the compute thread, so they need a separate communicator.
        module = build(await grid[1].intra.dup(thread=True))
        net = await DataParallel.create(module, models)
        opt = optimizer(net.parameters())
        for mine in batches(models.rank, models.size):  # (120 / models,)
            await net.step(lambda: F.cross_entropy(net(images[mine]), labels[mine]), opt)

        whole = build_whole()
        whole.load_state_dict(await full_state_dict(module))
        if coll.rank == 0:
            report(whole, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
