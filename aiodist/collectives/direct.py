"""Collectives over nothing but `isend` and `irecv`: every rank talks to every other, or all to one.

They serve where a library lacks an operation, and for few ranks. p ranks, n bytes per rank. Reductions combine in
rank order, so their results are the same on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aiodist.backends.inplace import copy
from aiodist.collectives.arithmetic import combine
from aiodist.collectives.program import Endpoint, Program
from aiodist.types import ReduceOp

__all__ = ["allgather", "allreduce", "broadcast", "reduce", "reduce_scatter", "scan"]


def broadcast(ep: Endpoint, t: Tensor, root: int) -> Program[None]:
    """Root sends to each: p-1 messages of n bytes, all from root."""
    if ep.rank == root:
        yield [ep.send(t, rank) for rank in range(ep.size) if rank != root]
    else:
        yield [ep.recv(t, root)]


def reduce(ep: Endpoint, t: Tensor, op: ReduceOp, root: int) -> Program[None]:
    """Root receives from each and combines into its `t`: p-1 messages, (p-1)n bytes of scratch on root."""
    if ep.rank != root:
        yield [ep.send(t, root)]
        return
    parts = {rank: torch.empty_like(t) for rank in range(ep.size) if rank != root}
    yield [ep.recv(part, rank) for rank, part in parts.items()]
    parts[root] = t.clone() if root else t
    for rank in range(1, ep.size):
        combine(parts[0], parts[rank], op)
    if root:
        copy(t, parts[0])


def allreduce(ep: Endpoint, t: Tensor, op: ReduceOp) -> Program[None]:
    """Reduce to rank 0, broadcast from there: 2(p-1) messages of n bytes."""
    yield from reduce(ep, t, op, 0)
    yield from broadcast(ep, t, 0)


def allgather(ep: Endpoint, t: Tensor, out: Tensor, counts: Sequence[int]) -> Program[None]:
    """Each sends its part to each: p-1 messages out and in per rank."""
    blocks = out.split(list(counts))
    others = [rank for rank in range(ep.size) if rank != ep.rank]
    yield [ep.recv(blocks[rank], rank) for rank in others] + [ep.send(t, rank) for rank in others]
    if blocks[ep.rank].data_ptr() != t.data_ptr():
        copy(blocks[ep.rank], t)


def reduce_scatter(ep: Endpoint, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp) -> Program[None]:
    """Each sends block r to rank r, which combines: p-1 messages out and in, (p-1)n/p bytes of scratch."""
    blocks = t.split(list(counts))
    mine = blocks[ep.rank]
    parts = [mine if rank == ep.rank else torch.empty_like(mine) for rank in range(ep.size)]
    others = [rank for rank in range(ep.size) if rank != ep.rank]
    yield [ep.recv(parts[rank], rank) for rank in others] + [ep.send(blocks[rank], rank) for rank in others]
    total = parts[0].clone()
    for part in parts[1:]:
        combine(total, part, op)
    copy(out, total)


def scan(ep: Endpoint, t: Tensor, op: ReduceOp) -> Program[None]:
    """A chain in rank order: one message of n bytes in and one out, p-1 steps."""
    if ep.rank:
        before = torch.empty_like(t)
        yield [ep.recv(before, ep.rank - 1)]
        combine(before, t, op)
        copy(t, before)
    if ep.rank + 1 < ep.size:
        yield [ep.send(t, ep.rank + 1)]
