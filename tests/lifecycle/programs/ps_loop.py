"""The loop of "Recovery" in docs/parameter-server.md with servers of their own; one of them, or a worker, is killed."""

from __future__ import annotations

import os
import signal
import sys

import torch

import aiodist
from aiodist import Communicator, CommunicatorError, PeerLost
from aiodist.ps import ParameterServer

PUSHES = 40
WORKERS = 2


async def train(coll: Communicator, ps: ParameterServer, rounds: int, dying: tuple[int, int]) -> int:
    """Push until there are enough; return the sum that servers have."""
    if rounds == 1 and ps.rank == ps.workers[0]:
        await ps.save(sys.argv[1], keep_last=2)
        await coll.send_object("saved", dst=ps.workers[-1])
    elif rounds == 1 and ps.rank == ps.workers[-1]:
        await coll.recv_object(src=ps.workers[0])
    for i in range(PUSHES):
        await ps.push("w", torch.ones(5))
        if i == PUSHES // 2 and rounds == 1 and ps.rank == ps.workers[-1]:
            os.kill(dying[1], signal.SIGKILL)
    await ps.sync()
    if rounds == 1:  # all ranks also talk to one another, so each worker hears that a rank died
        await coll.recv_object(src=dying[0])
    return int((await ps.pull("w"))[0])


async def main() -> None:
    servers = int(sys.argv[2])
    async with aiodist.init(elastic=True) as coll:
        started, size = coll.rank, coll.size
        pids = await coll.allgather_object(os.getpid())
        dying = WORKERS - 1 if sys.argv[3] == "worker" else size - 1
        async with ParameterServer(
            coll, {"w": torch.zeros(5)}, servers=servers, checkpoints=True, split_bytes=8, timeout=60
        ) as ps:
            rounds = 0
            while ps.is_worker:
                try:
                    rounds += 1
                    found = await train(coll, ps, rounds, (dying, pids[dying]))
                    sys.stdout.write(f"rank {started}: {rounds} rounds, at least {PUSHES}: {found >= PUSHES}\n")
                    break
                except (PeerLost, CommunicatorError):
                    coll = await coll.shrink()
                    await ps.rebind(coll)
            else:
                sys.stdout.write(f"rank {started}: serves\n")
        sys.stdout.write(f"rank {started}: left\n")


if __name__ == "__main__":
    aiodist.run(main)
