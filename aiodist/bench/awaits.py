"""What an await costs: small ones, many at once, and the comparison of what ranks issue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from aiodist.bench import beside, collectives
from aiodist.bench.peers import Gloo
from aiodist.bench.timing import Contender, interleaved, pace
from aiodist.handles import gather

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

SMALL = (4, 1 << 10, 8 << 10, 32 << 10)
COUNTS = {1000: 20, 20_000: 3}
"""How many handles are awaited at once, and how many samples are taken of each figure."""
_MANY_WARMUPS = 2
_Gather = Callable[..., Awaitable[Any]]


async def measure(session: Session) -> list[Record]:
    """Measure small awaits on every session's communicator, and everything else on the first.

    Beside spinning processes only the smallest is measured, and on the first alone: gloo would take minutes, and the
    rest says what ours does to a machine that is free.
    """
    if session.plan.busy and not session.first:
        return []
    records = []
    for nbytes in session.plan.sizes or (SMALL[:1] if session.plan.busy else SMALL):
        records += await collectives.measure_size(session, "allreduce", nbytes, name="await_small")
    if session.plan.busy:
        return records
    records += await _comparing(session)
    if session.first:
        for count, usual in COUNTS.items():
            records += await _many(session, count, session.plan.repeat or usual)
        records += await collectives.measure_size(session, "allreduce", beside.LARGE)
        records += await beside.measure(session)
    return records


class _Finished:
    """The least that can be awaited: over at once."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


async def _many(session: Session, count: int, repeat: int) -> list[Record]:
    """Issue so many and gather them, in turn with asyncio's gather and with ours; and gather what is over already."""
    allreduce = session.allreduce
    tensors = [torch.zeros(1) for _ in range(count)]
    finished = [_Finished() for _ in range(count)]
    gathers: dict[str, _Gather] = {f"gather_{count}": asyncio.gather, f"aiodist_gather_{count}": gather}
    waits: dict[str, list[float]] = {op: [] for op in gathers}
    issue: list[float] = []
    floor: list[float] = []
    warmups = min(_MANY_WARMUPS, repeat)
    for turn in range(warmups + repeat):
        for op, gathered in gathers.items():
            await session.fence()
            began = perf_counter()
            handles = [allreduce(t) for t in tensors]
            issued = perf_counter()
            await gathered(*handles)
            done = perf_counter()
            if turn >= warmups:
                issue.append((issued - began) / count)
                waits[op].append((done - issued) / count)
        await session.fence()
        began = perf_counter()
        await asyncio.gather(*finished)
        if turn >= warmups:
            floor.append((perf_counter() - began) / count)
    records = []
    for op, samples in waits.items():
        beside_it = {"asyncio:finished": floor} if op == f"gather_{count}" else {}
        records += await session.timed(op, 4, {session.name: samples, **beside_it})
    return records + await session.timed(f"issue_{count}", 4, {session.name: issue})


async def _comparing(session: Session) -> list[Record]:
    """4 B of ours, which compares what ranks issue, beside gloo without and with torch's own comparison."""
    found = next((peer for peer in session.peers if isinstance(peer, Gloo)), None)
    if found is None:
        return []
    t = torch.zeros(1)
    contenders = [Contender(session.name, lambda: session.allreduce(t), awaited=True), *found.comparing(t)]
    times = await interleaved(contenders, session.fence, pace(4, session.plan.repeat))
    return await session.timed("comparing", 4, times)
