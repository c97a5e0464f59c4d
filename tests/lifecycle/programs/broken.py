"""The code that drives a rank's operations raises from some moment on: `broken.py`, on two ranks."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import torch

import aiodist
from aiodist.handles import Progress

kinds: set[Any] = set()
"""What is polled."""
add_poller = Progress.add_poller


def noting(progress: Progress, poller: Any) -> None:
    kinds.add(type(poller))
    add_poller(progress, poller)


def fail(*_: object) -> bool:
    raise RuntimeError("nothing moves")


async def main() -> None:
    async with aiodist.init() as coll:
        t = torch.ones(100_000 + coll.rank)  # no lane gathers tensors of different shapes by itself
        await coll.allgather(t)  # from then on all is there that polls
        if coll.rank == 0:
            asyncio.get_running_loop().set_exception_handler(lambda *_: None)
            for kind in kinds:
                kind.poll = fail
        try:
            async with asyncio.timeout(20):
                for _ in range(1000):  # on some way or other it has to be polled for
                    await coll.allgather(t)
        except aiodist.AiodistError as error:
            sys.stdout.write(f"raised: {type(error).__name__} {'nothing moves' in str(error)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    Progress.add_poller = noting  # type: ignore[method-assign, assignment]
    aiodist.run(main)
