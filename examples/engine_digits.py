"""The training loop as `aiodist.Engine`: metrics over all ranks, early stopping, and one line per epoch.

aiodist run -n 2 examples/engine_digits.py
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from train_sequential import EPOCHS, HELD_OUT, build, load, optimizer

import aiodist
from aiodist.data import ShardSampler


def accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == labels).double().mean()  # (B, 10), (B,)


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    train, test = TensorDataset(images[:-HELD_OUT], labels[:-HELD_OUT]), (images[-HELD_OUT:], labels[-HELD_OUT:])
    async with aiodist.init() as coll:
        sampler = ShardSampler(train, coll, shuffle=True, drop_last=True)
        held_out = [tuple(t[coll.rank :: coll.size] for t in test)]  # this rank's share, in one batch
        net = await aiodist.nn.DataParallel.create(build(), coll)
        engine = aiodist.Engine(net, optimizer(net.parameters()), F.cross_entropy, metrics={"accuracy": accuracy})

        @engine.on("epoch")
        async def test_it(state: aiodist.engine.State) -> None:
            state.stop = (await engine.test(held_out))["accuracy"] > 0.96  # over all ranks' data: all ranks stop

        await engine.train(DataLoader(train, 120 // coll.size, sampler=sampler), epochs=EPOCHS)
        if coll.rank == 0:
            print(f"stopped after epoch {engine.state.epoch} of {EPOCHS}")


if __name__ == "__main__":
    aiodist.run(main)
