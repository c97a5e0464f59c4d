"""Elastic training: two ranks are killed, training continues, and a new rank joins.

aiodist run -n 4 --elastic 2:4 examples/elastic.py                   # two ranks are killed, and one joins
aiodist run -n 2 --elastic 1:2 examples/elastic.py --undisturbed     # no rank is killed: the same accuracy

The ranks divide each batch and add up their gradients, so the steps are the same for any number of ranks. When a rank
dies during a step, `net.rebind` gives all ranks the state of the rank with the most steps; `net.steps_done` is their
number. The interrupted step is repeated unless that rank had finished it.
"""

import argparse
import os
import random
import signal
from functools import partial

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import aiodist
from aiodist.nn import DataParallel

STEPS, BATCH, RATE, HELD_OUT = 300, 64, 0.1, 360
GROWS_AT = 200
"""One rank joins at this step, after two were killed."""


def load() -> tuple[Tensor, Tensor]:
    """Return all images and their labels, in the same random order on every rank; the last 360 are held out."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16  # (1797, 8, 8), from 0 to 1
    return images.unsqueeze(1), torch.tensor(digits.target)[order]  # (1797,), from 0 to 9


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),  # (B, 16, 4, 4)
        *(nn.Flatten(), nn.Linear(256, 10)),  # (B, 10)
    )


def batch(step: int, coll: aiodist.Communicator) -> Tensor:
    """Return the indices of this rank's images in a batch; they depend only on the step."""
    chosen = torch.randperm(1797 - HELD_OUT, generator=torch.Generator().manual_seed(step))[:BATCH]
    return chosen[coll.rank :: coll.size]  # (64 / size,)


def loss(net: DataParallel, x: Tensor, y: Tensor) -> Tensor:
    """Return this rank's share of the batch's mean loss; the sum over the ranks is the mean."""
    share: Tensor = F.cross_entropy(net(x), y, reduction="sum") / BATCH
    return share


def dies(draws: random.Random, coll: aiodist.Communicator) -> int | None:
    """Return the step at which this rank is killed in this generation of the world, or None."""
    victim, step = draws.randrange(coll.size), draws.randrange(20, 90)
    return 90 * coll.generation + step if coll.generation < 2 and coll.rank == victim else None


async def accuracy(coll: aiodist.Communicator, net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy on `images`; each rank evaluates its share."""
    with torch.no_grad():
        right = net(images[coll.rank :: coll.size]).argmax(1) == labels[coll.rank :: coll.size]
    return await coll.allreduce(int(right.sum())) / len(labels)


async def main(*, undisturbed: bool, seed: int) -> None:
    torch.set_num_threads(1)  # these matrices are small, and the ranks share the cores
    images, labels = load()
    module, draws = build(), random.Random(seed)
    opt = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    net, dies_at, drawn_in = None, None, -1
    async with aiodist.init(elastic=True) as coll:
        while True:
            try:
                if net is None:  # at the start, and on a rank that joins: it receives the others' state
                    net = await DataParallel.create(module, coll, opt, op="sum")
                await net.rebind(coll, opt)  # has an effect only after the world has changed
                if coll.generation != drawn_in and not undisturbed:
                    dies_at, drawn_in = dies(draws, coll), coll.generation
                if net.steps_done == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if net.steps_done == GROWS_AT and coll.generation == 2 and not undisturbed:
                    coll = await coll.grow()
                    continue
                if net.steps_done == STEPS:  # inside `try`: a rank may have died in the last step
                    figure = await accuracy(coll, module, images[-HELD_OUT:], labels[-HELD_OUT:])
                    break
                mine = batch(net.steps_done, coll)
                await net.step(partial(loss, net, images[mine], labels[mine]), opt)
            except aiodist.PeerError as error:
                where = "before the first step" if net is None else f"step {net.steps_done}"
                print(f"{where}, rank {coll.rank} of {coll.size}: {type(error).__name__}")
                coll = await coll.shrink()
        if coll.rank == 0:
            print(f"{coll.size} ranks in generation {coll.generation}: test accuracy {figure:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--undisturbed", action="store_true", help="kill no rank, and start none")
    parser.add_argument("--seed", type=int, default=0, help="chooses the killed ranks and their steps")
    options = parser.parse_args()
    aiodist.run(main(undisturbed=options.undisturbed, seed=options.seed))
