"""Operations by size, of aiodist and of its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from aiodist.bench.peers import ROOT, Buffers
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
    op, sizes = session.plan.op, session.plan.sizes or default_sizes(session.dtype.itemsize)
    records = []
    for nbytes in (0,) if op == "barrier" else sizes:
        records += await measure_size(session, op, nbytes)
    return records


async def measure_size(
    session: Session, op: str, nbytes: int, *, name: str | None = None, others: Sequence[Contender] = ()
) -> list[Record]:
    """Measure `op` on `nbytes` of input of each rank, in turn with `others`; `name` of the records defaults to `op`."""
    measured = buffers(session.coll, op, nbytes, session.dtype).t.nbytes
    found = [*contenders(session, op, nbytes), *others]
    times = await interleaved(found, session.fence, pace(measured, session.plan.repeat))
    return await session.timed(name or op, measured, times)


def contenders(session: Session, op: str, nbytes: int) -> list[Contender]:
    """Return a contender for each implementation of aiodist, and those of the peers.

    Each overwrites its own tensors: tensors that another contender has just used would be in the caches.
    """
    found = []
    make = partial(buffers, session.coll, op, nbytes, session.dtype)
    for impl in session.impls:
        if impl == "auto" or op not in _WITHOUT_IMPL:
            made, empty = make(), session.coll.arena_empty
            if impl == "arena":  # the same tensors, in memory that the ranks of a host share
                out = None if made.out is None else empty(made.out.shape, made.out.dtype).zero_()
                made = replace(made, t=empty(made.t.shape, made.t.dtype).zero_(), out=out)
            call = ours(session.coll, op, made, session.keywords(impl))
            found.append(Contender(f"aiodist:{impl}", call, awaited=True, overwrite=overwriting(made)))
    for peer in session.peers:
        for i in range(len(peer.contenders(op, make()))):
            made = make()
            found.append(replace(peer.contenders(op, made)[i], overwrite=overwriting(made)))
    return found


def overwriting(made: Buffers) -> Callable[[], Any] | None:
    """Return a function that overwrites this rank's input, or None for a short input.

    It writes ones, since a processor may skip a write of zeros over zeros.
    """
    return partial(made.t.fill_, 1) if made.t.nbytes >= OVERWRITTEN_BYTES else None


def buffers(coll: Communicator, op: str, nbytes: int, dtype: torch.dtype = torch.float32) -> Buffers:
    """Return tensors for `op`; inputs with blocks are shortened to blocks of equal size, at least one element."""
    ranks, rank = coll.size, coll.rank
    numel = nbytes // dtype.itemsize
    block = max(1, numel // ranks)
    if op in _CUT:
        numel = block * ranks
    out = {
        "allgather": numel * ranks,
        "gather": numel * ranks if rank == ROOT else None,
        "scatter": block,
        "reduce_scatter": block,
        "alltoall": numel,
        "alltoall_single": numel,
        "sendrecv": numel,
    }.get(op)
    # written once, so that the memory exists; a sum of zeros stays zero
    zeros = partial(torch.full, fill_value=0, dtype=dtype, device="cpu")
    return Buffers(rank, ranks, zeros((numel,)), None if out is None else zeros((out,)))


def ours(coll: Communicator, op: str, b: Buffers, keywords: dict[str, str]) -> Callable[[], Any]:
    """Return a call of aiodist, with `out=` if the operation takes it."""
    call: Callable[..., Any] = getattr(coll, op)
    arguments: dict[str, tuple[Any, ...]] = {
        "barrier": (),
        "sendrecv": (b.t, *b.neighbours),
        "scatter": (b.blocks(b.t) if b.rank == ROOT else None, ROOT),
        "alltoall": (b.blocks(b.t),),
        "broadcast": (b.t, ROOT),
        "gather": (b.t, ROOT),
    }
    given: dict[str, Any] = {**keywords, **({"root": ROOT} if op == "reduce" else {})}
    if b.out is not None:
        given["out"] = b.blocks(b.out) if op == "alltoall" else b.out
    return partial(call, *arguments.get(op, (b.t,)), **given)
