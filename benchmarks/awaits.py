"""The cost of awaits: small ones, many in flight, and the comparison of operations by the ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from aiodist.bench import collectives
from aiodist.bench.timing import Contender, interleaved, pace
from aiodist.handles import gather
from aiodist.streams.writes import increment_version
from benchmarks import beside
from benchmarks.busy import BUSY, cores_to_keep_busy, spinning
from benchmarks.figures import figure, histogram
from benchmarks.first import allreduce_of, name_of
from benchmarks.suite import own

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["measure"]

SMALL = (4, 1 << 10, 8 << 10, 32 << 10)
COUNTS = {1000: 20, 20_000: 3}
"""Samples of each figure, by the number of handles in flight."""
VERSIONS = "torch:increment_version"
"""Name of torch's share of a call."""
_MANY_WARMUPS = 2
_EACH_BATCH = 2000
_Gather = Callable[..., Awaitable[Any]]


async def measure(session: Session) -> list[Record]:
    """Measure small awaits on every session's communicator, and everything else on the first.

    With spinning processes only the smallest await is measured, on the first communicator: gloo would take minutes,
    and the other figures are those of an idle machine.
    """
    if own(session.plan).get("busy"):
        return await _busy(session) if session.first else []
    records = []
    for nbytes in session.plan.sizes or SMALL:
        records += await collectives.measure_size(session, "allreduce", nbytes, name="await_small")
    records += await _comparing(session)
    if session.first:
        records += await _each(session, (session.plan.sizes or SMALL)[:1], "await_each")
        for count, usual in COUNTS.items():
            records += await _many(session, count, session.plan.repeat or usual)
        records += await collectives.measure_size(session, "allreduce", beside.LARGE)
        records += await beside.measure(session)
    return records


async def _busy(session: Session) -> list[Record]:
    """Measure small awaits while a process spins on every core."""
    cores = await cores_to_keep_busy(session.coll)
    session.notes.append("each core has a process that spins")
    with spinning(cores):
        return await _each(session, session.plan.sizes or SMALL[:1], f"await_small{BUSY}")


async def _each(session: Session, sizes: Sequence[int], name: str) -> list[Record]:
    """Measure small awaits, each operation a sample, since few take a thousand times as long as most.

    The operations are many in a row, so that ranks lose their cores; right after a barrier all ranks have theirs.
    """
    records: list[Record] = []
    for nbytes in sizes:
        contenders = collectives.contenders(session, "allreduce", nbytes)
        samples: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        repeat = session.plan.repeat or 10
        warmups = min(2, repeat)
        for turn in range(warmups + repeat):
            for contender in contenders if turn % 2 else reversed(contenders):
                await session.fence()
                seconds = [await _timed(contender) for _ in range(_EACH_BATCH)]
                if turn >= warmups:
                    samples[contender.name] += seconds
        found = await session.timed(name, nbytes, samples)
        records += [figure(record, histogram=histogram(samples[record.impl])) for record in found]
    return records


async def _timed(contender: Contender) -> float:
    began = perf_counter()
    called = contender.once()
    if contender.awaited:
        await called
    return perf_counter() - began


class _Finished:
    """An awaitable that has finished."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


async def _many(session: Session, count: int, repeat: int) -> list[Record]:
    """Issue `count` operations and gather them, with asyncio and with aiodist in turn; gather finished ones.

    Torch's share of a call is timed apart: two raises of a version, when the call returns and when the operation ends.
    """
    allreduce = allreduce_of(session)
    tensors = [torch.zeros(1) for _ in range(count)]
    finished = [_Finished() for _ in range(count)]
    gathers: dict[str, _Gather] = {f"gather_{count}": asyncio.gather, f"aiodist_gather_{count}": gather}
    waits: dict[str, list[float]] = {op: [] for op in gathers}
    issue: list[float] = []
    floor: list[float] = []
    versions: list[float] = []
    lists = [[t] for t in tensors]
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
        began = perf_counter()
        for one in lists:
            increment_version(one)
        if turn >= warmups:
            versions.append(2 * (perf_counter() - began) / count)
    records = []
    for op, samples in waits.items():
        beside_it = {"asyncio:finished": floor} if op == f"gather_{count}" else {}
        records += await session.timed(op, 4, {name_of(session): samples, **beside_it})
    return records + await session.timed(f"issue_{count}", 4, {name_of(session): issue, VERSIONS: versions})


async def _comparing(session: Session) -> list[Record]:
    """Measure 4 B of aiodist, which compares operations, and of gloo with and without torch's comparison."""
    found = next((peer for peer in session.peers if peer.name == "gloo"), None)
    if found is None:
        return []
    t = torch.zeros(1)
    contenders = [
        Contender(name_of(session), lambda: allreduce_of(session)(t), awaited=True),
        *_of_gloo(found.native, t),
    ]
    times = await interleaved(contenders, session.fence, pace(4, session.plan.repeat))
    return await session.timed("comparing", 4, times)


def _of_gloo(dist: Any, t: torch.Tensor) -> list[Contender]:  # noqa: ANN401  - the module
    """Return an allreduce, and one in torch's mode DETAIL, in which ranks compare their calls.

    All ranks must call this function, which makes a group.
    """
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        compared = dist.new_group(backend="gloo")
    finally:
        dist.set_debug_level(before)
    return [
        Contender("gloo", lambda: dist.all_reduce(t)),
        Contender("gloo:detail", lambda: dist.all_reduce(t, group=compared)),
    ]
