"""Training that goes on when ranks are killed, and with a new one: handwritten digits, 1,797 images of 8 x 8 pixels.

aiodist run -n 4 --elastic 2:4 examples/elastic.py                   # two ranks are killed, and one joins
aiodist run -n 2 --elastic 1:2 examples/elastic.py --undisturbed     # ends with the same accuracy

The ranks divide each batch among themselves, and add up their gradients, so the steps are the same for any number of
ranks. Where a rank dies in the middle of a step, that step is done again, or not, where another rank had finished it.
"""

import argparse
import os
import signal
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import aiodist
from aiodist.nn import DataParallel

STEPS, BATCH, RATE, HELD_OUT = 300, 64, 0.1, 360
DEATHS = {(0, 1): 60, (1, 0): 120}
"""Generation and rank of those that are killed, and at which step."""
GROWS_AT = 180


def load() -> tuple[Tensor, Tensor]:
    """Return all images and what they show, shuffled the same way on every rank; the last 360 are held out."""
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
    """Return the numbers of this rank's images in a batch, which depend on the step alone."""
    chosen = torch.randperm(1797 - HELD_OUT, generator=torch.Generator().manual_seed(step))[:BATCH]
    return chosen[coll.rank :: coll.size]  # (64 / size,)


def loss(net: DataParallel, x: Tensor, y: Tensor) -> Tensor:
    """Return this rank's share of the batch's mean; the sum over the ranks is the mean."""
    share: Tensor = F.cross_entropy(net(x), y, reduction="sum") / BATCH
    return share


async def agree(coll: aiodist.Communicator, net: nn.Module, opt: torch.optim.Optimizer, step: int) -> int:
    """Have all ranks go on from the state of one that has come furthest; return its step."""
    steps = await coll.allgather_object(step)
    furthest = steps.index(max(steps))
    mine = (net.state_dict(), opt.state_dict()) if coll.rank == furthest else None
    state: Any = await coll.broadcast_object(mine, root=furthest)
    net.load_state_dict(state[0])
    opt.load_state_dict(state[1])
    return int(max(steps))


async def accuracy(coll: aiodist.Communicator, net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the part of the images that the net knows; each rank looks at its share."""
    with torch.no_grad():
        right = net(images[coll.rank :: coll.size]).argmax(1) == labels[coll.rank :: coll.size]
    return await coll.allreduce(int(right.sum())) / len(labels)


async def main(*, undisturbed: bool) -> None:
    torch.set_num_threads(1)  # these matrices are small, and the ranks share the cores
    images, labels = load()
    module, step = build(), 0
    opt = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    async with aiodist.init(elastic=True) as coll:
        net = None
        while step < STEPS:
            try:
                if net is None:
                    step = await agree(coll, module, opt, step)
                    net = await DataParallel.create(module, coll, op="sum")
                if not undisturbed and DEATHS.get((coll.generation, coll.rank)) == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                mine = batch(step, coll)
                await net.step(partial(loss, net, images[mine], labels[mine]), opt)
                step += 1
                if step == GROWS_AT and not undisturbed:
                    coll, net = await coll.grow(), None
            except aiodist.PeerError as error:
                print(f"step {step}, rank {coll.rank} of {coll.size}: {type(error).__name__}")
                coll, net = await coll.shrink(), None
        figure = await accuracy(coll, module, images[-HELD_OUT:], labels[-HELD_OUT:])
        if coll.rank == 0:
            print(f"{coll.size} ranks in generation {coll.generation}: test accuracy {figure:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--undisturbed", action="store_true", help="kill no rank, and start none")
    aiodist.run(main(undisturbed=parser.parse_args().undisturbed))
