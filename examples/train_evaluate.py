"""Evaluation and checkpoints during training, each in its own asyncio task.

aiodist run -n 2 examples/train_evaluate.py prints on rank 0 the accuracy after every third epoch, and at the end the
output of examples/train_sequential.py; the final weights are in digits.pt

Training passes a copy of its weights to both tasks every third epoch, and continues. Each task has its own thread.
"""

import argparse
import asyncio
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from train_sequential import EPOCHS, HELD_OUT, STEPS, batches, build, load, optimizer, report

import aiodist
from aiodist.nn import DataParallel
from aiodist.streams import HostStream

Weights = dict[str, Tensor]
Copies = asyncio.Queue[tuple[int, Weights]]  # with the number of the finished epoch
EVERY = 3  # epochs


async def train(net: DataParallel, mine: list[Tensor], images: Tensor, labels: Tensor, *readers: Copies) -> None:
    def copy() -> Weights:
        return {name: t.clone() for name, t in net.state_dict().items()}

    opt = optimizer(net.parameters())
    for step, chosen in enumerate(mine, 1):  # (120 / size,)
        x, y = images[chosen], labels[chosen]
        await net.step(lambda: F.cross_entropy(net(x), y), opt)
        if step % (EVERY * STEPS) == 0:
            weights = await net.submit(copy)  # on the compute thread, between two steps
            for reader in readers:
                reader.put_nowait((step // STEPS, weights))


async def evaluate(coll: aiodist.Communicator, copies: Copies, images: Tensor, labels: Tensor) -> None:
    """Evaluate each copy on all ranks together; only this task uses `coll`."""
    net = build()
    x, y = images[coll.rank :: coll.size], labels[coll.rank :: coll.size]
    async with HostStream("evaluation") as stream:
        with torch.no_grad():  # applies to this task and its stream, not to training
            for _ in range(EPOCHS // EVERY):
                epoch, weights = await copies.get()
                net.load_state_dict(weights)
                right = await stream.submit(lambda: int((net(x).argmax(1) == y).sum()))
                total = await coll.allreduce(right)
                if coll.rank == 0:
                    print(f"epoch {epoch}: {total / len(labels):.4f}")


async def write(copies: Copies, file: Path) -> None:
    """Write each copy; readers of `file` always find a complete one."""
    part = file.with_suffix(".part")
    async with HostStream("checkpoints") as stream:
        for _ in range(EPOCHS // EVERY):
            epoch, weights = await copies.get()
            await stream.submit(torch.save, {"epoch": epoch, "weights": weights}, part)
            await stream.submit(part.replace, file)


async def main(file: Path) -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    images, labels = load()  # (1797, 64), (1797,)
    async with aiodist.init() as coll:
        net = await DataParallel.create(build(), coll)
        own = await coll.dup()  # separates the evaluation's messages from the gradients
        to_evaluate, to_write = Copies(), Copies()
        readers = [to_evaluate, to_write] if coll.rank == 0 else [to_evaluate]  # rank 0 writes
        mine = list(batches(coll.rank, coll.size))
        async with asyncio.TaskGroup() as tasks:  # an error in one task cancels the others
            tasks.create_task(train(net, mine, images, labels, *readers))
            tasks.create_task(evaluate(own, to_evaluate, images[-HELD_OUT:], labels[-HELD_OUT:]))
            if coll.rank == 0:
                tasks.create_task(write(to_write, file))
        if coll.rank == 0:
            report(net.module, images, labels)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"), help="where rank 0 writes the weights")
    aiodist.run(main, parser.parse_args().checkpoint)
