"""Every operation against every other, with tensors that are used again at once: `pairs.py`, on two or three ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

import aiodist
from aiodist.handles import in_flight
from tests.support.programs import say

Issue = Callable[[aiodist.Communicator], aiodist.Handle[Any]]


def calls(size: int, rank: int) -> dict[str, Issue]:
    """Return operations of all lengths: what is sent at once, what waits to be asked for, what is compared first."""
    short, long, large = torch.ones(9), torch.ones(50_000), torch.ones(500_000)
    parts = [torch.ones(9) for _ in range(size)]
    return {
        "allreduce": lambda c: c.allreduce(long),
        "large": lambda c: c.allreduce(large),
        "reduce": lambda c: c.reduce(short),
        "gather": lambda c: c.gather(long),
        "alltoall": lambda c: c.alltoall(parts),
        "object": lambda c: c.broadcast_object("x" * 300_000, root=size - 1),
        "scatter": lambda c: c.scatter([long] * size if rank == 0 else None),
        "allgather": lambda c: c.allgather(long[: 100 * (rank + 1)]),
        "barrier": lambda c: c.barrier(),
        "exscan": lambda c: c.exscan(long),
        "reduce_scatter": lambda c: c.reduce_scatter(large[: 120_000 * size]),
    }


async def differ(coll: aiodist.Communicator, mine: Issue) -> str:
    """Return what is wrong after a call that the other ranks do not make."""
    try:
        await asyncio.wait_for(mine(coll), 20)
    except aiodist.MismatchError as error:
        text = str(error)
    except Exception as error:  # noqa: BLE001  - the caller prints it
        return f"{type(error).__name__}: {error}"
    else:
        return "no error"
    if "rank 0" not in text and "ranks 0, " not in text:
        return text
    total = await asyncio.wait_for(coll.allreduce(torch.ones(10)), 20)
    return "" if total.eq(coll.size).all() else f"wrong sums: {total}"


async def main() -> None:
    async with aiodist.init() as world:
        coll = await world.dup()
        known = calls(coll.size, coll.rank)
        faults = 0
        for one in known:
            for other in known:
                if one != other and (wrong := await differ(coll, known[one if coll.rank else other])):
                    faults += 1
                    say(f"rank {coll.rank} {one} {other}: {wrong}")
                    coll = await world.dup()
        say("faults:", faults, len(in_flight))


if __name__ == "__main__":
    aiodist.run(main)
