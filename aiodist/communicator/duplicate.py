"""A duplicate of a communicator, for an object that uses the communicator."""

from __future__ import annotations

import asyncio

from aiodist.communicator import Communicator
from aiodist.handles import internals


async def duplicate(coll: Communicator) -> Communicator:
    """Return a duplicate.

    A cancellation aborts the duplicate on all ranks, since other ranks may wait for this rank.
    """
    made = coll.dup()
    try:
        return await made
    except asyncio.CancelledError as error:
        why = f"rank {coll.rank} was cancelled while it was made: {error!r}"
        made.add_done_callback(lambda made: None if internals.error_of(made) else made.result().abort(why))
        raise
