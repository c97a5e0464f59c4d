"""Prefetch: a thread prepares the next batches while the current one trains.

aiodist run -n 2 examples/train_prefetch.py prints on rank 0 the output of examples/train_sequential.py, and before it
a line like

    preparing took 0.09 s, 93% of it hidden

The images are stored compressed, like files. torch's own `DataLoader` reads them.
"""

import zlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from train_sequential import batches, build, load, optimizer, report

import aiodist
from aiodist.data import prefetch
from aiodist.nn import DataParallel


class Compressed(Dataset[tuple[Tensor, Tensor]]):
    """Compressed images, as if read from files."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.files = [zlib.compress(image.numpy().tobytes()) for image in images]
        self.labels = labels

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        pixels = bytearray(zlib.decompress(self.files[i]))
        return torch.frombuffer(pixels, dtype=torch.float64), self.labels[i]  # (64,), ()


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with aiodist.init() as coll:
        net = await DataParallel.create(build(), coll)
        opt = optimizer(net.parameters())
        mine = [numbers.tolist() for numbers in batches(coll.rank, coll.size)]
        loader = DataLoader(Compressed(images, labels), batch_sampler=mine)

        async with prefetch(loader, depth=2) as ready:  # the loader runs in a thread, two batches ahead
            async for x, y in ready:  # (120 / size, 64), (120 / size,)
                await net.step(lambda: F.cross_entropy(net(x), y), opt)

        if coll.rank == 0:
            spent = ready.statistics()
            print(f"preparing took {spent.reading_seconds:.2f} s, {spent.hidden:.0%} of it hidden")
            report(net.module, images, labels)


if __name__ == "__main__":
    aiodist.run(main)
