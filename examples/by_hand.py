"""Collectives whose results you can check by hand, on two ranks.

aiodist run -n 2 examples/by_hand.py prints on both ranks

    sum [3. 5. 7.]
    mean [1.5 2.5 3.5]
    allgather [0. 0. 0. 1. 1. 1.]
    broadcast 99
"""

import torch

import aiodist


async def main() -> None:
    async with aiodist.init() as coll:
        mine = torch.tensor([1.0, 2.0, 3.0]) + coll.rank  # (3,): [1, 2, 3] on rank 0, [2, 3, 4] on rank 1

        total = await coll.allreduce(mine, out=torch.empty(3))  # with `out`, `mine` stays unchanged
        print("sum", total.numpy())

        mean = await coll.allreduce(mine, op="mean")  # without, the result replaces `mine`
        print("mean", mean.numpy())

        everything = await coll.allgather(torch.ones(3) * coll.rank, out=torch.empty(3 * coll.size))  # (3 * size,)
        print("allgather", everything.numpy())

        number = await coll.broadcast(99 if coll.rank == 0 else 0, root=0)
        print("broadcast", number)


if __name__ == "__main__":
    aiodist.run(main)
