"""Four ranks that open the world with levels of their own, twice: `levels.py`."""

from __future__ import annotations

import aiodist
from aiodist.communicator import Hierarchy
from tests.support.programs import say


async def pairs(coll: aiodist.Communicator) -> Hierarchy:
    """Ranks 0 and 3, ranks 1 and 2."""
    first = await coll.hierarchy("all", form="tree")
    return await first.below("outer" if coll.rank in (0, 3) else "inner")


async def main() -> None:
    for _ in range(2):
        async with aiodist.init(levels=pairs) as coll:
            h = await coll.hierarchy()
            say("groups:", *(level.groups for level in h))
            say("forms:", *(level.form for level in h))
            say("within:", *[await level.intra.allgather_object(coll.rank) for level in h])
            say("across:", *[await level.inter.allgather_object(coll.rank) for level in h if level.inter.rank >= 0])
            span = await h.span(1, 2)
            say("span:", span.backend, await span.allreduce(coll.rank), span.levels.groups(1))
        try:
            span.barrier()
        except aiodist.CommunicatorClosed:
            say("closed")


if __name__ == "__main__":
    aiodist.run(main)
