"""Ranks that stop together: `stopping.py NAME`; each says where it stopped."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import aiodist
from aiodist.nn import DataParallel
from tests.support.blocking import blocked_until, rounds
from tests.support.programs import say


async def asked() -> None:
    """Looks by a collective, while another task works for longer on one rank."""
    async with aiodist.init(stop_on_signal=True) as coll:
        say("pid:", os.getpid())
        rounds = 0
        while not await coll.stopping():
            await coll.allreduce(torch.ones(3))
            rounds += 1
        say("rounds:", rounds)
    say("closed: yes")


async def trained() -> None:
    """Checks for the signal in each step of a training, without messages besides those of steps."""
    async with aiodist.init(stop_on_signal=True) as coll:
        net = await DataParallel.create(nn.Linear(4, 1), coll)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        say("pid:", os.getpid())
        steps = 0
        while not net.stop_requested:
            await net.step(lambda: net(torch.ones(2, 4)).square().mean(), opt)
            steps += 1
        say("steps:", steps, coll.seq)
    say("closed: yes")


async def deaf() -> None:
    """Never looks: the second signal has its usual meaning."""
    async with aiodist.init(stop_on_signal=True) as coll:
        say("pid:", os.getpid())
        try:
            while True:
                await coll.allreduce(torch.ones(3))
        finally:
            say("released: yes")


def scripted() -> None:
    """Without asyncio in sight."""
    with aiodist.start(stop_on_signal=True) as coll:
        say("pid:", os.getpid())
        rounds = 0
        while not coll.stopping().wait():
            rounds += 1
        say("rounds:", rounds)
    say("closed: yes")


def signal_late(rank: int, pids: list[int]) -> None:
    """Signal rank 1 at its end, while rank 0 still runs for a while."""
    closing = Path("closing")
    if rank == 1:
        closing.touch()
        return
    assert blocked_until(closing.exists)
    blocked_until(lambda: False, 0.1)
    os.kill(pids[1], signal.SIGINT)


def late() -> None:
    """One hears of the signal when it closes already, for it comes to each rank by itself."""
    with aiodist.start(stop_on_signal=True) as coll:
        signal_late(coll.rank, coll.allgather_object(os.getpid()).wait())
    say("closed: yes")


async def late_in_asyncio() -> None:
    """As `late`."""
    async with aiodist.init(stop_on_signal=True) as coll:
        pids = await coll.allgather_object(os.getpid())
        await asyncio.to_thread(signal_late, coll.rank, pids)
        await rounds()
    say("closed: yes")


if __name__ == "__main__":
    program = globals()[sys.argv[1]]
    if inspect.iscoroutinefunction(program):
        aiodist.run(program)
    else:
        program()
