"""What becomes of shared memory: `memory.py NAME`. Each rank says what it sees."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import torch

import aiodist
from aiodist.world.opening import Limits
from aiodist.world.runtime import opened

NUMEL = 16 << 20  # of float32: 64 MiB
PATIENT = Limits(drain=10)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")  # at once: ranks may share a pipe
    sys.stdout.flush()


def mapped() -> int:
    """Return how many arenas this process maps: its own, and others'."""
    with open("/proc/self/maps") as lines:
        return sum("memfd:aiodist" in line for line in lines)


async def left() -> int:
    """Return how many arenas stay mapped, once the progress thread has looked away too."""
    until = time.monotonic() + 15.0
    while mapped() and time.monotonic() < until:
        await asyncio.sleep(0.001)
        gc.collect()
    return mapped()


def kill() -> None:
    say("mark:", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


async def killed(place: str) -> None:
    """The last rank is killed in the middle of a reduction, over and over the same."""
    try:
        await reduce_for_ever(place)
    except (aiodist.PeerLost, aiodist.RemoteError) as error:
        say("told:", type(error).__name__)
        error.__traceback__ = None  # its frames have the tensor
        say("left:", await left())
        raise


async def reduce_for_ever(place: str) -> None:
    async with opened(PATIENT) as coll:
        t = coll.empty((NUMEL,)) if place == "arena" else torch.empty(NUMEL)
        t.fill_(0)
        await coll.allreduce(t, impl="shm")
        if coll.rank == coll.size - 1:
            threading.Timer(0.15, kill).start()
        try:
            while True:
                await coll.allreduce(t, impl="shm")
        except (aiodist.PeerLost, aiodist.RemoteError):
            say("lost:", time.monotonic())
            raise


async def clean() -> None:
    """Everything goes back: at the end of the block, and with the last tensor. Then once more."""
    for _ in range(2):
        async with opened(PATIENT) as coll:
            assert mapped(), "there is no arena"
            t = coll.empty((1000,)).fill_(1)
            ordinary = torch.ones(1000)
            mixed = t if coll.rank else ordinary
            await coll.allreduce(mixed, impl="shm")
            assert set(mixed.tolist()) == {float(coll.size)}
            pair = await coll.split(coll.rank // 2)
            other = await coll.dup()
            ts = [c.empty((500_000,)).fill_(c.rank) for c in (coll, pair, other) for _ in range(3)]
            comms = [c for c in (coll, pair, other) for _ in range(3)]
            await aiodist.gather(*[c.allreduce(x, impl="shm") for c, x in zip(comms, ts, strict=True) if c.size > 1])
            for c, x in zip(comms, ts, strict=True):
                assert x[0].item() == x[-1].item() == sum(range(c.size))
            await pair.aclose()
            await other.allreduce(ts[-1], impl="shm")
        assert t.numel() == 1000, "a tensor outlives the block"
        try:
            coll.arena(3)
        except aiodist.CommunicatorClosed:
            say("closed: yes")
        del t, ts, mixed, x, c, comms, pair, other, coll
        say("left:", await left())


async def lacking() -> None:
    """One rank has no memory, and goes on."""
    async with opened(PATIENT) as coll:
        t = torch.ones(10)
        if coll.rank:
            try:
                t = coll.empty(1 << 50)
            except MemoryError as error:
                say("lack:", f"{4 << 50} bytes was asked for" in str(error))
            try:
                coll.arena(1 << 50)
            except MemoryError as error:
                say("room:", f"{1 << 50} bytes was asked for" in str(error))
        else:
            coll.arena(1 << 16)
            t = coll.empty(10).fill_(1)
        await coll.allreduce(t, impl="shm")
        say("sum:", t.sum().item())


async def without() -> None:
    """Nobody shares memory: the same calls work."""
    async with opened(PATIENT) as coll:
        t = coll.share_(coll.empty((5,), dtype=torch.float64).fill_(1))
        at = t.data_ptr()
        assert coll.share_(t) is t
        assert t.data_ptr() == at, "it moved"
        coll.arena(100)
        await coll.allreduce(t)
        say("sum:", t.sum().item())
        say("mapped:", mapped())
        try:
            await coll.allreduce(t, impl="shm")
        except aiodist.BackendUnavailable as error:
            say("why:", error)


PROGRAMS: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    program.__name__: program for program in (killed, clean, lacking, without)
}

if __name__ == "__main__":
    main = PROGRAMS[sys.argv[1]]
    aiodist.run(main, *sys.argv[2:])
