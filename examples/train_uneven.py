"""Ranks with different amounts of data: rank 1 has twice as many images as rank 0, rank 2 three times as many.

aiodist run -n 2 examples/train_uneven.py prints on rank 0, before the accuracy, `batches of each rank: [64, 128]`

A rank that has used its data waits at the end of `net.join()`. The other ranks continue and average among themselves.
At the end all ranks have the same weights.
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from train_sequential import HELD_OUT, build, load, optimizer, report

import aiodist
from aiodist.nn import DataParallel, assert_synchronized


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with aiodist.init() as coll:
        parts = coll.size * (coll.size + 1) // 2  # 1 + 2 + ... + size; this rank has rank + 1 of them
        first = coll.rank * (coll.rank + 1) // 2
        each = (len(images) - HELD_OUT) // parts
        mine = slice(first * each, (first + coll.rank + 1) * each)
        loader = DataLoader(TensorDataset(images[mine], labels[mine]), batch_size=60)

        net = await DataParallel.create(build(), coll)
        opt = optimizer(net.parameters())
        made = 0
        for _ in range(8):
            async with net.join():
                for x, y in loader:  # (60, 64), (60,)
                    await net.step(lambda: F.cross_entropy(net(x), y), opt)
                    made += 1

        await assert_synchronized(net.module, coll)
        counts = await coll.allgather_object(made)
        if coll.rank == 0:
            print(f"batches of each rank: {counts}")
            report(net.module, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
