"""Collectives of one host by size, as `aiodist bench` measures them, beside one more peer: `shm-c`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from aiodist.bench import collectives
from aiodist.errors import BackendUnavailable
from benchmarks import shm_c

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["measure"]

_SIZES = tuple((64 << 10) * 4**power for power in range(6))  # 64 KiB to 64 MiB


async def measure(session: Session) -> list[Record]:
    """Measure the operation at every size of the plan; `shm-c` is left out, with a note, where it cannot be had."""
    plan = replace(session.plan, sizes=session.plan.sizes or _SIZES)
    async with AsyncExitStack() as stack:
        peers = list(session.peers)
        if "shm-c" in plan.peers and plan.op == "allreduce" and session.first:
            try:
                peers.append(await stack.enter_async_context(shm_c.opened(session.coll)))
                session.notes.append(peers[-1].described)
            except BackendUnavailable as error:
                session.notes.append(str(error))
        return await collectives.measure(replace(session, plan=plan, peers=peers))
