"""A5: a message wakes the loop of a parked rank itself, and is read though the loop is busy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

from aiodist import Communicator
from aiodist.handles import Progress
from aiodist.testing.seams.progress import progress_thread
from tests.support.blocking import blocked_until

Until = Callable[[Callable[[], object]], Awaitable[None]]

pytestmark = pytest.mark.timeout(90)


@pytest.mark.ranks(2, 3, backend="shm")
async def test_a5_a_message_wakes_the_loop_with_no_help_of_a_thread(
    coll: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_thread, "look", lambda: (1e-3, True))  # it listens, and reads nothing
    async with asyncio.timeout(60):
        for turn in range(10 * coll.size):
            sender, receiver = turn % coll.size, (turn + 1) % coll.size
            await coll.barrier()
            if coll.rank == sender:
                await asyncio.sleep(0.005)  # the receiver parks meanwhile
                await coll.send(torch.full((5,), float(turn)), receiver, 3)
            elif coll.rank == receiver:
                assert (await coll.recv(torch.full((5,), -1.0), sender, 3)).tolist() == [turn] * 5
        await coll.barrier()


@pytest.mark.ranks(2, backend="shm")
async def test_a5_a_message_for_a_loop_that_parked_and_is_busy_is_read(coll: Communicator, until: Until) -> None:
    for turn in range(10):
        await coll.barrier()
        if coll.rank == turn % 2:
            await asyncio.sleep(0.02)
            await coll.send(torch.full((5,), float(turn)), 1 - coll.rank, 3)
        else:
            t = torch.full((5,), -1.0)
            received = coll.recv(t, 1 - coll.rank, 3)
            # On a busy machine the message may come before the loop parks.
            await until(lambda: Progress.current().pace.name == "PARKED" or received.done())  # noqa: B023
            assert blocked_until(lambda: t[0] == turn, 10)  # noqa: B023  - called at once
            await received


@pytest.mark.ranks(2, backend="shm")
async def test_a5_a_parked_rank_costs_few_looks(coll: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    look = progress_thread.look

    def counted() -> tuple[float | None, bool]:
        nonlocal looks
        looks += 1
        return look()

    t = torch.full((5,), -1.0)
    await coll.barrier()
    if coll.rank == 0:
        await asyncio.sleep(1.0)
        await coll.send(torch.ones(5), 1)
    else:
        received = coll.recv(t, 0)
        await asyncio.sleep(0.1)
        monkeypatch.setattr(progress_thread, "look", counted)
        await received
        assert looks < 150, "one a millisecond would be 900"
    await coll.barrier()
