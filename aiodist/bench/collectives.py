"""Operations by size, of aiodist and of its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from aiodist.bench.peers import Buffers
from aiodist.bench.plan import default_sizes
from aiodist.bench.timing import OVERWRITTEN_BYTES, Contender, interleaved, pace

if TYPE_CHECKING:
    from aiodist.bench.records import Record
    from aiodist.bench.session import Session
    from aiodist.communicator import Communicator

# the input of one rank has a block for each rank
_CUT = frozenset({"scatter", "reduce_scatter", "alltoall", "alltoall_single"})
_WITHOUT_IMPL = frozenset({"barrier", "sendrecv"})


async def measure(session: Session) -> list[Record]:
    """Measure the operation at every size of the plan."""
    op = session.plan.op
    sizes: tuple[int, ...] = (0,)
    if op != "barrier":
        sizes = session.plan.sizes or default_sizes(session.dtype.itemsize)
    records = []
    for nbytes in sizes:
        records += await measure_size(session, op, nbytes)
    return records


async def measure_size(session: Session, op: str, nbytes: int, *, name: str | None = None) -> list[Record]:
    """Measure `op` on `nbytes` of input of each rank; `name` of the records defaults to `op`."""
    found = contenders(session, op, nbytes)
    measured = buffers(session, op, nbytes).t.nbytes
    times = await interleaved(found, session.fence, pace(measured, session.plan.repeat))
    return await session.timed(name or op, measured, times)


def contenders(session: Session, op: str, nbytes: int) -> list[Contender]:
    """Return a contender for each implementation of aiodist, and those of the peers.

    Each overwrites its own tensors: tensors that another contender has just used would be in the caches.
    """
    found = []
    for impl in session.impls:
        if impl == "auto" or op not in _WITHOUT_IMPL:
            made, empty = buffers(session, op, nbytes), session.coll.arena_empty
            if impl == "arena":  # the same tensors, in memory that the ranks of a host share
                out = None if made.out is None else empty(made.out.shape, made.out.dtype).zero_()
                made = replace(made, t=empty(made.t.shape, made.t.dtype).zero_(), out=out)
            call = ours(session.coll, op, made, session.keywords(impl))
            found.append(Contender(f"aiodist:{impl}", call, awaited=True, overwrite=overwriting(made)))
    for peer in session.peers:
        for i in range(len(peer.contenders(op, buffers(session, op, nbytes)))):
            made = buffers(session, op, nbytes)
            found.append(replace(peer.contenders(op, made)[i], overwrite=overwriting(made)))
    if "copy" in session.plan.peers:
        made = buffers(session, op, nbytes)
        other = torch.empty_like(made.t)
        found.append(Contender("copy", partial(other.copy_, made.t), overwrite=overwriting(made)))
    return found


def overwriting(made: Buffers) -> Callable[[], Any] | None:
    """Return a function that overwrites this rank's input, or None for a short input.

    It writes ones, since a processor may skip a write of zeros over zeros.
    """
    return partial(made.t.fill_, 1) if made.t.nbytes >= OVERWRITTEN_BYTES else None


def buffers(session: Session, op: str, nbytes: int) -> Buffers:
    """Return tensors for `op`; inputs with blocks are shortened to blocks of equal size, at least one element."""
    ranks, rank = session.coll.size, session.coll.rank
    numel = nbytes // session.dtype.itemsize
    block = max(1, numel // ranks)
    if op in _CUT:
        numel = block * ranks
    filled = {
        "allgather": numel * ranks,
        "gather": numel * ranks if rank == 0 else None,
        "scatter": block,
        "reduce_scatter": block,
        "alltoall": numel,
        "alltoall_single": numel,
        "sendrecv": numel,
    }.get(op)
    # written once, so that the memory exists; a sum of zeros stays zero
    t = torch.full((numel,), 0, dtype=session.dtype, device="cpu")
    return Buffers(
        rank, ranks, t, None if filled is None else torch.full((filled,), 0, dtype=session.dtype, device="cpu")
    )


def ours(coll: Communicator, op: str, b: Buffers, keywords: dict[str, str]) -> Callable[[], Any]:
    """Return a call of aiodist, with `out=` if the operation takes it."""
    call: Callable[..., Any] = getattr(coll, op)
    dst, src = b.neighbours
    own: dict[str, tuple[Any, ...]] = {
        "barrier": (),
        "sendrecv": (b.t, dst, src),
        "scatter": (b.blocks(b.t) if b.is_root else None, b.root),
        "alltoall": (b.blocks(b.t),),
        "broadcast": (b.t, b.root),
        "gather": (b.t, b.root),
    }
    given: dict[str, Any] = {**keywords, **({"root": b.root} if op == "reduce" else {})}
    if b.out is not None:
        given["out"] = b.blocks(b.out) if op == "alltoall" else b.out
    return partial(call, *own.get(op, (b.t,)), **given)
