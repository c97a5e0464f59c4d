"""The leave of one rank: the rank waits for its requests, then for all ranks."""

from __future__ import annotations

import asyncio
from functools import partial
from math import inf

from aiodist.handles import Operation
from aiodist.handles.kernel import transfer
from aiodist.ps.client import Client
from aiodist.ps.context import Context
from aiodist.ps.watching import Run

_DRAIN_SECONDS = 1e-3
_LAST_SECONDS = 60.0
"""Longest time from the goodbye of all ranks to the last entry, in seconds."""
_NO_LIMIT = inf  # a rank that leaves waits for the others, however long they work


async def leave(context: Context, client: Client, run: Run) -> None:
    """Leave the clocks of all servers, wait for this rank's requests, and then for all ranks (loop's thread)."""
    await run("leave", partial(client.asking_all, "leave"), _NO_LIMIT)
    while client.busy:  # noqa: ASYNC110  - any thread may receive the end of a request
        await asyncio.sleep(_DRAIN_SECONDS)
    if (error := client.pushes.late_error()) is not None:
        raise error
    await run("leave", partial(_say_goodbye, context, client), _NO_LIMIT)
    if not context.gone:  # else the transport is aborted
        last = run("leave", partial(transfer, context.coalescer.when_last), _LAST_SECONDS)
        senders = [rank for rank in (context.living()[0], *range(context.size)) if rank != context.rank]
        Operation.of(last).set_late(lambda: dict.fromkeys(senders[:1], "last entry"))
        await last
    await asyncio.sleep(0)  # calls that syncs have posted come before the end


async def _say_goodbye(context: Context, client: Client) -> None:
    """Wait for all ranks at the first server, or at the next one after its loss."""
    while (living := context.living()) and not (await client.ask_living(living[0], "bye")):
        pass
    if not living:
        return
    others = [rank for rank in range(context.size) if rank != living[0] and rank not in context.gone]
    if others and context.rank == others[0]:
        context.coalescer.put_last(living[0])
