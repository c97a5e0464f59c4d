"""A rank that disagrees with the others and is killed at once: `dispute.py`, on three ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import torch

import aiodist


async def main() -> None:
    async with aiodist.init() as coll:
        await coll.barrier()
        if coll.rank == 2:
            await aiodist.gather(coll.recv_object(0), coll.recv_object(1))  # the others know that they met
        else:
            await coll.send_object(None, 2)
        handle = coll.allreduce(torch.ones(4), op="max" if coll.rank == 2 else "sum")
        if coll.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        told = []
        try:
            async with asyncio.timeout(20):
                for _ in range(2):
                    try:
                        await handle
                        await coll.allreduce(1)
                    except aiodist.AiodistError as error:
                        told.append(type(error).__name__)
        except TimeoutError:
            told = ["late"]
        sys.stdout.write(f"told: {' '.join(told)}\n")  # at once: ranks may share a pipe
        sys.stdout.flush()


if __name__ == "__main__":
    aiodist.run(main)
