"""Two ranks under any starter: `pair.py well|badly`."""

from __future__ import annotations

import sys

import torch

import aiodist
from tests.support.blocking import rounds
from tests.support.programs import say


async def main() -> None:
    async with aiodist.init() as coll:
        say(f"rank {coll.rank} of {coll.size} over {coll.backend}: {await coll.allreduce(torch.ones(2))}")
        if sys.argv[1] == "badly":
            if coll.rank == 1:
                raise SystemExit(3)
            try:
                await coll.recv(torch.zeros(1), src=1)
            finally:
                await rounds()
                say("released")


if __name__ == "__main__":
    aiodist.run(main)
