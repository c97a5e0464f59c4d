"""Elastic worlds whose ranks are killed, and joined by others: `elastic.py NAME`."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import aiodist
from aiodist import Communicator
from aiodist.data import IndexShards, ShardQueue
from aiodist.nn import DataParallel
from aiodist.testing.seams.world import Environment
from tests.support.blocking import blocked_until, rounds
from tests.support.programs import say

STEPS = 30
SAMPLES = 12
RECORDS = 2000
DEATHS = {0: 5, 2: 12}
"""At which step which of the processes that start is killed."""
GROWS_AT = 20


def die() -> None:
    say(f"killed: {time.monotonic()}")
    os.kill(os.getpid(), signal.SIGKILL)


def gradient(w: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return that of a rank's share of the samples, for a sum of squares."""
    x = torch.arange(SAMPLES * 3, dtype=torch.float64).view(SAMPLES, 3).sin()[rank::size]
    y = torch.arange(SAMPLES, dtype=torch.float64).cos()[rank::size]
    return x.T @ (x @ w - y)


def undisturbed() -> torch.Tensor:
    """Return what one rank comes to by itself."""
    w = torch.zeros(3, dtype=torch.float64)
    for _ in range(STEPS):
        w -= 0.05 * gradient(w, 0, 1)
    return w


async def agree(coll: Communicator, w: torch.Tensor, step: int) -> int:
    """Copy the state of the rank with the most steps to all ranks."""
    steps = await coll.allgather_object(step)
    await coll.broadcast(w, root=steps.index(max(steps)))
    return int(max(steps))


async def train() -> None:
    """Two of four ranks are killed, two join, and the weights are as if nothing had happened."""
    w, step = torch.zeros(3, dtype=torch.float64), 0
    async with aiodist.init(elastic=True) as coll:
        number = None if coll.generation else coll.rank
        fresh = True
        while step < STEPS:
            try:
                if fresh:
                    step, fresh = await agree(coll, w, step), False
                if number is not None and DEATHS.get(number) == step:
                    die()
                g = gradient(w, coll.rank, coll.size)
                await coll.allreduce(g)
                w -= 0.05 * g
                step += 1
                if step == GROWS_AT:
                    coll, fresh = await coll.grow(2), True
            except aiodist.PeerLost as error:
                say("lost:", error.lost, "of", coll.size)
                coll, fresh = await coll.shrink(), True
        say(f"equal: {torch.allclose(w, undisturbed(), rtol=0, atol=1e-12)} {coll.rank} of {coll.size}")


def held() -> tuple[Counter[str], int, int]:
    """Return what this process has: descriptors by kind, threads, and mappings of memory files."""
    gc.collect()
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            kinds[os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]] += 1
        except OSError:  # the listing's own
            continue
    return kinds, threading.active_count(), Path("/proc/self/maps").read_text().count("memfd:aiodist")


async def count() -> None:
    """Two are killed in a step, one joins, and each record was trained on once: the parameters are the counts."""
    module = torch.nn.Embedding(RECORDS, 1)
    torch.nn.init.zeros_(module.weight)
    opt = torch.optim.SGD(module.parameters(), lr=1.0)
    net: DataParallel | None = None
    queue: ShardQueue[int] | None = None
    async with aiodist.init(elastic=True) as coll:
        number = None if coll.generation else coll.rank

        def share(batch: list[int]) -> torch.Tensor:
            if net is not None and (number, net.steps_done) in ((0, 10), (2, 20)):
                die()
            loss: torch.Tensor = -module(torch.tensor(batch, dtype=torch.int64)).sum()
            return loss

        used = 1
        while used:
            try:
                net = net or await DataParallel.create(module, coll, opt, op="sum")
                await net.rebind(coll, opt)
                queue = queue or ShardQueue(IndexShards(RECORDS, 64), coll, batch_size=8, shuffle=True)
                await queue.rebind(coll, net.steps_done)
                batches = aiter(queue)
                while used:
                    if net.steps_done == 30 and coll.size == 2:
                        coll = await coll.grow()
                        break
                    batch: list[int] = await anext(batches, [])
                    if used := await queue.agree(net.steps_done):
                        await net.step(share, opt, batch)
            except aiodist.PeerLost as error:
                say("lost:", error.lost, "of", coll.size)
                coll = await coll.shrink()
        say(f"once: {bool((module.weight == 1).all())} {coll.rank} of {coll.size}")


async def again() -> None:
    """Regrouping without a death, again and again, leaves nothing behind."""
    async with aiodist.init(elastic=True) as coll:
        seen = []
        for _ in range(13):
            t = coll.arena_empty(1000)
            await coll.allreduce(t.fill_(1.0))
            await coll.barrier()
            coll = await coll.shrink()
            await coll.allreduce(t.fill_(1.0))
            await (await coll.dup()).allreduce(torch.ones(100_000))
            del t
            await rounds()
            seen.append(held())
        same = seen[-1] in seen[2:6]  # a thread that has not ended yet may be in one of them
        say("held:", same, "" if same else seen)


async def group() -> None:
    """Rank 2 is killed; rank 1 shrinks, while rank 0 waits in a group of ranks 0 and 1."""
    async with aiodist.init(elastic=True) as coll:
        first = await coll.split(coll.rank // 2)
        await first.barrier()
        await coll.barrier()
        if coll.rank == 2:
            die()
        try:
            await (coll if coll.rank else first).allreduce(torch.ones(1000))
        except aiodist.PeerLost as error:
            say("lost:", error.lost)
        coll = await coll.shrink()
        say("sum:", (await coll.allreduce(torch.ones(1))).item())


async def too_few() -> None:
    """All but one are killed."""
    async with aiodist.init(elastic=True) as coll:
        if coll.rank:
            die()
        try:
            while True:
                await coll.barrier()
        except aiodist.PeerLost:
            await coll.shrink()
        await asyncio.Event().wait()


async def late() -> None:
    """Rank 1 comes late to a shrink, which names it by a warning, and by an error where there is a deadline."""
    warned, raised = Path("warned"), Path("raised")
    logging.basicConfig(format="%(message)s", handlers=[logging.StreamHandler(sys.stdout), logging.FileHandler(warned)])
    async with aiodist.init(elastic=True, report_after=0.4) as coll:
        if coll.rank == 1:
            await asyncio.to_thread(blocked_until, lambda: warned.read_text() and raised.exists())
            coll = await coll.shrink()
        else:
            handle = coll.shrink(timeout=1.2 if coll.rank == 2 else None)
            try:
                coll = await handle
            except aiodist.OperationTimeout as error:
                say("late:", error.late)
                await asyncio.to_thread(raised.touch)
                coll = await handle
        say("size:", coll.size)


async def early() -> None:
    """One is killed before they have met."""
    if Environment.read().rank == 1:
        die()
    async with aiodist.init(elastic=True):
        say("open")


async def raises() -> None:
    """One rank raises: the others learn of it, and may continue."""
    async with aiodist.init(elastic=True) as coll:
        await coll.barrier()  # who opens after the failure is in the world after this one, with another rank
        if coll.rank == 1:
            raise ValueError("no more")
        try:
            await coll.barrier()
        except aiodist.RemoteError as error:
            say("told:", error.raised_by, "ValueError: no more" in str(error))
        coll = await coll.shrink()
        say("sum:", (await coll.allreduce(torch.ones(1))).item())


async def closes() -> None:
    """One is killed while the others close already."""
    async with aiodist.init(elastic=True) as coll:
        await coll.dup()
        await coll.barrier()
        closing = [Path(f"closing {rank}") for rank in range(coll.size)]
        closing[coll.rank].touch()
        if coll.rank == 1:
            assert await asyncio.to_thread(blocked_until, lambda: all(map(Path.exists, closing)))
            await rounds()
            die()
    say("closed")


async def plain() -> None:
    """A program that knows nothing of it."""
    async with aiodist.init() as coll:
        await coll.barrier()
        try:
            coll.shrink()
        except aiodist.ConfigError as error:
            say("refused:", error)


async def elastic() -> None:
    """Under a launcher of another job."""
    try:
        async with aiodist.init(elastic=True):
            say("open")
    except aiodist.ConfigError as error:
        say("refused:", error)


def script() -> None:
    """`train`, without asyncio."""
    w, step = torch.zeros(3, dtype=torch.float64), 0
    coll: Any
    with aiodist.start(elastic=True, stop_on_signal=True) as coll:
        number = None if coll.generation else coll.rank
        fresh = True
        while step < STEPS:
            try:
                if fresh:
                    step, fresh = coll.portal.call(agree, coll, w, step), False
                if number is not None and DEATHS.get(number) == step:
                    die()
                g = gradient(w, coll.rank, coll.size)
                coll.allreduce(g).wait()
                w -= 0.05 * g
                step += 1
                if step == GROWS_AT:
                    coll, fresh = coll.grow(2).wait(), True
            except aiodist.PeerLost as error:
                say("lost:", error.lost, "of", coll.size)
                coll, fresh = coll.shrink().wait(), True
        if coll.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        while not coll.stopping().wait():
            pass
        say(f"equal: {torch.allclose(w, undisturbed(), rtol=0, atol=1e-12)} {coll.rank} of {coll.size}")


if __name__ == "__main__":
    chosen = globals()[sys.argv[1]]
    aiodist.run(chosen) if inspect.iscoroutinefunction(chosen) else chosen()
