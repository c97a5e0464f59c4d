"""An elastic world that MPI carries at first, whose ranks are killed at any moment: `elastic_mpi.py SEED DEATHS GROWS`.

All ranks draw the same operations; each result is checked. Once it has lost its DEATHS, the world grows by GROWS.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch

import aiodist
from aiodist import Communicator
from aiodist.types import Impl
from tests.support.programs import say

STEPS = 60
SIZES = (1, 7, 1000, 5000, 40_000, 300_001, 1 << 20, (1 << 22) + 3)
SEED, DEATHS, GROWS = map(int, sys.argv[1:]) if __name__ == "__main__" else (0, 0, 0)  # pytest looks for doctests


def die_some_time(rank: int, size: int) -> None:
    """Start a thread that kills this process, if the process is one of those that die."""
    draw = random.Random(SEED)
    for victim in draw.sample(range(size), DEATHS):
        seconds = draw.uniform(0.0, 0.8)
        if victim == rank:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def mapped() -> set[str]:
    """Return the files of Open MPI's shared memory."""
    return {line.split()[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/sm_segment." in line}


def check(t: torch.Tensor, value: float) -> None:
    if not bool((t == value).all()):
        raise ValueError(f"expected {value}, found {t}")


async def operate(coll: Communicator, dup: Communicator, draw: random.Random) -> None:
    """Do one operation, or several at once."""
    size, me = coll.size, coll.rank
    numel, root, kind = draw.choice(SIZES), draw.randrange(size), draw.randrange(7)
    impl: Impl = "auto" if coll.generation else "mpi"
    total = size * (size + 1) / 2
    if kind == 0:
        check(await coll.allreduce(torch.full((numel,), float(me + 1)), impl=impl), total)
    elif kind == 1:
        check(await coll.broadcast(torch.full((numel,), float(me)), root=root, impl=impl), root)
    elif kind == 2:
        sent = coll.send(torch.full((numel,), float(me)), (me + 1) % size, tag=3)
        got = coll.recv(torch.empty(numel), (me - 1) % size, tag=3)
        await aiodist.gather(sent, got)
        check(got.result(), (me - 1) % size)
    elif kind == 3:
        sizes = [draw.choice(SIZES[:6]) for _ in range(8)]
        for t in await aiodist.gather(*[coll.allreduce(torch.full((n,), me + 1.0), impl=impl) for n in sizes]):
            check(t, total)
    elif kind == 4:
        check(await dup.allreduce(torch.full((numel,), float(me + 1))), total)
    elif kind == 5:
        for rank, t in enumerate(await coll.allgather(torch.full((5,), float(me)), impl=impl)):
            check(t, rank)
    else:
        half = await coll.split(me % 2)
        check(await half.allreduce(torch.ones(100)), half.size)
        await half.aclose()


async def main() -> None:
    step, fresh = 0, True
    async with aiodist.init(elastic=True) as coll:
        started = coll.generation == 0
        full, grown = coll.size, not started
        if started:
            say("mapped:", *sorted(mapped()))
            die_some_time(coll.rank, coll.size)
        while True:
            try:
                if fresh:
                    told = await coll.allgather_object((step, grown, full if started else 0))
                    step, grown, full = max(s for s, *_ in told), any(g for _, g, _ in told), max(f for *_, f in told)
                    dup, fresh = await coll.dup(), False
                complete = coll.size == full - DEATHS + (GROWS if grown else 0)
                if complete and step >= STEPS and (grown or not GROWS):
                    await coll.barrier()
                    break
                await operate(coll, dup, random.Random(f"{SEED} {step} {coll.generation}"))
                step += 1
                if complete and GROWS and not grown and step >= STEPS // 2:
                    coll = await coll.grow(GROWS)
                    fresh = grown = True
            except aiodist.PeerLost as error:
                say("lost:", error.lost)
                coll, fresh = await coll.shrink(), True
        say("right:", coll.rank, coll.size)


if __name__ == "__main__":
    aiodist.run(main)
