"""Threads that issue and wait while the world ends: `threads.py NAME`. Each rank prints the errors of its threads."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import aiodist
from aiodist import Communicator, Handle
from aiodist.communicator import parts_of
from tests.support.blocking import blocked_until, rounds
from tests.support.programs import say

Call = Callable[[Communicator], Handle[Any]]

WAYS: dict[str, Call] = {
    "lane": lambda coll: coll.allreduce(torch.ones(1)),
    "large": lambda coll: coll.allreduce(torch.ones(3_000_000)),
    "steps": lambda coll: coll.allgather_object("x"),
    "message": lambda coll: coll.recv(src=coll.size - 1),
}
LIMIT = 60.0


turns: Counter[str] = Counter()


def tell(way: str, coll: Communicator) -> None:
    """Issue and wait until that raises, and say what."""
    try:
        while True:
            WAYS[way](coll).wait(LIMIT)
            turns[way] += 1
    except Exception as error:  # noqa: BLE001  - the test checks its class
        say(f"{way}:", type(error).__name__)


async def threads_of(coll: Communicator) -> list[threading.Thread]:
    """Return a thread for each way, on a communicator of its own; the last rank never sends the message."""
    made = {way: await coll.dup(thread=True) for way in WAYS}
    for ours in made.values():
        await ours.allreduce(torch.ones(1))
    return [
        threading.Thread(target=tell, args=(way, ours))
        for way, ours in made.items()
        if way != "message" or coll.rank == 0
    ]


async def killed(coll: Communicator) -> None:
    """The last rank is killed while threads of all ranks reduce; the loops stand still for a while."""
    threads = await threads_of(coll)
    for thread in threads:
        thread.start()
    blocked_until(lambda: len(turns) == len(WAYS) - 1, 5)  # the loop stands still
    if coll.rank == coll.size - 1:
        say("mark:", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await coll.barrier()


async def interrupted(coll: Communicator) -> None:
    """Ctrl-C comes while threads wait. The other rank leaves before this one has aborted its communicators."""
    threads = await threads_of(coll)
    channel = parts_of(coll).registry.channel
    notify = channel.fail

    def notify_early(*args: Any) -> None:
        notify(*args)
        time.sleep(0.3)

    channel.fail = notify_early
    for thread in threads:
        thread.start()
    await coll.barrier()
    await rounds()
    say("mark:", time.monotonic())
    if coll.rank == 0:
        signal.raise_signal(signal.SIGINT)
    await asyncio.wait_for(asyncio.Event().wait(), LIMIT)


async def left(coll: Communicator) -> None:
    """The last rank's program raises while threads wait; those are no daemons, and their rank ends."""
    threads = await threads_of(coll)
    for thread in threads:
        thread.start()
    await coll.barrier()
    if coll.rank == coll.size - 1:
        say("mark:", time.monotonic())
        raise ValueError("boom")
    await asyncio.wait_for(asyncio.Event().wait(), LIMIT)


async def main() -> None:
    async with aiodist.init() as coll:
        await {"killed": killed, "interrupted": interrupted, "left": left}[sys.argv[1]](coll)


if __name__ == "__main__":
    aiodist.run(main())
