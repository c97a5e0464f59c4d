"""Programs that end with an exception, for checks of their output: `failing.py NAME`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import torch

import aiodist


@contextlib.asynccontextmanager
async def resource() -> AsyncIterator[None]:
    yield


async def deeper(coll: aiodist.Communicator) -> None:
    async with resource():
        await coll.allreduce(torch.ones(3))
        if coll.rank == coll.size - 1:
            try:
                int("x")
            except ValueError as error:
                error.add_note("a note of the program")
                raise LookupError("boom") from error
        await coll.barrier()


async def plain(coll: aiodist.Communicator) -> None:
    await asyncio.gather(deeper(coll))


async def grouped(coll: aiodist.Communicator) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(deeper(coll))
        group.create_task(asyncio.Event().wait())


async def wrong_call(coll: aiodist.Communicator) -> None:
    await coll.allreduce(torch.ones(4).to_sparse())


async def other_name(coll: aiodist.Communicator) -> None:
    await coll.all_reduce(torch.ones(4))  # type: ignore[attr-defined]


async def unawaited(coll: aiodist.Communicator) -> None:
    coll.dup().allreduce(torch.ones(4))  # type: ignore[attr-defined]


async def unopened(coll: aiodist.Communicator) -> None:
    aiodist.init().allreduce(torch.ones(4))  # type: ignore[attr-defined]


async def hooked(coll: aiodist.Communicator) -> None:
    sys.excepthook = lambda *_: print("the program's own", file=sys.stderr)
    raise ValueError("boom")


async def main() -> None:
    async with aiodist.init(elastic="opening" in sys.argv) as coll:
        await globals()[sys.argv[1]](coll)


if __name__ == "__main__":
    (asyncio.run if "asyncio" in sys.argv else aiodist.run)(main())
