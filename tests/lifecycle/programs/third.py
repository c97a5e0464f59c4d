"""Two ranks disagree while a third is late: `third.py`, on three ranks; then three times in a row, which is the end."""

from __future__ import annotations

import torch

import aiodist
from tests.support.programs import say


async def main() -> None:
    async with aiodist.init() as world:
        coll = await world.dup()
        await coll.barrier()
        if coll.rank == 2:  # after the others were notified
            for _ in range(2):
                await world.recv()
        try:
            await coll.allreduce(torch.ones(8), op="max" if coll.rank == 1 else "sum")
        except aiodist.MismatchError as error:
            sides = "sum at" in str(error) and "max at" in str(error)
            say("told:", sides)
            if coll.rank != 2:
                await world.send(torch.ones(1), 2)
        assert (await coll.allreduce(torch.ones(8)))[0] == 3
        kinds = []
        for _ in range(4):
            try:
                await coll.allreduce(torch.ones(8), op="max" if coll.rank == 1 else "sum")
            except aiodist.AiodistError as error:
                kinds.append(type(error).__name__)
        say("then:", *kinds)


if __name__ == "__main__":
    aiodist.run(main)
