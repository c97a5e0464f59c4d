"""Data-parallel training on scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels.

aiodist run -n 2 examples/train_digits.py

Each rank computes the gradients of its part of every batch, and all ranks add theirs up while the next batch is
prepared in a thread. So they take the same steps, with any number of ranks, and end with the same weights.
"""

import argparse
import asyncio
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from sklearn.datasets import load_digits
from torch import Tensor, nn

import aiodist

EPOCHS, BATCH, RATE, HELD_OUT = 12, 64, 0.1, 360
STEPS = (1797 - HELD_OUT) // BATCH  # an epoch


def load() -> tuple[Tensor, Tensor]:
    """Return all images and what they show, shuffled the same way on every rank; the last 360 are held out."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16  # (1797, 8, 8), from 0 to 1
    return images.unsqueeze(1), torch.tensor(digits.target)[order]  # (1797,), from 0 to 9


def prepare(images: Tensor, labels: Tensor, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return this rank's part of batch `step`, moved by up to one pixel each way; runs in a thread."""
    epoch, batch = divmod(step, STEPS)
    random = torch.Generator().manual_seed(epoch)
    chosen = torch.randperm(len(labels), generator=random)[batch * BATCH :][:BATCH]  # (64,): the same on every rank
    mine = chosen[rank::size]  # (64 / size,)
    down, right = torch.randint(-1, 2, (2,), generator=random.manual_seed(step)).tolist()
    return images[mine].roll((down, right), (2, 3)), labels[mine]  # (64 / size, 1, 8, 8), (64 / size,)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),  # (B, 16, 8, 8)
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),  # (B, 32, 4, 4)
        *(nn.Flatten(), nn.Linear(512, 10)),  # (B, 10)
    )


def save(state: dict[str, Any], file: Path) -> None:
    """Write the checkpoint beside `file` and put it in its place at once; runs in a thread."""
    part = file.with_suffix(".part")
    torch.save(state, part)
    part.replace(file)


async def train(coll: aiodist.Communicator, net: nn.Module, images: Tensor, labels: Tensor, file: Path) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, EPOCHS * STEPS)
    pending: list[aiodist.Handle[Tensor]] = []  # reductions of gradients, in flight

    def reduce(parameter: Tensor) -> None:
        assert parameter.grad is not None
        pending.append(coll.allreduce(parameter.grad))

    for parameter in net.parameters():  # called in the middle of backward, last layer first, on every rank alike
        parameter.register_post_accumulate_grad_hook(reduce)

    def begin(step: int) -> asyncio.Task[tuple[Tensor, Tensor]]:
        return asyncio.create_task(asyncio.to_thread(prepare, images, labels, step, coll.rank, coll.size))

    batch = begin(0)
    with Progress(disable=coll.rank != 0) as bar:
        for step in bar.track(range(EPOCHS * STEPS), description="training"):
            x, y = await batch
            batch = begin(step + 1)  # prepared while this one trains
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y, reduction="sum") / BATCH  # this rank's share of the batch's mean
            loss.backward()
            await aiodist.gather(*pending)  # now every gradient is the whole batch's
            pending.clear()
            optimizer.step()
            schedule.step()
            epoch, left = divmod(step + 1, STEPS)
            if coll.rank == 0 and left == 0 and epoch % 4 == 0:
                bar.console.print(f"epoch {epoch} of {EPOCHS}, writing {file}")
                await asyncio.to_thread(save, net.state_dict(), file)
    await batch


async def accuracy(coll: aiodist.Communicator, net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the part of the images that the net knows; each rank looks at its share."""
    with torch.no_grad():
        right = net(images[coll.rank :: coll.size]).argmax(1) == labels[coll.rank :: coll.size]
    return await coll.allreduce(int(right.sum())) / len(labels)


async def main(file: Path) -> None:
    torch.set_num_threads(1)  # these matrices are small, and the ranks share the cores
    images, labels = load()
    net = build()
    async with aiodist.init() as coll:
        await coll.broadcast([p.detach() for p in net.parameters()], root=0)  # all begin with rank 0's weights
        await train(coll, net, images[:-HELD_OUT], labels[:-HELD_OUT], file)
        figure = await accuracy(coll, net, images[-HELD_OUT:], labels[-HELD_OUT:])

        weights = torch.cat([p.detach().flatten() for p in net.parameters()])  # (9930,)
        if any(not torch.equal(weights, other) for other in await coll.allgather(weights)):
            raise RuntimeError("the ranks ended with different weights")
        if coll.rank == 0:
            print(f"test accuracy {figure:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"), help="where rank 0 writes the weights")
    aiodist.run(main, parser.parse_args().checkpoint)
