"""Training whose weights are the same to the bit on 1, 2, 4 and 8 ranks.

aiodist run -n 4 examples/reproducible.py

Each batch is eight micro-batches, which the ranks share. `across=True` sums the gradients of all micro-batches in one
fixed tree, whichever rank has them. So the digest of the weights depends on this machine and torch, not on the ranks.
"""

import hashlib

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import aiodist

EPOCHS, PARTS, PART, HELD_OUT = 5, 8, 8, 360  # eight micro-batches of eight images


def load() -> tuple[Tensor, Tensor]:
    """Return all images and labels in one order; the last 360 are held out."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16  # (1797, 64), from 0 to 1
    return images, torch.tensor(digits.target)[order]  # (1797,), from 0 to 9


def gradient(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of one micro-batch as one vector."""
    return torch.cat([g.view(-1) for g in torch.autograd.grad(F.cross_entropy(net(x), y), tuple(net.parameters()))])


async def train(coll: aiodist.Communicator, net: nn.Module, images: Tensor, labels: Tensor) -> None:
    mine = range(PARTS * coll.rank // coll.size, PARTS * (coll.rank + 1) // coll.size)  # micro-batches of this rank
    weights = parameters_to_vector(net.parameters()).detach()
    total, velocity = torch.empty_like(weights), torch.zeros_like(weights)
    random = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        order = torch.randperm(len(labels), generator=random)  # the same on every rank
        for batch in order.split(PARTS * PART)[:-1]:
            parts = [gradient(net, images[at], labels[at]) for at in (batch.split(PART)[i] for i in mine)]
            await coll.allreduce(parts, "mean", across=True, out=total)
            velocity = 0.9 * velocity + total
            weights -= 0.2 * velocity
            vector_to_parameters(weights, net.parameters())


async def main() -> None:
    torch.set_num_threads(1)  # more threads cut a sum as the machine has cores, and round it otherwise
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    images, labels = load()
    async with aiodist.init(reproducible=True) as coll:
        await train(coll, net, images[:-HELD_OUT], labels[:-HELD_OUT])
        weights = parameters_to_vector(net.parameters()).detach()
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
        assert set(await coll.allgather_object(digest)) == {digest}  # all ranks have the same weights
        right = (net(images[-HELD_OUT:]).argmax(1) == labels[-HELD_OUT:]).sum()
        coll.print(f"weights {digest[:16]}, test accuracy {right / HELD_OUT:.4f}")


if __name__ == "__main__":
    aiodist.run(main)
