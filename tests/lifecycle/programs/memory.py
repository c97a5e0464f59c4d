"""The fate of shared memory: `memory.py NAME`. Each rank prints its observations."""

from __future__ import annotations

import asyncio
import atexit
import gc
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

import aiodist
from aiodist.handles import internals
from aiodist.testing.seams.world import Limits, opened
from tests.support.blocking import blocked_until
from tests.support.programs import say
from tests.support.until import until

NUMEL = 16 << 20  # of float32: 64 MiB
PATIENT = Limits(drain=10)


def mapped() -> int:
    """Return how many arenas this process maps: its own, and others'."""
    with open("/proc/self/maps") as lines:
        return sum("memfd:aiodist" in line for line in lines)


async def left() -> int:
    """Return how many arenas stay mapped, once the progress thread has looked away too."""
    with suppress(TimeoutError):
        await until(lambda: not mapped(), gc.collect)
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
        t = coll.arena_empty((NUMEL,)) if place == "arena" else torch.empty(NUMEL)
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
    """All memory is released at the end of the block, and with the last tensor; then all of this once more."""
    for _ in range(2):
        async with opened(PATIENT) as coll:
            assert mapped(), "there is no arena"
            t = coll.arena_empty((1000,)).fill_(1)
            ordinary = torch.ones(1000)
            mixed = t if coll.rank else ordinary
            await coll.allreduce(mixed, impl="shm")
            assert set(mixed.tolist()) == {float(coll.size)}
            pair = await coll.split(coll.rank // 2)
            other = await coll.dup()
            ts = [c.arena_empty((500_000,)).fill_(c.rank) for c in (coll, pair, other) for _ in range(3)]
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
    """One rank has no memory, and continues."""
    async with opened(PATIENT) as coll:
        t = torch.ones(10)
        if coll.rank:
            try:
                t = coll.arena_empty(1 << 50)
            except MemoryError as error:
                say("lack:", f"{4 << 50} bytes" in str(error))
            try:
                coll.arena(1 << 50)
            except MemoryError as error:
                say("room:", f"{1 << 50} bytes" in str(error))
        else:
            coll.arena(1 << 16)
            t = coll.arena_empty(10).fill_(1)
        await coll.allreduce(t, impl="shm")
        say("sum:", t.sum().item())


async def without() -> None:
    """No ranks share memory: the same calls work."""
    async with opened(PATIENT) as coll:
        t = coll.to_arena_(coll.arena_empty((5,), dtype=torch.float64).fill_(1))
        at = t.data_ptr()
        assert coll.to_arena_(t) is t
        assert t.data_ptr() == at, "it moved"
        coll.arena(100)
        await coll.allreduce(t)
        say("sum:", t.sum().item())
        say("mapped:", mapped())
        try:
            await coll.allreduce(t, impl="shm")
        except aiodist.BackendUnavailable as error:
            say("why:", error)


async def forked(folder: str) -> None:
    """A child of `os.fork` waits for operations in flight, and aborts them; its parent is stopped."""
    issue = Path(folder) / "issue"
    async with opened(PATIENT) as coll:
        ts = coll.arena_empty((NUMEL // 64,)), torch.empty(1000), coll.arena_empty((NUMEL // 32,))
        for first in (True, False):
            for t in ts:
                t.fill_(1.0 + coll.rank)
            await coll.barrier()
            child = 0
            if not first and coll.rank == 1:
                assert await asyncio.to_thread(blocked_until, issue.exists)
            handles = [coll.allreduce(t) for t in ts]
            if not first and coll.rank == 0:
                child = os.fork()
                if child == 0:
                    in_child(coll, handles, issue)
                    os._exit(7)
            if child:
                _, status = await asyncio.to_thread(os.waitpid, child, 0)
                say("child:", os.waitstatus_to_exitcode(status))
            await aiodist.gather(*handles)
        say("sums:", *[x for t in ts for x in {*t.tolist()}], await coll.allreduce(1))


def in_child(coll: aiodist.Communicator, handles: list[aiodist.Handle[Any]], issue: Path) -> None:
    os.kill(os.getppid(), signal.SIGSTOP)
    try:
        issue.touch()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:  # the other rank takes its part meanwhile
            for handle in handles:
                handle.done()
                handle.__await__()
        with ThreadPoolExecutor(1) as thread:
            told = thread.submit(handles[0].wait).exception(20)
        say("in the child:", type(told).__name__, told)
        try:
            coll.abort("in the child")
        except RuntimeError as error:
            say("in the child:", error)
    finally:
        os.kill(os.getppid(), signal.SIGCONT)


async def many(operations: str) -> None:
    """Run `operations` operations of every size: most are awaited one by one, some are in flight together."""

    async def some(count: int) -> None:
        for i in range(count // 100):
            for _ in range(79):
                await coll.allreduce(short, "max")
            for _ in range(2):
                await aiodist.gather(*[coll.allreduce(t, "max") for t in (short, staged, ordinary, arena)])
            for _ in range(10):
                await coll.barrier()
            await coll.allgather(short)
            await coll.allreduce(i)
            await coll.broadcast(staged)

    def used() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE, len(os.listdir("/proc/self/fd"))

    async with opened(PATIENT) as coll:
        short, staged, ordinary, arena = (
            torch.ones(4),
            torch.ones(2000),
            torch.ones(20_000),
            coll.arena_empty(20_000).fill_(1),
        )
        short.fill_(0), staged.fill_(0)
        await some(5000)
        before = used()
        await some(int(operations))
        after = used()
        say("bytes:", after[0] - before[0])
        say("descriptors:", after[1] - before[1])


async def in_flight(then: Callable[[], object], *, goes_on: bool = False) -> None:
    """Begin operations of every kind; then call `then`, or issue more if `goes_on`."""
    coll = await aiodist.open()
    long, more, short = coll.arena_empty((NUMEL,)).fill_(1), torch.ones(NUMEL), torch.ones(3)
    ts = [long, torch.ones(NUMEL), short, torch.ones(1 << 16), coll.arena_empty(1 << 16).fill_(1)]
    for t in (*ts, more):  # what is opened at first use, in a thread, is there
        await coll.allreduce(t)
    meet(coll, "ready")
    handles = [coll.allreduce(t) for t in ts]
    if coll.rank == 0 and not goes_on and then is not nothing:  # one that the other rank does not
        handles.append(coll.allreduce(torch.ones(1)))
    say("in flight:", any(internals.is_pending(handle) for handle in handles))
    meet(coll, "issued")
    then()
    if then is nothing:
        left_over.append(handles)
    while goes_on:  # with no call into torch: CPython 3.11 aborts where a thread is in one when the interpreter goes
        await coll.allreduce(more)


def meet(coll: aiodist.Communicator, where: str) -> None:
    """Wait for the other ranks without an operation, so that no rank waits for one that leaves afterwards."""
    Path(f"{where}-{coll.rank}").touch()
    assert blocked_until(lambda: all(Path(f"{where}-{rank}").exists() for rank in range(coll.size)))


def nothing() -> None:
    """Go on."""


left_over: list[object] = []


def leave(how: str) -> None:
    """The interpreter ends while operations are in flight."""
    atexit.register(say, "the interpreter ends")
    if how == "returns":  # as a prompt does: its loop is not closed
        loop = asyncio.new_event_loop()
        left_over.append(loop)
        loop.run_until_complete(in_flight(nothing))
    elif how == "exits":
        aiodist.run(in_flight, partial(sys.exit, 3))
    else:  # in a thread that is not waited for
        begun = threading.Event()
        threading.Thread(target=lambda: asyncio.run(in_flight(begun.set, goes_on=True)), daemon=True).start()
        begun.wait()


PROGRAMS: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    program.__name__: program for program in (killed, clean, lacking, without, forked, many)
}

if __name__ == "__main__":
    if sys.argv[1] == "leave":
        leave(*sys.argv[2:])
    else:
        aiodist.run(PROGRAMS[sys.argv[1]], *sys.argv[2:])
