"""Three ranks take records of a queue of shards, and rank 2 ends in the middle: `shards.py leaves|killed|first`.

Each rank says which records its consumer was given; with "first" it is rank 0, which keeps the queue, that is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiodist
from aiodist import Communicator
from aiodist.data import IndexShards, ShardQueue, prefetch
from aiodist.errors import PeerLost

RECORDS, BATCHES = 3000, 5
TOLD_SECONDS = 1.0  # after which rank 0 surely knows what was used


def say(what: str, *words: object) -> None:
    sys.stdout.write(f"{what}: {' '.join(map(str, words))}\n")  # at once: ranks may share a pipe
    sys.stdout.flush()


async def taken(queue: ShardQueue[int], count: int | None) -> list[int]:
    """Return the records of so many batches, or of all."""
    mine: list[int] = []
    async with prefetch(queue, depth=4) as batches:
        async for batch in batches:
            mine += batch
            if count is not None and len(mine) == count * 8:
                break
    return mine


async def main(how: str) -> None:
    lost = {"leaves": None, "killed": 2, "first": 0}[how]
    async with aiodist.init() as coll:
        ends = coll.rank == (2 if lost is None else lost)
        queue = ShardQueue(IndexShards(RECORDS, 16), coll, batch_size=8, shuffle=True, wait=True)
        try:
            if not (ends and lost is not None):
                say("used", *await taken(queue, BATCHES if ends else None))
            else:
                await killed(queue)
        except PeerLost as error:
            say("the queue", f"lost with rank {error.lost}")
        await closed(coll, lost)


async def killed(queue: ShardQueue[int]) -> None:
    """Die inside the pass, while records are ready and others on their way."""
    mine: list[int] = []
    async with prefetch(queue, depth=4) as batches:
        while len(mine) < BATCHES * 8:
            mine += await anext(batches)
        await asyncio.sleep(TOLD_SECONDS)
        say("used", *mine)
        os.kill(os.getpid(), signal.SIGKILL)


async def closed(coll: Communicator, lost: int | None) -> None:
    """Say how a barrier of all ends."""
    try:
        await coll.barrier()
        say("barrier", "over")
    except PeerLost as error:
        say("barrier", f"lost rank {error.lost}")
    if lost is not None:
        done = {rank: Path(f"done {rank}") for rank in range(coll.size) if rank != lost}
        done[coll.rank].touch()
        while not all(map(Path.exists, done.values())):  # noqa: ASYNC110  - it would be aborted under another's pass
            await asyncio.sleep(0.02)
        coll.abort()


if __name__ == "__main__":
    aiodist.run(main(sys.argv[1]))
