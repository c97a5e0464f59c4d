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
from tests.support.blocking import blocked_until

RECORDS, BATCHES = 3000, 5
TOLD_SECONDS = 1.0  # after which rank 0 surely knows the used records


def say(what: str, *words: object) -> None:
    sys.stdout.write(f"{what}: {' '.join(map(str, words))}\n")  # at once: ranks may share a pipe
    sys.stdout.flush()


async def taken(queue: ShardQueue[int], coll: Communicator, ends: int) -> list[int]:
    """Return the records of `ends` batches on the rank that ends, and of all its batches on another rank."""
    mine: list[int] = []
    async with prefetch(queue, depth=4) as batches:
        if coll.rank != ends:
            await coll.recv_object(ends)  # else nothing may be left for a rank that is slow
        async for batch in batches:
            mine += batch
            if coll.rank == ends and len(mine) == BATCHES * 8:
                await enough(coll)
                break
    return mine


async def enough(coll: Communicator) -> None:
    """Let the other ranks continue: this rank has its records."""
    await aiodist.gather(*[coll.send_object(None, rank) for rank in range(coll.size) if rank != coll.rank])


async def main(how: str) -> None:
    lost = {"leaves": None, "killed": 2, "first": 0}[how]
    async with aiodist.init() as coll:
        ends = 2 if lost is None else lost
        queue = ShardQueue(IndexShards(RECORDS, 16), coll, batch_size=8, shuffle=True, wait=True)
        try:
            if coll.rank == lost:
                await killed(queue, coll)
            else:
                say("used", *await taken(queue, coll, ends))
        except PeerLost as error:
            say("the queue", f"lost with rank {error.lost}")
        await closed(coll, lost)


async def killed(queue: ShardQueue[int], coll: Communicator) -> None:
    """Die inside the pass, while some records are ready and others in flight."""
    mine: list[int] = []
    async with prefetch(queue, depth=4) as batches:
        while len(mine) < BATCHES * 8:
            mine += await anext(batches)
        await enough(coll)
        await asyncio.sleep(TOLD_SECONDS)  # a promise of seconds: N16
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
        # It would be aborted under another's pass.
        assert await asyncio.to_thread(blocked_until, lambda: all(map(Path.exists, done.values())))
        coll.abort()


if __name__ == "__main__":
    aiodist.run(main(sys.argv[1]))
