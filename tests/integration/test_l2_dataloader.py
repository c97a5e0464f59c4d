"""Loader workers that are forked or spawned while a reduction is in flight. The ranks run this file as a program."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import aiodist

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_l2_dataloader_workers_beside_a_reduction_with_openmpi(method: str) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "aiodist.cli", "run", "-n", "2", "--mpi", "openmpi", __file__, method],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=75,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] loaded twice: 120, 120", "[1] loaded twice: 120, 120"]


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


async def main(method: str) -> None:
    async with aiodist.init() as coll:
        early, late = await coll.dup(), await coll.dup()
        if coll.rank == 1:
            early, late = late, early
        # What a rank issues before it loads, the other issues after it has loaded: so it is in flight meanwhile.
        reductions = [torch.ones(1 << 21), torch.ones(1 << 21)]
        pending = early.allreduce(reductions[0])
        loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=method)
        in_a_thread = await asyncio.to_thread(total, loader)
        assert not pending.done()
        await coll.barrier()
        on_the_loop = total(loader) if method == "fork" else in_a_thread  # the others import torch once more
        assert not pending.done()
        await late.allreduce(reductions[1])
        await pending
        assert all(t.eq(2).all() for t in reductions)
        print(f"loaded twice: {in_a_thread}, {on_the_loop}")


def total(loader: DataLoader[torch.Tensor]) -> int:
    return sum(int(batch.sum()) for batch in loader)


if __name__ == "__main__":
    aiodist.run(main, sys.argv[1])
