"""Ranks that meet at a breakpoint: `breakpoints.py deadlines|plain|refused|turns|deadlock`."""

from __future__ import annotations

import asyncio
import sys
from time import monotonic

import torch

import aiodist
from aiodist import Communicator
from tests.support.programs import say

HELD = 1  # the rank with the prompt


async def deadlines(coll: Communicator) -> None:
    """Ranks wait with 3 s for messages after the breakpoint, and rank 0 with 1.5 s for a message that never comes."""
    apart, met = await coll.dup(), await coll.dup()
    await coll.barrier()
    began = monotonic()
    coming = met.recv(torch.empty(3), 2, timeout=3) if coll.rank == 0 else None
    scope = asyncio.ensure_future(within(met, 3)) if coll.rank == 0 else None
    thread = asyncio.ensure_future(asyncio.to_thread(met.allreduce(coll.rank, timeout=3).wait, 3))
    never = apart.recv(torch.empty(3), 2, timeout=1.5) if coll.rank == 0 else None
    await coll.breakpoint(rank=HELD)
    left = monotonic()
    if coll.rank == 2:
        await met.send(torch.arange(3.0), 0)
        await met.send(torch.ones(2), 0, tag=1)
    if coming is not None and scope is not None:
        say("came", (await coming).tolist(), await scope)
    say("sum", await thread)
    if never is not None:
        try:
            await never
        except aiodist.OperationTimeout:
            say("paused", left - began, "counted", monotonic() - began)
            never.cancel()
    await coll.barrier()


async def within(met: Communicator, seconds: float) -> list[float]:
    async with aiodist.timeout(seconds):
        return list((await met.recv(torch.empty(2), 2, tag=1)).tolist())


async def plain(coll: Communicator) -> None:
    mine = 10 * (coll.rank + 1)
    await coll.breakpoint(HELD)
    mine += 1
    total = await coll.allreduce(mine)
    say("total", total)


async def refused(coll: Communicator) -> None:
    try:
        await coll.breakpoint(HELD)
    except aiodist.ConfigError as error:
        say(error)
    say("total", await coll.allreduce(1))


async def turns(coll: Communicator) -> None:
    """Two pairs of ranks have a prompt each."""
    pair = await coll.split(coll.rank // 2)
    await pair.breakpoint(HELD)
    say("total", await coll.allreduce(1))


async def deadlock(coll: Communicator) -> None:
    """Ranks 0 and 2 wait for one another while rank 1 is at the prompt, and after that."""
    apart = await coll.dup()
    stuck = apart.recv(torch.empty(1), 2 - coll.rank) if coll.rank != HELD else None
    await coll.breakpoint(HELD)
    if stuck is not None:
        try:
            await stuck
        except aiodist.DeadlockError as error:
            say("found", str(error).partition(":")[0])


async def main(how: str) -> None:
    async with aiodist.init(report_after=0.5, report_lag_over=0.3) as coll:
        await globals()[how](coll)


if __name__ == "__main__":
    aiodist.run(main, sys.argv[1])
