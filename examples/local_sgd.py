"""Local SGD: ranks train separately and average their parameters every few steps, which sends fewer bytes.

aiodist run -n 2 examples/local_sgd.py

Each line is one training: the megabytes sent and the test accuracy. The first training reduces gradients in every
step. With `overlap`, an average is in flight while the next steps compute.
"""

from typing import Any

import torch
import torch.nn.functional as F
from train_sequential import HELD_OUT, batches, build, load

import aiodist
from aiodist.nn import DataParallel, Elastic, LocalSGD, SlowMo

PASSES = 2  # over the batches of train_sequential.py
EVERY = 8  # steps


def nesterov(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.7, momentum=0.6, nesterov=True)


WAYS: dict[str, dict[str, Any]] = {
    "gradients in every step": {"every": 1},
    "averages": {"every": EVERY},
    "averages, post-local": {"every": EVERY, "start": 2 * EVERY},
    "averages that overlap": {"every": EVERY, "overlap": True},
    "slow momentum": {"every": EVERY, "outer": SlowMo(momentum=0.5)},
    "an outer optimizer (DiLoCo)": {"every": EVERY, "outer": nesterov},
    "an elastic band (EASGD)": {"every": EVERY, "outer": Elastic(alpha=0.3)},
}


async def train(coll: aiodist.Communicator, how: dict[str, Any]) -> DataParallel:
    images, labels = load()  # (1797, 64), (1797,)
    net = await DataParallel.create(build(), coll)
    local = await LocalSGD.create(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), **how)
    for _ in range(PASSES):
        for mine in batches(coll.rank, coll.size):  # (120 / size,)
            x, y = images[mine], labels[mine]
            await net.step(lambda x=x, y=y: F.cross_entropy(net(x), y), local)
    await local.flush()  # all ranks have the same parameters now; with EASGD they are the centre
    return net


def accuracy(net: DataParallel) -> float:
    """Return the accuracy of the net on the held-out images."""
    images, labels = load()
    with torch.no_grad():
        right = net(images[-HELD_OUT:]).argmax(1) == labels[-HELD_OUT:]  # (360,)
    return float(right.double().mean())


async def main() -> None:
    torch.set_num_threads(1)  # these matrices are small, and the ranks share the cores
    async with aiodist.init() as coll:
        for name, how in WAYS.items():
            net = await train(coll, how)
            if coll.rank == 0:
                print(f"{name}: {net.statistics().nbytes / 1e6:.1f} MB, test accuracy {accuracy(net):.4f}")
            await net.aclose()


if __name__ == "__main__":
    aiodist.run(main)
