"""Pushes and pulls by size, of aiodist, torch's RPC and plain Send and Recv; small pushes a second; serving.

The last ranks serve, the others work. All libraries share the processes and take turns, round by round. The servers
wait on their loops, except for plain Send and Recv, which they answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import torch

from aiodist.bench.timing import Contender, Pace, interleaved
from aiodist.ps import ParameterServer
from benchmarks import ps_serving
from benchmarks.figures import figure
from benchmarks.ps_ways import SPLIT_BYTES, Mpi, Ours, Roles, Rpc, Way, rpc_opened
from benchmarks.suite import servers
from benchmarks.training import torch_threads

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session

__all__ = ["COUNT", "measure"]

_SIZES = (4 << 10, 256 << 10, 4 << 20, 64 << 20)
_SMALL = (64, 4 << 10)
COUNT = 1000
"""Small pushes in flight."""
_RULES = ("copy", "add")


async def measure(session: Session) -> list[Record]:
    """Measure every size of the plan, then small pushes, then the cost of serving for a rank that trains."""
    records = []
    with torch_threads(session.coll):
        async with _opened(session) as (ways, ps):
            for nbytes in session.plan.sizes or _SIZES:
                records += await _measure_size(session, ways, nbytes)
            for nbytes in _SMALL:
                records += await _measure_ops(session, ways, nbytes)
            if "ps" in session.impls:
                records += await ps_serving.measure(session, ps)
    return records


@asynccontextmanager
async def _opened(session: Session) -> AsyncIterator[tuple[list[Way], ParameterServer]]:
    """Open the libraries of the plan, and the parameter server."""
    coll, ways = session.coll, list[Way]()
    async with AsyncExitStack() as stack:
        if "rpc" in session.plan.peers:
            await stack.enter_async_context(rpc_opened(coll))
            session.notes.append(f"RPC of torch {torch.__version__} (TensorPipe over TCP)")
        ps = ParameterServer(coll, servers=servers(session.plan), split_bytes=SPLIT_BYTES)
        await stack.enter_async_context(ps)
        roles = Roles(coll.rank, ps.servers, ps.workers)
        ways += [Ours(ps, coll, roles, arena=impl == "ps-arena") for impl in session.impls]
        if "rpc" in session.plan.peers:
            ways.append(Rpc(roles))
        ways += [Mpi(peer.native, roles) for peer in session.peers if peer.name == "mpi4py"]
        yield ways, ps


async def _measure_size(session: Session, ways: Sequence[Way], nbytes: int) -> list[Record]:
    records = []
    async with AsyncExitStack() as stack:
        await _hold(session, ways, nbytes, stack)
        often = _often(nbytes, session.plan.repeat)
        for rule in _RULES:
            records += await _turns(session, "push", nbytes, [way.push(rule) for way in ways], often, rule)
        records += await _turns(session, "pull", nbytes, [way.pull() for way in ways], often)
        for rule in _RULES:
            records += await _turns(session, "push_pull", nbytes, [way.push_pull(rule) for way in ways], often, rule)
    return records


def _often(nbytes: int, repeat: int | None) -> Pace:
    """Return the pace of an operation: fewer samples than of a collective, since RPC takes milliseconds.

    Any call is slow for a while after a call of torch's RPC.
    """
    if nbytes <= 64 << 10:
        return Pace(repeat or 30, 20, warmups=min(3, repeat or 3), leads=20)
    return Pace(repeat or (20 if nbytes <= 4 << 20 else 10), 1, warmups=min(3, repeat or 3), leads=1)


async def _measure_ops(session: Session, ways: Sequence[Way], nbytes: int) -> list[Record]:
    """Measure small pushes of one worker, all in flight."""
    async with AsyncExitStack() as stack:
        await _hold(session, ways, nbytes, stack)
        often = Pace(session.plan.repeat or 10, 1, warmups=1)
        contenders = [way.pushes("add", COUNT) for way in ways]
        records = await _turns(session, "ps_ops", nbytes, contenders, often, "add", each=COUNT)
    return [figure(record, value=1 / record.seconds if record.seconds else None) for record in records]


async def _hold(session: Session, ways: Sequence[Way], nbytes: int, stack: AsyncExitStack) -> None:
    """Register a tensor of zeros with every library until the end of the stack."""
    t = torch.full((nbytes // session.dtype.itemsize,), 0, dtype=session.dtype)
    for way in ways:
        await stack.enter_async_context(way.holding(t))


async def _turns(
    session: Session,
    op: str,
    nbytes: int,
    contenders: Sequence[Contender],
    often: Pace,
    rule: str | None = None,
    *,
    each: int = 1,
) -> list[Record]:
    """Measure contenders in turn; a call runs `each` operations."""

    async def fence() -> None:
        # Not a peer's, which blocks the loop and polls: servers must wait as they do in use.
        await session.coll.barrier()

    times = await interleaved(contenders, fence, often)
    found = await session.timed(op, nbytes, {name: [t / each for t in samples] for name, samples in times.items()})
    return [figure(record, rule=rule, busbw_gbps=None) for record in found]
