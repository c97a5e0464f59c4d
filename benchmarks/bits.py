"""Time of a reproducible allreduce over that of the usual one, from 1 MiB on, in turn in the same processes.

    aiodist run -n 4 -m benchmarks.bits
    AIODIST_SHM=0 aiodist run -n 4 --mpi none -m benchmarks.bits        messages in place of shared memory

The last column is `across=True` over two parts per rank, over a sum of these parts and the usual allreduce.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from statistics import median

import torch

import aiodist
from aiodist.communicator import parts_of

__all__ = ["main"]

_ROUNDS = 31


async def reproducible(coll: aiodist.Communicator) -> aiodist.Communicator:
    """Return a communicator as of init(reproducible=True)."""
    resources = parts_of(coll).registry.resources
    resources.reproducible = True
    own = await coll.dup()
    resources.reproducible = False
    return own


async def ratio(
    coll: aiodist.Communicator, one: Callable[[], Awaitable[object]], other: Callable[[], Awaitable[object]]
) -> tuple[float, float]:
    """Return the median seconds of `one`, the slowest rank's, and the median of its ratios to `other`."""
    seconds: list[list[float]] = []
    for _ in range(_ROUNDS):
        pair = []
        for call in (one, other):
            await coll.barrier()
            begin = time.perf_counter()
            await call()
            pair.append(await coll.allreduce(time.perf_counter() - begin, "max"))
        seconds.append(pair)
    return median(a for a, _ in seconds), median(a / b for a, b in seconds)


async def main() -> None:
    """Print a line for each size and place."""
    torch.set_num_threads(1)
    async with aiodist.init() as coll:
        own = await reproducible(coll)
        for nbytes in (1 << 20, 4 << 20, 16 << 20, 64 << 20):
            for make in (torch.empty, coll.arena_empty):
                t, part = make(nbytes // 4).normal_(), torch.randn(nbytes // 4)
                total = make(nbytes // 4)
                usual_impl, impl = (c.selector.choose("allreduce", nbytes) for c in (coll, own))

                async def summed(t: torch.Tensor = t, part: torch.Tensor = part, out: torch.Tensor = total) -> None:
                    await coll.allreduce(torch.add(t, part, out=out))

                took, over = await ratio(coll, lambda: own.allreduce(t, "mean"), lambda: coll.allreduce(t, "mean"))  # noqa: B023
                both = lambda: own.allreduce([t, part], across=True, out=total)  # noqa: B023, E731
                _, across = await ratio(coll, both, summed)
                place = "ordinary" if make is torch.empty else "arena"
                figures = f"{took * 1e3:8.2f} ms  {over:.2f} of usual  across {across:.2f}"
                coll.print(f"{coll.size} ranks {nbytes >> 20:3} MiB {place:8} {impl:7} for {usual_impl:7} {figures}")


if __name__ == "__main__":
    aiodist.run(main)
