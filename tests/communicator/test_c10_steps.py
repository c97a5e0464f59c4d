"""Operations of several native steps stay in order with later operations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from aiodist import Communicator, gather
from aiodist.communicator import parts_of
from aiodist.testing.seams.algorithms import NativeCollectives, Program
from aiodist.testing.seams.progress import transfers
from aiodist.testing.seams.transport import Done


@pytest.mark.thorough
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


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, 3, backend=("openmpi", "mpich"))
async def test_c10_a_library_is_called_in_order_though_a_list_waits_for_more(
    coll: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library knows no bfloat16: that goes by shared memory, whose end a rank hears of late."""
    if coll.rank == 1:
        monkeypatch.setattr(NativeCollectives, "run", _late(coll, NativeCollectives.run))
    known, unknown = torch.arange(300.0) + coll.rank, torch.ones(50_000, dtype=torch.bfloat16)
    together = coll.allreduce([known, unknown])
    if coll.rank == 0:
        time.sleep(0.1)  # noqa: ASYNC251  - the progress thread alone continues the list
    behind = [coll.broadcast(torch.full((count,), float(coll.rank)), 1) for count in (1, 20_000)]
    await gather(together, *behind)
    assert torch.equal(known, torch.arange(300.0) * coll.size + sum(range(coll.size)))
    assert torch.equal(unknown, torch.full_like(unknown, coll.size))
    assert [t.unique().tolist() for t in await gather(*behind)] == [[1.0], [1.0]]


def _late(coll: Communicator, run: Callable[..., Program[None]]) -> Callable[..., Program[None]]:
    """Return `run` with steps in shared memory that take 0.3 s longer."""
    loop = asyncio.get_running_loop()

    def pause(done: Done) -> None:
        loop.call_soon_threadsafe(
            loop.call_later, 0.3, parts_of(coll).dispatcher.progress.with_lock, partial(done, None)
        )

    async def run_late(self: NativeCollectives, *arguments: Any) -> None:
        await run(self, *arguments)
        if self.name == "shm":
            await transfers([(pause,)])

    return run_late
