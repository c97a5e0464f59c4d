"""Ranks that disagree: `faults.py`, on three ranks. Each rank prints its error, and the shortest time to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import torch

import aiodist
from tests.support.programs import say

Issue = Callable[[aiodist.Communicator], aiodist.Handle[Any]]


def other_op(coll: aiodist.Communicator) -> aiodist.Handle[Any]:
    return coll.allreduce(torch.ones(4), op="max" if odd(coll) else "sum")


def other_count(coll: aiodist.Communicator) -> aiodist.Handle[Any]:
    return coll.allreduce(torch.ones(5 if odd(coll) else 4))


def other_dtype(coll: aiodist.Communicator) -> aiodist.Handle[Any]:
    return coll.allreduce(torch.ones(4, dtype=torch.int64 if odd(coll) else torch.float32))


def other_root(coll: aiodist.Communicator) -> aiodist.Handle[Any]:
    return coll.broadcast(torch.ones(4), root=1 if odd(coll) else 0)


def other_kind(coll: aiodist.Communicator) -> aiodist.Handle[Any]:
    return coll.barrier() if odd(coll) else coll.allreduce(torch.ones(4))


def other_order(coll: aiodist.Communicator) -> aiodist.Handle[Any]:
    one, two = torch.ones(4), torch.ones(40_000)
    first = coll.allreduce(two if odd(coll) else one)
    second = coll.allreduce(one if odd(coll) else two)
    return aiodist.gather(first, second)


def other_long(coll: aiodist.Communicator) -> aiodist.Handle[Any]:
    return coll.allreduce(torch.ones(1 << 20)) if odd(coll) else coll.broadcast(torch.ones(3), root=1)


def other_moves(coll: aiodist.Communicator) -> aiodist.Handle[Any]:
    if odd(coll):
        return coll.alltoall([torch.ones(100_000)] * coll.size)
    return coll.allgather(torch.ones(coll.rank + 7))


KINDS: tuple[Issue, ...] = (
    other_op,
    other_count,
    other_dtype,
    other_root,
    other_kind,
    other_order,
    other_long,
    other_moves,
)


def odd(coll: aiodist.Communicator) -> bool:
    """The last rank is the odd one."""
    return coll.rank == coll.size - 1


async def one(coll: aiodist.Communicator, issue: Issue) -> tuple[str, float]:
    """Issue the operation; return this rank's error, and the seconds until it."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(20):
            await issue(coll)
    except aiodist.MismatchError as error:
        text = str(error)
        others = any(f"{names}: " in text for names in ("rank 0", "rank 1", "ranks 0, 1"))  # one may come later
        told = others and f"rank {coll.size - 1}: " in text and text.count("faults.py:") >= 2
        kind = "both sides" if told else text
    except BaseException as error:  # noqa: BLE001  - any other error goes into the report
        kind = f"{type(error).__name__}: {error}"
    else:
        kind = "nothing"
    return kind, time.monotonic() - began


async def main() -> None:
    async with aiodist.init() as coll:
        pair = await coll.group([0, 1])
        for comm in (coll, pair):
            if comm.rank >= 0:
                for issue in KINDS:
                    told = []
                    for _ in range(3):  # the machine may stand still for a while, once
                        told.append(await one(comm, issue))
                        if issue is other_order:  # of the two, the second was still to come
                            await comm.barrier()
                        assert await comm.allreduce(1) == comm.size
                        held = await comm.allgather(torch.full((40_000,), comm.rank))
                        assert [t.unique().tolist() for t in held] == [[rank] for rank in range(comm.size)]
                    kinds, soonest = sorted({kind for kind, _ in told}), min(seconds for _, seconds in told)
                    soon = "within a second" if soonest < 1.0 else f"after {soonest:.2f} s"
                    say(f"{comm.size} {issue.__name__}:", *kinds, soon)
        await coll.barrier()
    say("went on: yes")


if __name__ == "__main__":
    aiodist.run(main)
