"""P2: a rank that computes still serves: on its loop's thread, or on a stream, in torch's kernels."""

from __future__ import annotations

import time

import pytest
import torch

from aiodist import Communicator
from aiodist.ps import ParameterServer
from aiodist.streams import HostStream

PULLS = 20
NUMEL = 1 << 18  # 1 MiB
LIMIT = 30.0


def compute_until_served(ps: ParameterServer, goal: int) -> int:
    """Only multiply matrices until `goal` reads were served; return the final number."""
    a, began = torch.rand(600, 600), time.monotonic()
    while ps.statistics().served < goal and time.monotonic() - began < LIMIT:
        a = (a @ a).clamp(0, 1)
    return ps.statistics().served


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, backend=("mpi", "shm"))
@pytest.mark.parametrize("where", ["loop", "stream"])
async def test_p2_who_computes_still_serves(coll: Communicator, where: str) -> None:
    async with ParameterServer(coll, [torch.zeros(NUMEL)], servers=[0], workers=[0, 1]) as ps:
        goal = ps.statistics().served + PULLS
        await ps.barrier()
        if coll.rank == 0:
            if where == "loop":
                assert compute_until_served(ps, goal) >= goal
            else:
                async with HostStream() as stream:
                    assert await stream.submit(compute_until_served, ps, goal) >= goal
        else:
            for _ in range(PULLS):
                await ps.pull()
        await ps.barrier()
