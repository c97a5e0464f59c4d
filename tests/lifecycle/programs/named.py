"""`named.py PHASE`: the last rank is killed while named operations are in flight; the others say what they are told."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import torch

import aiodist


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")  # at once: ranks may share a pipe
    sys.stdout.flush()


async def main(phase: str) -> None:
    async with aiodist.init() as coll:
        last = coll.rank == coll.size - 1
        numel = 8_000_000 if phase == "moving" else 5
        count = 0 if last and phase == "absent" else 8
        try:
            await coll.barrier(name="begin")  # the last may be killed before the others know that they met
            if last and phase == "absent":
                await asyncio.sleep(0.2)
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
