"""Loader workers that are forked or spawned while a reduction is in flight. The ranks run this file as a program."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import aiodist

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(90)
def test_l2_dataloader_workers_beside_a_reduction_with_openmpi() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "openmpi", __file__],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=75,
        check=False,
    )
    lines = done.stdout.splitlines()
    for rank in range(2):
        assert [line for line in lines if line.startswith(f"[{rank}]")] == [
            f"[{rank}] fork, in a thread: 120",
            f"[{rank}] spawn, in a thread: 120",
            f"[{rank}] forkserver, in a thread: 120",
            f"[{rank}] fork, on the loop: 120",
        ], done.stderr
    assert (done.returncode, done.stderr) == (0, "")


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


async def main() -> None:
    async with aiodist.init(report_after=None) as coll:  # a busy machine takes long to start workers
        first, second = await coll.dup(), await coll.dup()
        for method in ("fork", "spawn", "forkserver"):
            async with in_flight(coll, first, second):
                print(f"{method}, in a thread: {await asyncio.to_thread(total, method)}", flush=True)
        async with in_flight(coll, first, second):
            print(f"fork, on the loop: {total('fork')}", flush=True)


@asynccontextmanager
async def in_flight(
    coll: aiodist.Communicator, first: aiodist.Communicator, second: aiodist.Communicator
) -> AsyncIterator[None]:
    """Keep a reduction in flight on each rank: this rank issues it now, and the other one after the block."""
    early, late = (first, second) if coll.rank == 0 else (second, first)
    reductions = [torch.ones(1 << 21), torch.ones(1 << 21)]
    pending = early.allreduce(reductions[0])
    yield
    assert not pending.done()
    await coll.barrier()
    await aiodist.gather(pending, late.allreduce(reductions[1]))
    assert all(t.eq(2).all() for t in reductions)


def total(method: str) -> int:
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=method)
    return sum(int(batch.sum()) for batch in loader)


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["torch"])  # imported once, not by each worker
    aiodist.run(main)
