"""Data-parallel training on scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels.

aiodist run -n 2 examples/train_digits.py

Each rank computes the gradients of its part of every batch. aiodist adds them up over all ranks during backward, while
a thread prepares the next batch. The steps are the same for any number of ranks, and all ranks end with the same
weights.
"""

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn

import aiodist
from aiodist.data import prefetch
from aiodist.nn import DataParallel, assert_synchronized

EPOCHS, BATCH, RATE, HELD_OUT = 14, 64, 0.1, 360
STEPS = (1797 - HELD_OUT) // BATCH  # per epoch


def load() -> tuple[Tensor, Tensor]:
    """Return all images and their labels, in the same random order on every rank; the last 360 are held out."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16  # (1797, 8, 8), from 0 to 1
    return images.unsqueeze(1), torch.tensor(digits.target)[order]  # (1797,), from 0 to 9


def batches(images: Tensor, labels: Tensor, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's part of each batch, shifted by up to one pixel."""
    random = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        order = torch.randperm(len(labels), generator=random)  # the same on every rank
        for chosen in order[: STEPS * BATCH].split(BATCH):  # (64,)
            mine = chosen[rank::size]  # (64 / size,)
            down, right = torch.randint(-1, 2, (2,), generator=random).tolist()
            yield images[mine].roll((down, right), (2, 3)), labels[mine]  # (64 / size, 1, 8, 8), (64 / size,)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),  # (B, 16, 8, 8)
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),  # (B, 32, 4, 4)
        *(nn.Flatten(), nn.Linear(512, 10)),  # (B, 10)
    )


async def train(net: DataParallel, source: Iterator[tuple[Tensor, Tensor]], *, show: bool) -> None:
    opt = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, RATE, EPOCHS * STEPS)
    async with prefetch(source) as ready:
        for _ in track(range(EPOCHS * STEPS), "training", disable=not show):
            x, y = await anext(ready)
            # This rank's share of the batch's mean; the sum over the ranks is the mean.
            await net.step(lambda: F.cross_entropy(net(x), y, reduction="sum") / BATCH, opt)
            schedule.step()


async def accuracy(coll: aiodist.Communicator, net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy on `images`; each rank evaluates its share."""
    with torch.no_grad():
        right = net(images[coll.rank :: coll.size]).argmax(1) == labels[coll.rank :: coll.size]
    return await coll.allreduce(int(right.sum())) / len(labels)


async def main(file: Path) -> None:
    torch.set_num_threads(1)  # these matrices are small, and the ranks share the cores
    images, labels = load()
    async with aiodist.init() as coll:
        net = await DataParallel.create(build(), coll, op="sum")  # all ranks start with rank 0's weights
        mine = batches(images[:-HELD_OUT], labels[:-HELD_OUT], coll.rank, coll.size)
        await train(net, mine, show=coll.rank == 0)
        await assert_synchronized(net.module, coll, rtol=0)
        figure = await accuracy(coll, net.module, images[-HELD_OUT:], labels[-HELD_OUT:])
        if coll.rank == 0:
            await asyncio.to_thread(torch.save, net.state_dict(), file)
            print(f"test accuracy {figure:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"), help="where rank 0 writes the weights")
    aiodist.run(main, parser.parse_args().checkpoint)
