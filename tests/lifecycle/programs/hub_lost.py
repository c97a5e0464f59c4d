"""Three ranks: rank 0, with the hub, is killed while the others wait on a communicator without rank 0."""

from __future__ import annotations

import os
import signal

import torch

import aiodist
from tests.support.programs import say


async def main() -> None:
    async with aiodist.init() as coll:
        others = await coll.split(min(coll.rank, 1))
        await coll.barrier()
        if coll.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            await (others.allreduce(torch.ones(2)) if coll.rank == 1 else others.recv(src=0))
        except aiodist.PeerLost as error:
            say(f"raised: {error}")
            os._exit(0)


if __name__ == "__main__":
    aiodist.run(main)
