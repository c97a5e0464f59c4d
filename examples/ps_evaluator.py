"""An evaluator during training: a rank that neither works nor serves reads the weights while they change.

aiodist run -n 3 examples/ps_evaluator.py has two workers, which serve too, and one evaluator

A read is a snapshot: all elements of a tensor have one version, even while pushes arrive. All weights of the net are
one tensor here, so the snapshot covers the whole net. A version is a step of training, with the same weights in every
run. The versions that the evaluator sees depend on timing.
"""

import asyncio

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from train_sequential import EPOCHS, HELD_OUT, MOMENTUM, RATE, STEPS, batches, build, load

import aiodist
from aiodist.ps import SGD, ParameterServer, Synchronous


def as_one(net: nn.Module) -> Tensor:
    """Return one tensor of all weights, and make the parameters views of it."""
    weights = parameters_to_vector(net.parameters()).detach()  # (4810,)
    vector_to_parameters(weights, net.parameters())
    return weights


async def work(ps: ParameterServer, net: nn.Module, images: Tensor, labels: Tensor) -> None:
    for mine in batches(ps.workers.index(ps.rank), len(ps.workers)):  # (120 / workers,)
        net.zero_grad()
        loss = F.cross_entropy(net(images[mine]), labels[mine])
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        await ps.push_pull("weights", gradient)


async def evaluate(ps: ParameterServer, images: Tensor, labels: Tensor) -> None:
    net = build()
    weights = as_one(net)
    version, last = 0, EPOCHS * STEPS
    while version < last:
        handle = ps.pull("weights", weights, at_least=min(version + STEPS, last))  # at least one epoch later
        await handle
        version = handle.version or 0
        with torch.no_grad():
            right = net(images).argmax(1) == labels  # (360,)
        print(f"version {version}: test accuracy {right.double().mean():.4f}")


async def main() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    net = build()
    async with aiodist.init() as coll:
        evaluator = coll.size - 1
        rest = range(evaluator or 1)  # a single rank has all roles
        async with (
            ParameterServer(
                coll,
                {"weights": as_one(net)},
                rule=SGD(RATE, MOMENTUM),
                consistency=Synchronous("mean"),
                servers=rest,
                workers=rest,
            ) as ps,
            asyncio.TaskGroup() as tasks,
        ):
            if ps.is_worker:
                tasks.create_task(work(ps, net, images, labels))
            if coll.rank == evaluator:
                tasks.create_task(evaluate(ps, images[-HELD_OUT:], labels[-HELD_OUT:]))


if __name__ == "__main__":
    aiodist.run(main)
