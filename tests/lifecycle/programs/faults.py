"""Ranks that disagree: `faults.py`, on three ranks. Each rank says what it was told, and how soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import torch

import aiodist

Issue = Callable[[aiodist.Communicator], aiodist.Handle[Any]]


def say(*words: object) -> None:
    print(*words, flush=True)


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
    # Of one size: where sizes differ too and several are in flight, Open MPI itself may crash (libnbc gives up a
    # schedule whose receives are still posted), and only checked mode is safe.
    one, two = torch.ones(4), torch.ones(4, dtype=torch.int32)
    first = coll.allreduce(two if odd(coll) else one)
    second = coll.allreduce(one if odd(coll) else two)
    return aiodist.gather(first, second)


KINDS: tuple[Issue, ...] = (other_op, other_count, other_dtype, other_root, other_kind, other_order)


def odd(coll: aiodist.Communicator) -> bool:
    """The last rank is the odd one."""
    return coll.rank == coll.size - 1


async def one(coll: aiodist.Communicator, issue: Issue, name: str) -> None:
    """Issue it, and a barrier: without checks, what does not stall is found out only there."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(5):
            await issue(coll)
            if name.startswith("unchecked"):
                await coll.barrier()
    except (aiodist.MismatchError, aiodist.CommunicatorAborted) as error:
        # A call after the news refuses, because of it.
        text = str(error if isinstance(error, aiodist.MismatchError) else error.__cause__)
        told = [rank for rank in range(coll.size) if f"rank {rank}: " in text]
        lines = coll.size - 1 in told and len(told) > 1 and text.count("faults.py:") >= 2
        kind = "both sides" if lines else text
    except BaseException as error:  # noqa: BLE001  - whatever else it is goes into the report
        kind = f"{type(error).__name__}: {error}"
    else:
        kind = "nothing"
    soon = time.monotonic() - began
    say(f"{name} {issue.__name__}:", kind, "within a second" if soon < 1.0 else f"after {soon:.2f} s")


async def main() -> None:
    async with aiodist.init(checked=True) as coll:
        pair = await coll.group([0, 1])
        for comm in (coll, pair):
            if comm.rank >= 0:
                for issue in KINDS:
                    await one(comm, issue, f"checked {comm.size}")
                    total = await comm.allreduce(1)
                    assert total == comm.size
        await coll.barrier()
    for issue in KINDS:
        async with aiodist.init(checked=False) as coll:
            await coll.barrier()
            for comm in (await coll.dup(), await coll.group([0, 1])):
                if comm.rank >= 0:
                    await one(comm, issue, f"unchecked {comm.size}")
            total = await coll.allreduce(1)
            assert total == coll.size
    say("went on: yes")


if __name__ == "__main__":
    aiodist.run(main)
