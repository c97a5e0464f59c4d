"""A job written with aiodist: loader, evaluation and checkpoints are tasks beside training.

aiodist run -n 2 -m benchmarks.jobs_aiodist digits
"""

from __future__ import annotations

import asyncio
import copy
import sys
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import aiodist
from aiodist import data, nn
from benchmarks.jobs import JOBS, Job, Outcome, save

_States = asyncio.Queue[dict[str, Tensor] | None]


async def train(job: Job, coll: aiodist.Communicator, folder: Path) -> Outcome:
    """Train with all ranks of `coll`; the other tasks run beside it."""
    net = await nn.DataParallel.create(job.build(), coll)
    optimizer = job.optimizer(net.parameters())
    sampler: DistributedSampler[Any] = DistributedSampler(job.data, coll.size, coll.rank, drop_last=True)
    loader: DataLoader[Any] = DataLoader(job.data, job.batch, sampler=sampler, drop_last=True)
    to_evaluate, to_write = _States(), _States()
    beside = await coll.dup()
    async with asyncio.TaskGroup() as tasks:
        evaluating = tasks.create_task(evaluate(job, beside, to_evaluate))
        writing = tasks.create_task(write(folder, to_write))
        step = 0
        for epoch in range(job.epochs):
            sampler.set_epoch(epoch)
            async with data.prefetch(loader, depth=2) as batches:
                async for x, y in batches:
                    await net.step(partial(job.loss, net, x, y), optimizer)
                    step += 1
                    if step % job.every == 0:
                        state = copy.deepcopy(net.state_dict())
                        to_evaluate.put_nowait(state)
                        if coll.rank == 0:
                            to_write.put_nowait(state)
        to_evaluate.put_nowait(None)
        to_write.put_nowait(None)
    await net.aclose()
    await beside.aclose()
    return Outcome(evaluating.result(), writing.result())


async def evaluate(job: Job, coll: aiodist.Communicator, states: _States) -> list[float]:
    """Return the accuracy of each state, until there is none; every rank looks at its share."""
    model, accuracies = job.build(), []
    while (state := await states.get()) is not None:
        model.load_state_dict(state)
        right = await asyncio.to_thread(job.correct, model, coll.rank, coll.size)
        accuracies.append(await coll.allreduce(right) / job.answers)
    return accuracies


async def write(folder: Path, states: _States) -> int:
    """Write each state as a checkpoint and return how many there were."""
    written = 0
    while (state := await states.get()) is not None:
        await asyncio.to_thread(save, state, folder / f"{written}.pt")
        written += 1
    return written


async def main() -> None:
    """Run the job that the command line names."""
    async with aiodist.init() as coll:
        outcome = await train(JOBS[sys.argv[1]](), coll, Path())
        if coll.rank == 0:
            print(outcome)  # noqa: T201


if __name__ == "__main__":
    aiodist.run(main)
