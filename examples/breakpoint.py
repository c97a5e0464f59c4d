"""All ranks stop where one of them finds a mistake, and pdb opens on that rank, in a terminal:

    aiodist run -n 2 examples/breakpoint.py

Look at `batch`, repair it by `batch = batch.clamp(min=1)`, and continue with `c`. Without a terminal the program shows
how to attach a debugger.
"""

import torch

import aiodist


async def main() -> None:
    async with aiodist.init(timeout=10) as coll:
        for step in range(3):
            batch = torch.arange(4.0) + coll.rank + step  # of rank 0, the first one has a zero
            wrong = await coll.allgather_object(bool((batch == 0).any()))
            if any(wrong):
                try:
                    await coll.breakpoint(rank=wrong.index(True))  # no deadline runs at the prompt
                except aiodist.ConfigError as error:
                    coll.print(error)
            mean = await coll.allreduce(batch.reciprocal().sum(), op="mean")
            coll.print(f"step {step}: {mean:.3f}")


if __name__ == "__main__":
    aiodist.run(main)
