"""Ranks that stop together: `stopping.py NAME`; each says where it stopped."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import threading
import time

import torch
from torch import nn

import aiodist
from aiodist.nn import DataParallel


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")  # at once: ranks may share a pipe
    sys.stdout.flush()


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
    """Looks in each step of a training, which says nothing beside what steps say anyway."""
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
            time.sleep(0.001)
            rounds += 1
        say("rounds:", rounds)
    say("closed: yes")


def late() -> None:
    """One hears of the signal when it closes already, for it comes to each rank by itself."""
    with aiodist.start(stop_on_signal=True) as coll:
        if coll.rank == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            time.sleep(0.6)
    say("closed: yes")


async def late_in_asyncio() -> None:
    """As `late`."""
    async with aiodist.init(stop_on_signal=True) as coll:
        if coll.rank == 1:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            await asyncio.sleep(0.6)
    say("closed: yes")


if __name__ == "__main__":
    program = globals()[sys.argv[1]]
    if inspect.iscoroutinefunction(program):
        aiodist.run(program)
    else:
        program()
