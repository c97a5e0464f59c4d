"""H1: what an await costs, as counts: Python calls, objects left behind, wake-ups. Times depend on the machine."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from aiodist import Communicator
from aiodist.testing.seams.progress import progress_thread

if TYPE_CHECKING:
    from types import FrameType


pytestmark = pytest.mark.drawn(1)

MOST_CALLS = {"mpi": 30, "gloo": 35, "shm": 90}
"""By backend: the Python functions that an allreduce of 4 B calls, and some more."""


class Calls:
    """Counts the Python functions that this thread calls."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Calls:
        self.count = 0
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event == "call"


@pytest.mark.thorough
@pytest.mark.ranks(2, backend=("mpi", "gloo", "shm"))
async def test_h1_an_await_calls_few_functions(coll: Communicator) -> None:
    """The fewest of many: at times the other rank is late, and is looked for."""
    t, calls = torch.ones(1), Calls()
    issued = []
    for _ in range(300):
        with calls:
            handle = coll.allreduce(t)
        issued.append(calls.count)
        await handle
    assert min(issued) <= MOST_CALLS[coll.backend]
    again = []
    for _ in range(10):  # once in a millisecond an await lets the loop have a turn
        with calls:
            await handle  # has finished
        again.append(calls.count)
    assert min(again) <= 3


@pytest.mark.thorough
@pytest.mark.ranks(2, backend=("mpi", "gloo", "shm"))
async def test_h1_awaits_leave_nothing_behind(coll: Communicator) -> None:
    t = torch.ones(1)

    async def blocks_after(count: int) -> int:
        for _ in range(count):
            await coll.allreduce(t)
        await coll.barrier()
        gc.collect()
        return sys.getallocatedblocks()

    await blocks_after(6000)  # the oplog and other rings are full
    grown = [-await blocks_after(0) + await blocks_after(1000) for _ in range(3)]
    assert min(grown) < 200, grown  # less than one for five awaits


@pytest.mark.ranks(2, backend=("gloo", "shm"))
async def test_h1_a_long_wait_wakes_the_thread_seldom(coll: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the other rank rings a doorbell, the progress thread polls every millisecond at most."""
    await coll.barrier()
    if coll.rank == 1:
        await coll.recv_object(0)
        await coll.allreduce(1)
    else:
        waiting = coll.allreduce(1)
        # The thread polls for a while before it sleeps; the polls after that are counted.
        seconds = await asyncio.to_thread(_time_passes, monkeypatch, 500, 500)
        await coll.send_object("counted", 1)
        assert await waiting == 2
        assert seconds > 500 / 1500, "it looks more often than every millisecond"  # a promise of seconds: H1


def _time_passes(monkeypatch: pytest.MonkeyPatch, skipped: int, count: int) -> float:
    """Return the seconds in which the progress thread polls `count` times."""
    look = progress_thread.look
    times: list[float] = []
    enough = threading.Event()

    def timed() -> tuple[float | None, bool]:
        times.append(time.monotonic())
        if len(times) > skipped + count:
            enough.set()
        return look()

    with monkeypatch.context() as patch:
        patch.setattr(progress_thread, "look", timed)
        assert enough.wait(30), f"it looked {len(times)} times"
    return times[skipped + count] - times[skipped]
