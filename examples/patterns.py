"""The six patterns of communication, one function each.

aiodist run -n 4 examples/patterns.py              all of them, in this order
aiodist run -n 4 examples/patterns.py gather       only this one

The first line of each function says what it prints on four ranks. `point_to_point` needs at least two ranks, the others
any number. Arrays are printed like numpy's, on one line.
"""

import sys

import numpy as np
import torch

import aiodist


async def point_to_point(coll: aiodist.Communicator) -> None:
    """Rank 0 prints the sent object, rank 1 the received one: {'a': 10, 'b': 1.234, 'c': 'foobar'}."""
    if coll.rank == 0:
        data = {"a": 10, "b": 1.234, "c": "foobar"}
        print(f"Process {coll.rank}: sending {data}")
        await coll.send_object(data, dst=1)
    elif coll.rank == 1:
        received = await coll.recv_object(src=0)
        print(f"Process {coll.rank}: received {received}")


async def broadcast(coll: aiodist.Communicator) -> None:
    """Every rank has rank 0's ten numbers from 0 to 3.14."""
    t = torch.empty(10, dtype=torch.float64)  # (10,)
    if coll.rank == 0:
        torch.linspace(0, 3.14, 10, out=t)
    await coll.broadcast(t, root=0)
    print(show(t))


async def scatter(coll: aiodist.Communicator) -> None:
    """Rank r has 10r+1 to 10r+10."""
    parts = None
    if coll.rank == 0:
        parts = torch.arange(1, 10 * coll.size + 1, dtype=torch.float64).view(-1, 10).unbind()  # size times (10,)
    mine = await coll.scatter(parts, root=0)
    print(show(mine))


async def gather(coll: aiodist.Communicator) -> None:
    """Rank 0 has 1 to 40, ten from each rank."""
    mine = 10 * coll.rank + torch.arange(1, 11, dtype=torch.float64)  # (10,)
    parts = await coll.gather(mine, root=0)
    if coll.rank == 0:
        print(show(torch.cat(parts)))


async def reduce(coll: aiodist.Communicator) -> None:
    """Rank 0 has the sum and the maximum of the ranks: 6.0 and 3.0."""
    rank = float(coll.rank)
    total, greatest = await aiodist.gather(coll.reduce(rank, root=0), coll.reduce(rank, "max", root=0))
    if coll.rank == 0:
        print(f"sum {total}, max {greatest}")


async def allreduce(coll: aiodist.Communicator) -> None:
    """Every rank has both, and the minimum, maximum and sum of rank + 1: 1.0, 4.0 and 10.0."""
    rank = float(coll.rank)
    total, greatest = await aiodist.gather(coll.allreduce(rank), coll.allreduce(rank, "max"))
    print(f"sum {total}, max {greatest}")
    least, greatest, total = await aiodist.gather(*[coll.allreduce(rank + 1, op) for op in ("min", "max", "sum")])
    print(f"min {least}, max {greatest}, sum {total}")


def show(t: torch.Tensor) -> str:
    """Return `t` formatted like numpy's arrays, on one line."""
    return f"[{' '.join(np.format_float_positional(x, precision=8, trim='.') for x in t.numpy())}]"


PATTERNS = {f.__name__: f for f in (point_to_point, broadcast, scatter, gather, reduce, allreduce)}


async def main(names: list[str]) -> None:
    async with aiodist.init() as coll:
        for name in names or PATTERNS:
            await PATTERNS[name](coll)


if __name__ == "__main__":
    aiodist.run(main, sys.argv[1:])
