"""Two ranks add numbers and tensors: every call returns a handle, and `await` completes it.

aiodist run -n 2 examples/hello.py prints, after the number of the rank,

    rank 0 of 2: sum 3, mean tensor([0.5000, 0.5000])
    rank 1 of 2: sum 3, mean tensor([0.5000, 0.5000])
"""

import torch

import aiodist


async def main() -> None:
    async with aiodist.init() as coll:  # a communicator of all ranks
        total = await coll.allreduce(coll.rank + 1)  # a number in, a number out

        t = torch.full((2,), float(coll.rank))  # (2,)
        handle = coll.allreduce(t, op="mean")  # issued: it runs while this code continues
        await handle  # now `t` holds the mean over the ranks; a collective works in place

        print(f"rank {coll.rank} of {coll.size}: sum {total}, mean {t}")


if __name__ == "__main__":
    aiodist.run(main)
