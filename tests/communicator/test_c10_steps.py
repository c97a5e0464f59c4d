"""Operations of several native steps stay in order with what is issued behind them."""

from __future__ import annotations

import time

import pytest
import torch

from aiodist import Communicator, gather


@pytest.mark.ranks(2, 3, backend="mpi")
async def test_c10_operations_of_several_steps_keep_their_order(coll: Communicator) -> None:
    """A rank that pauses between two calls makes its second native call before the first operation's second step."""
    for round_ in range(20):
        x = torch.full((coll.rank + 1,), float(coll.rank + round_))
        y = torch.arange(5.0) + coll.rank
        gathered = coll.allgather(x)
        if coll.rank == round_ % coll.size:
            time.sleep(0.003)  # noqa: ASYNC251  - the loop must stand still
        reduced = coll.allreduce(y)
        told = coll.broadcast_object(list(range(500)) if coll.rank == 0 else None)
        large = coll.allreduce(torch.ones(1 << 20))
        objects = coll.allgather_object({"rank": coll.rank, "fill": b"x" * 5000 * coll.rank})
        last = coll.allreduce(coll.rank)
        results = await gather(gathered, reduced, told, large, objects, last)
        for rank, part in enumerate(results[0]):
            assert torch.equal(part, torch.full((rank + 1,), float(rank + round_)))
        assert torch.equal(results[1], torch.arange(5.0) * coll.size + sum(range(coll.size)))
        assert results[2] == list(range(500))
        assert torch.equal(results[3], torch.full((1 << 20,), float(coll.size)))
        assert [o["rank"] for o in results[4]] == list(range(coll.size))
        assert results[5] == sum(range(coll.size))
