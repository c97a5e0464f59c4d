"""A job written with DDP, DataLoader and threads: loader, evaluation and checkpoints beside training.

torchrun --nproc-per-node 2 -m benchmarks.jobs_ddp digits
"""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.jobs import JOBS, Job, Outcome, save

_States = Queue[dict[str, Tensor] | None]


def train(job: Job, folder: Path, workers: int = 1) -> Outcome:
    """Train with all ranks of the default process group; evaluation and writer are threads beside it.

    The loader prepares batches in `workers` processes, with 0 in the loop.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    net = DistributedDataParallel(job.build(), gradient_as_bucket_view=True)
    optimizer = job.optimizer(net.parameters())
    sampler: DistributedSampler[Any] = DistributedSampler(job.data, size, rank, drop_last=True)
    loader: DataLoader[Any] = DataLoader(
        job.data, job.batch, sampler=sampler, drop_last=True, num_workers=workers, persistent_workers=workers > 0
    )
    to_evaluate, to_write = _States(), _States()
    accuracies: list[float] = []
    written: list[Path] = []
    beside = dist.new_group()
    threads = [
        threading.Thread(target=evaluate, args=(job, job.build(), beside, to_evaluate, accuracies)),
        threading.Thread(target=write, args=(folder, to_write, written)),
    ]
    for thread in threads:
        thread.start()
    step = 0
    try:
        for epoch in range(job.epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                job.loss(net, x, y).backward()
                optimizer.step()
                step += 1
                if step % job.every == 0:
                    state = copy.deepcopy(net.module.state_dict())
                    to_evaluate.put(state)
                    if rank == 0:
                        to_write.put(state)
    finally:
        to_evaluate.put(None)
        to_write.put(None)
        for thread in threads:
            thread.join()
        dist.destroy_process_group(beside)
    return Outcome(accuracies, len(written))


def evaluate(job: Job, model: nn.Module, group: dist.ProcessGroup, states: _States, accuracies: list[float]) -> None:
    """Find the accuracy of each state, until there is none; every rank looks at its share."""
    while (state := states.get()) is not None:
        model.load_state_dict(state)
        right = torch.tensor(job.correct(model, dist.get_rank(), dist.get_world_size()))
        dist.all_reduce(right, group=group)
        accuracies.append(int(right) / job.answers)


def write(folder: Path, states: _States, written: list[Path]) -> None:
    """Write each state as a checkpoint."""
    while (state := states.get()) is not None:
        written.append(folder / f"{len(written)}.pt")
        save(state, written[-1])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    outcome = train(JOBS[sys.argv[1]](), Path())
    if dist.get_rank() == 0:
        print(outcome)  # noqa: T201
    dist.destroy_process_group()
