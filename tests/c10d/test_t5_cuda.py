"""The calls of c10d with tensors on simulated CUDA devices."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from aiodist import Communicator
from aiodist.c10d import AiodistProcessGroup, Home
from tests.support.simulated_cuda.device import SimulatedCuda


def use(group: AiodistProcessGroup) -> list[list[float]]:
    rank, size = group.rank(), group.size()
    device = torch.device("cuda", rank % 2)
    t = torch.full((1000,), rank + 1.0, device=device)
    assert group.allreduce([t]).wait()
    seen = [t]
    t = torch.full((3,), float(rank), device=device)
    options = dist.BroadcastOptions()
    options.rootRank = 1
    assert group.broadcast([t], options).wait()
    seen.append(t)
    out = torch.empty(2 * size, device=device)
    assert group.all_gather_single(out, torch.full((2,), float(rank), device=device)).wait()
    seen.append(out)
    out = torch.empty(2, device=device)
    assert group.reduce_scatter_single(out, torch.arange(2.0 * size, device=device)).wait()
    seen.append(out)
    out = torch.empty(2, device=device)
    assert group.alltoall_base(out, torch.full((2,), float(rank), device=device), [], []).wait()
    seen.append(out)
    t = torch.full((4,), float(rank), device=device)
    assert (group.send([t], 1) if rank == 0 else group.recv([t], 0)).wait()
    seen.append(t)
    t = torch.ones(5, device=device)
    [result] = group.allreduce([t]).get_future().wait()
    assert result is t
    seen.append(t)
    assert group.barrier().wait()
    return [t.cpu().tolist() for t in seen]


@pytest.mark.ranks(2)
async def test_t5_calls_with_tensors_on_a_device(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    own = await coll.dup(thread=True)
    store = dist.HashStore()  # type: ignore[attr-defined]
    group = AiodistProcessGroup(own, Home(own), store, timedelta(seconds=30))
    found = await asyncio.to_thread(use, group)
    summed = [[0.0, 2.0], [4.0, 6.0]][coll.rank]
    assert found[:3] == [[3.0] * 1000, [1.0] * 3, [0.0, 0.0, 1.0, 1.0]]
    assert found[3:] == [summed, [0.0, 1.0], [0.0] * 4, [2.0] * 5]
    await own.aclose()
