"""`named.py PHASE`: the last rank is killed while named operations are in flight; the others print their errors."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import aiodist
from tests.support.programs import say


async def met(coll: aiodist.Communicator) -> None:
    """Return on the last rank once all others know that they met."""
    last = coll.size - 1
    if coll.rank == last:
        await aiodist.gather(*[coll.recv_object(rank) for rank in range(last)])
    else:
        await coll.send_object(None, last)


async def main(phase: str) -> None:
    async with aiodist.init() as coll:
        last = coll.rank == coll.size - 1
        numel = 8_000_000 if phase == "moving" else 5
        count = 0 if last and phase == "absent" else 8
        try:
            await coll.barrier(name="begin")  # the last may be killed before the others know that they met
            if phase == "absent":
                await met(coll)
            handles = [coll.allreduce(torch.ones(numel), name=f"{i}") for i in range(count)]
            if last:
                say(f"mark: {time.time()}")
                os.kill(os.getpid(), signal.SIGKILL)
            await aiodist.gather(*handles, coll.allreduce(1, name="never"))
        except aiodist.PeerError as error:
            say("told:", type(error).__name__)
            say(f"lost: {time.time()}")
            raise


if __name__ == "__main__":
    aiodist.run(main(sys.argv[1]))
