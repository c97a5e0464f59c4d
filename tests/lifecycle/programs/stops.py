"""A rank that is stopped, or killed, at a place within the core: `stops.py stopped`, `stops.py killed PLACE HITS`.

The program needs a core built with CORE_STOPS. Each rank prints its observations.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import torch

import aiodist
from aiodist import _core
from aiodist.testing.seams.world import Limits, opened
from tests.support.programs import say

PLACES = 11  # as many as `enum stop` of lane.h has
PRIVATE = (3, 90, 2000, 20_000, 1 << 21)  # elements of float32: in an entry, in the stage, in portions, by the engine
ARENA = (20_000, 1 << 21)
PATIENT = Limits(drain=10)

CONTINUE = "while ! grep -q '^State:.T' /proc/$1/status; do sleep 0.01; done; sleep 0.05; kill -CONT $1"


def arm(place: int, hits: int, signum: int) -> None:
    ctypes.CDLL(_core.__file__).core_stop_at(place, hits, signum)


def continued() -> subprocess.Popen[bytes]:
    """Start what continues this process once it has stopped, and the others have come as far as they can without it."""
    return subprocess.Popen(["sh", "-c", CONTINUE, "sh", str(os.getpid())])


class Work:
    """Collectives that go each of the core's ways, many at a time."""

    def __init__(self, coll: aiodist.Communicator) -> None:
        self._coll = coll
        self._ts = [*map(torch.empty, PRIVATE), *map(coll.arena_empty, ARENA)]

    async def __call__(self) -> None:
        coll = self._coll
        for t in self._ts:
            t.fill_(1.0 + coll.rank)
        every = coll.allgather(self._ts[2] * 10)
        await aiodist.gather(every, *[coll.allreduce(t) for t in self._ts])
        total = sum(range(1, coll.size + 1))
        assert all(t.min() == t.max() == total for t in self._ts), [{*t.tolist()} for t in self._ts]
        assert [part[-1].item() for part in every.result()] == [10.0 * (r + 1) for r in range(coll.size)]


async def stopped() -> None:
    """One rank after the other stops at one place after the other, and continues."""
    async with opened(PATIENT) as coll:
        work = Work(coll)
        await work()
        for place in range(PLACES):
            await coll.barrier()
            if place % coll.size != coll.rank:
                await work()
                continue
            other = continued()
            arm(place, 1 + place % 3 * 3, signal.SIGSTOP)
            await work()
            if other.wait(10) == 0:
                say("stopped:", place)


async def killed(place: str, hits: str) -> None:
    """The last rank is killed, and the others learn of it."""
    async with opened(PATIENT) as coll:
        work = Work(coll)
        await work()
        try:
            await coll.barrier()  # the last may be killed before the others know that they met
            if coll.rank == coll.size - 1:
                arm(int(place), int(hits), signal.SIGKILL)
            await work()
        except (aiodist.PeerLost, aiodist.RemoteError) as error:
            say("lost:", time.monotonic())
            say("told:", type(error).__name__)
            raise


PROGRAMS: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {"stopped": stopped, "killed": killed}

if __name__ == "__main__":
    aiodist.run(PROGRAMS[sys.argv[1]], *sys.argv[2:])
