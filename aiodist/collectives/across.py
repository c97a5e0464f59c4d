"""Reductions of a list of tensors over all ranks, in the fixed order of all parts (`schedules.parts`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from aiodist.backends.arithmetic import combine, combined, copy, from_wire, to_wire, wire_op
from aiodist.backends.base import Exchange, Primitive
from aiodist.collectives.implementations import Primitives
from aiodist.schedules import Blocks
from aiodist.schedules.parts import Span, follows_ranks, merges, spans_of
from aiodist.streams.memory import flat
from aiodist.types import ReduceOp

_BLOCK = 1 << 16
"""Elements of all parts that are combined at a time if there are partial results, so that these stay in the caches."""


async def reduce_parts(
    p: Primitives, ts: Sequence[Tensor], into: Sequence[Tensor], op: ReduceOp, root: int | None = None
) -> None:
    """Combine the parts `ts` of all ranks into each of `into`, which is empty on other ranks than a `root`.

    `into` may have tensors of `ts`. Each rank combines its nodes of the tree. If each has one, an ordinary reduction
    over the ranks follows. Otherwise each rank combines a block of all ranks' nodes. With an `impl` that has another
    order, each rank combines its parts first. The number of parts may differ between ranks.
    """
    kind = "allreduce" if root is None else "reduce"
    counts = [len(ts)]
    if p.ep.size > 1:
        counts = (await p.exchange_facts(torch.tensor(counts, device="cpu"))).flatten().tolist()
        p = p.afterwards()
    ends = [0, *accumulate(counts)]
    ordered = p.in_fixed_order(kind)
    spans = [spans_of(start, stop, ends[-1]) for start, stop in pairwise(ends)]
    if ordered is None or follows_ranks(spans):
        total = _room(ts[0], into)
        _combine_parts(total, ts, op)
        if p.ep.size > 1:
            await (ordered or p).run([Primitive(kind, total, op=wire_op(op), root=root or 0)])
    else:
        total = await _combine_nodes(ordered, ts, spans, ends, op, root)
    for t in into[:1]:
        from_wire(total, t, op, ends[-1])
    for t in into[1:]:
        copy(t, into[0].view(t.shape))


async def _combine_nodes(
    p: Primitives,
    ts: Sequence[Tensor],
    spans: Sequence[Sequence[Span]],
    ends: Sequence[int],
    op: ReduceOp,
    root: int | None,
) -> Tensor:
    """Combine block r of all nodes on rank r, then send the results to `root`, or to all ranks."""
    rank, size, first = p.ep.rank, p.ep.size, ends[p.ep.rank]
    mine = []
    for start, stop in spans[rank]:
        mine.append(_room(ts[0], []))
        _combine_parts(mine[-1], ts[start - first : stop - first], op)
    n = mine[0].numel()
    blocks = Blocks.even(n, size)
    cuts = [slice(blocks.start(r), blocks.stop(r)) for r in range(size)]
    sent = torch.cat([node[cut] for cut in cuts for node in mine])
    counts = [len(mine) * blocks.count(r) for r in range(size)]
    received = [len(nodes) * blocks.count(rank) for nodes in spans]
    arrived = sent.new_empty(sum(received))
    await p.run([Primitive("alltoall", sent, arrived, counts=counts, received=received)])
    of_all = [span for of_rank in spans for span in of_rank]
    nodes = arrived.view(len(of_all), blocks.count(rank))
    for i, j in merges(of_all, ends[-1]):
        combine(nodes[i], nodes[j], wire_op(op))
    whole = mine[0]
    if root is None:
        await p.run([Primitive("allgather", nodes[0], whole, counts=blocks.counts())])
    elif rank == root:
        copy(whole[cuts[rank]], nodes[0])
        others = [(r, whole[cuts[r]]) for r in range(size) if r != rank]
        await p.exchange([Exchange(whole, [], others)])
    else:
        await p.exchange([Exchange(whole, [(root, nodes[0])], [])])
    return whole


def _room(t: Tensor, into: Sequence[Tensor]) -> Tensor:
    """Return memory for a partial result of tensors like `t`: that of the first of `into` if it has the right dtype."""
    kind = to_wire(flat(t)[:0]).dtype
    if into and into[0].device == t.device and kind.itemsize == t.itemsize:
        return to_wire(into[0])
    return torch.empty(t.numel(), dtype=kind, device=t.device)


def _combine_parts(total: Tensor, ts: Sequence[Tensor], op: ReduceOp) -> None:
    """Combine the parts of a node into `total`, which may be the memory of one of them."""
    step = _BLOCK if total.is_cpu and len(ts) > 2 else max(total.numel(), 1)
    flats = [flat(t) for t in ts]
    for at in range(0, total.numel(), step):
        block = total[at : at + step]
        result = combined([t[at : at + step] for t in flats], wire_op(op), block.device, block)
        if result.data_ptr() != block.data_ptr():
            copy(block, result)
