"""H1, H10: a lane continues while the loop is blocked, and a thread can wait for its operations."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator
from tests.support.blocking import rounds


async def tell(coll: Communicator) -> None:
    """Let the other ranks continue."""
    await aiodist.gather(*[coll.send_object(None, rank) for rank in range(1, coll.size)])


pytestmark = pytest.mark.drawn(2)

processes = pytest.mark.ranks(2, 3, backend=("openmpi", "shm"))


@processes
@pytest.mark.parametrize("numel", [1, 10_000, 3_000_000])
async def test_h10_a_thread_waits_while_the_loop_stands_still(coll: Communicator, numel: int) -> None:
    await coll.barrier()
    t = torch.full((numel,), float(coll.rank))
    handle = coll.allreduce(t)
    seen: list[bool] = []

    def wait() -> None:
        seen.append(bool((handle.wait(30) == sum(range(coll.size))).all()))

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(30)  # the loop stands still
    assert seen == [True]
    assert handle.done()
    assert await handle is t


@processes
async def test_h10_a_thread_that_waits_for_too_short_a_time_is_told(coll: Communicator) -> None:
    t = torch.ones(3)
    if coll.rank == 0:
        handle = coll.allreduce(t)
        with pytest.raises(aiodist.OperationTimeout, match=r"not done within 0\.05 s"):
            await asyncio.to_thread(handle.wait, 0.05)
        await tell(coll)
    else:
        await coll.recv_object(0)
        handle = coll.allreduce(t)
    assert (await handle).tolist() == [coll.size] * 3


@processes
async def test_h4_callbacks_and_several_awaits_of_what_a_lane_does(coll: Communicator) -> None:
    await coll.barrier()
    if coll.rank == 0:
        await rounds()
    handle = coll.allreduce(torch.ones(5))
    told: list[object] = []
    handle.add_done_callback(told.append)
    results = await asyncio.gather(*[asyncio.ensure_future(_awaited(handle)) for _ in range(3)])
    assert all(result is results[0] for result in results)
    await rounds(3)
    assert told == [handle]


async def _awaited(handle: aiodist.Handle[torch.Tensor]) -> torch.Tensor:
    return await handle


@processes
async def test_h1_a_loop_that_does_something_else_is_told_at_once(coll: Communicator) -> None:
    """The loop sleeps: a callback runs when the last rank has come, not when the loop wakes for another reason."""
    await coll.barrier()
    over = asyncio.Event()
    if coll.rank:
        await rounds()
    handle = coll.allreduce(torch.ones(5))
    handle.add_done_callback(lambda _: over.set())
    async with asyncio.timeout(20):
        await over.wait()
    await handle


@processes
async def test_h6_an_await_that_is_cancelled_leaves_the_lane_alone(coll: Communicator) -> None:
    await coll.barrier()
    t = torch.ones(3)
    if coll.rank == 0:
        handle = coll.allreduce(t)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await handle
        with pytest.raises(aiodist.BufferInFlight):
            coll.allreduce(t)
        await tell(coll)
    else:
        await coll.recv_object(0)
        handle = coll.allreduce(t)
    assert (await handle).tolist() == [coll.size] * 3
    await coll.barrier()


@processes
async def test_h7_the_line_of_what_a_lane_does_is_the_users(coll: Communicator) -> None:
    """Through code of aiodist's that has not called anything before."""
    t = torch.ones(7)
    await coll.allreduce(t)  # from now on a lane does it from the call on
    space: dict[str, object] = {}
    inside = f"{Path(aiodist.__file__).parent}/never_seen.py"
    exec(compile("def call(coll, t): return coll.allreduce(t)", inside, "exec"), space)
    call: Any = space["call"]
    handle = call(coll, t)
    assert str(handle.origin).startswith(f"{__file__}:")
    await handle


@pytest.mark.ranks(3, backend=("openmpi", "shm"))
async def test_c10_memory_is_free_when_it_is_known_that_ranks_differ(coll: Communicator) -> None:
    """Though one of them has not come yet."""
    other = await coll.dup()
    await other.allreduce(torch.ones(4))
    t = torch.full((4,), float(coll.rank))
    if coll.rank == 2:
        await aiodist.gather(*[coll.recv_object(rank) for rank in (0, 1)])
    with pytest.raises(aiodist.MismatchError, match="max"):
        await other.allreduce(t, op="max" if coll.rank == 1 else "sum")
    if coll.rank < 2:
        await coll.send_object("raised", 2)
    assert t.eq(coll.rank).all()
    assert (await coll.allreduce(t)).tolist() == [3.0] * 4
    await other.allreduce(t)
