"""Ranks 0 and 1 differ while rank 2 is stopped or busy: `verdicts.py stopped|before|after`, on three ranks.

Rank 2 is busy before or after it issues the operation. Each rank prints its error and the seconds until that.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import torch

import aiodist
from tests.support.programs import say, until_stopped

BUSY_SECONDS = 3.0
STOP = f"kill -STOP $1; sleep {BUSY_SECONDS}; kill -CONT $1"


def stop() -> None:
    """Stop this process soon."""
    subprocess.Popen(["sh", "-c", STOP, "sh", str(os.getpid())])


def block() -> None:
    """Block the loop."""
    time.sleep(BUSY_SECONDS)


async def main(case: str) -> None:
    async with aiodist.init() as world:
        coll = await world.dup()
        pids = await coll.allgather_object(os.getpid())
        if coll.rank == 2 and case == "stopped":
            stop()
            await asyncio.sleep(BUSY_SECONDS / 2)
        elif coll.rank == 2 and case == "before":
            block()
        elif case == "stopped":
            until_stopped(pids[2])
        else:
            await asyncio.sleep(0.2)  # until rank 2 is busy
        began = time.monotonic()
        handle = coll.allreduce(torch.ones(9), op="max" if coll.rank == 1 else "sum")
        if coll.rank == 2 and case == "after":
            block()
        try:
            async with asyncio.timeout(20):
                await handle
        except aiodist.AiodistError as error:
            say("error:", f"{type(error).__name__}: {error}")
        say("seconds:", time.monotonic() - began)
        say("then:", await coll.allreduce(1))


if __name__ == "__main__":
    aiodist.run(main, sys.argv[1])
