"""H1: no operation is forgotten, for any pauses of the loop and the progress thread; 100,000 under `make soak`."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from aiodist import Communicator
from aiodist.testing.seams.progress import progress_thread

_SIZES = (1, 100, 10_000, 300_000, 1 << 20, 3 << 20)
_WEIGHTS = (40, 30, 20, 5, 3, 2)


@contextmanager
def _pauses(draw: random.Random, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The progress thread lingers not at all or briefly, stops now and then, and a thread of pure Python runs."""
    over = threading.Event()
    thread = progress_thread
    look = thread.look

    def paused() -> tuple[float | None, bool]:
        if draw.random() < 0.02:
            time.sleep(draw.choice((0, 1e-4, 2e-3)))
        monkeypatch.setattr(thread, "linger_seconds", draw.choice((0.0, 1e-4, 2e-3, 0.2)))
        return look()

    def compute() -> None:
        while not over.is_set():
            sum(range(300))

    monkeypatch.setattr(thread, "look", paused)
    computing = threading.Thread(target=compute, daemon=True)
    computing.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        over.set()
        computing.join()
        sys.setswitchinterval(before)


async def _hammer(coll: Communicator, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alike, own = random.Random(count), random.Random(coll.rank)
    with _pauses(own, monkeypatch):
        for _ in range(count):
            numel = alike.choices(_SIZES, _WEIGHTS)[0]
            kind = alike.choice(("allreduce", "gather", "broadcast", "allgather", "messages"))
            if own.random() < 0.1:
                await asyncio.sleep(own.choice((0, 1e-4, 1e-3, 5e-3)))
            if own.random() < 0.02:
                time.sleep(own.choice((1e-4, 3e-3)))  # noqa: ASYNC251  - user code that computes on the loop
            t = torch.ones(numel)
            async with asyncio.timeout(30):
                if kind == "messages":
                    after, before = (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
                    await asyncio.gather(coll.send(t, after), coll.recv(torch.empty(numel), before))
                else:
                    await getattr(coll, kind)(t)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("count", [100, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
@pytest.mark.ranks(2, backend=("openmpi", "shm", "gloo"))
async def test_h1_no_wake_up_is_lost(coll: Communicator, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    await _hammer(coll, count, monkeypatch)
