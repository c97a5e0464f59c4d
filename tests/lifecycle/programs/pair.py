"""Two ranks under any starter: `pair.py well|badly`."""

from __future__ import annotations

import asyncio
import sys

import torch

import aiodist


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")  # at once: ranks may share a pipe
    sys.stdout.flush()


async def main() -> None:
    async with aiodist.init() as coll:
        say(f"rank {coll.rank} of {coll.size} over {coll.backend}: {await coll.allreduce(torch.ones(2))}")
        if sys.argv[1] == "badly":
            if coll.rank == 1:
                raise SystemExit(3)
            try:
                await coll.recv(torch.zeros(1), src=1)
            finally:
                await asyncio.sleep(0.2)
                say("released")


if __name__ == "__main__":
    aiodist.run(main)
