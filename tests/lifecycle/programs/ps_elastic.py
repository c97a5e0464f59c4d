"""A parameter server whose second server is killed amid pushes; the launcher starts a new rank that serves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress

import torch

import aiodist
from aiodist import Communicator, CommunicatorError, PeerLost
from aiodist.ps import ParameterServer

PUSHES = 150
TENSORS = {"small": 7, "large": 300_000}


async def regrouped(coll: Communicator, ps: ParameterServer) -> Communicator:
    """Return the communicator of those who are left, and of a new rank that serves."""
    coll = await coll.shrink()
    coll = await coll.grow(1)
    await ps.rebind(coll, servers=[2, 3], workers=[0, 1])
    return coll


async def serve(coll: Communicator, ps: ParameterServer) -> None:
    """Serve until the other server is killed, and with the new one from then on."""
    if coll.generation > 0:
        return
    if coll.rank == 3:
        await coll.recv_object(0)
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(PeerLost, CommunicatorError):
        while True:
            await coll.barrier()
    await regrouped(coll, ps)


async def work(coll: Communicator, ps: ParameterServer, w: dict[str, torch.Tensor]) -> None:
    """Push, and push again only what raised at the call: what was begun counts."""
    if coll.rank == 0:
        await ps.save(sys.argv[1])
    for i in range(PUSHES):
        if i == PUSHES // 3 and coll.rank == 0:
            await coll.send_object("amid pushes", 3)
        left = list(w)
        while left:
            try:
                ps.push(left[0], torch.ones_like(w[left[0]])).add_done_callback(lambda done: done.exception())
                left.pop(0)
                if i % 3 == 0:
                    await ps.sync()
            except (PeerLost, CommunicatorError) as error:
                sys.stdout.write(f"lost: {type(error).__name__}\n")
                coll = await regrouped(coll, ps)
        await asyncio.sleep(0)
    while True:
        try:
            await ps.sync()
            await ps.barrier()
            pulled = await ps.pull(list(w))
            break
        except (PeerLost, CommunicatorError) as error:  # the server was killed after this rank's pushes
            sys.stdout.write(f"lost: {type(error).__name__}\n")
            coll = await regrouped(coll, ps)
    found = [t.unique().tolist() for t in pulled]
    sys.stdout.write(f"found: {found} {coll.rank} of {coll.size}\n")


async def main() -> None:
    async with aiodist.init(elastic=True) as coll:
        w = {name: torch.zeros(numel) for name, numel in TENSORS.items()}
        async with ParameterServer(
            coll, w, servers=[2, 3], workers=[0, 1], split_bytes=8, checkpoints=True, timeout=60
        ) as ps:
            await (work(coll, ps, w) if ps.is_worker else serve(coll, ps))


if __name__ == "__main__":
    aiodist.run(main)
