"""Many operations in flight, and three ways to wait for them.

aiodist run -n 2 examples/gather_many.py prints on each rank

    asyncio.gather: the sum is 2.0, rank 1 says hello
    aiodist.gather: 100 sums, the last one 198.0
    as they finish: 10 handles
    within 0.05 s: nothing came
"""

import asyncio

import torch

import aiodist


async def main() -> None:
    async with aiodist.init() as coll:
        last = coll.size - 1

        # asyncio's tools accept handles together with other awaitables.
        ones, text, _ = await asyncio.gather(
            coll.allreduce(torch.ones(1 << 16)),  # (65536,)
            coll.broadcast_object(f"rank {coll.rank} says hello", root=last),
            asyncio.sleep(0.01),
        )
        print(f"asyncio.gather: the sum is {ones[0].item()}, {text}")

        # aiodist.gather accepts only handles. It is cheaper: it needs one waiter for all of them.
        sums = await aiodist.gather(*[coll.allreduce(torch.tensor(float(i))) for i in range(100)])
        print(f"aiodist.gather: {len(sums)} sums, the last one {sums[-1].item()}")

        # Handles finish in any order; process each one when it finishes.
        handles = [coll.allreduce(torch.ones(1 << i)) for i in reversed(range(10))]
        finished = [handle.op async for handle in aiodist.as_completed(handles)]
        print(f"as they finish: {len(finished)} handles")

        # A deadline ends the wait, not the transfer. A receive without a matching send can be cancelled.
        message = coll.recv_object()
        try:
            async with aiodist.timeout(0.05):
                await message
        except aiodist.OperationTimeout:
            print("within 0.05 s: nothing came")
        message.cancel()


if __name__ == "__main__":
    aiodist.run(main)
