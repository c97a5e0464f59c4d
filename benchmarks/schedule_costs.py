"""Costs of schedules, without a run: messages and elements of the busiest rank; and a lower bound.

A cost takes `(size, n)`, or `(size, blocks)`, `(size, sends)` of alltoall, and `chunks=` if the schedule has chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from aiodist.schedules import Blocks
from aiodist.schedules.bruck import length
from aiodist.schedules.direct import LONG
from aiodist.schedules.doubling import Core, bound
from aiodist.schedules.plan import cut, lanes_of, rounds

__all__ = ["Cost", "cost_of", "lower_bound"]


class Cost(NamedTuple):
    """The largest numbers of messages and of elements that a rank sends."""

    messages: int
    elements: int


def cost_of(operation: str, name: str) -> Callable[..., Cost]:
    """Return the function for the cost of a schedule."""
    return _COSTS[operation][name]


def lower_bound(operation: str, size: int, n: int) -> Cost:
    """Return the least that any algorithm needs: messages in sequence, and elements that some rank sends or receives.

    `n` is the elements of the longest buffer of a rank: the result of allgather, the tensor of reduce_scatter, the
    input of a rank in alltoall. Each message informs at most one more rank, so log2(size) rounds, rounded up; elements
    are rounded up too. Chan, Heimlich, Purkayastha, van de Geijn: Collective communication: theory, practice, and
    experience, 2007, section 3, DOI 10.1002/cpe.1206.
    """
    if size == 1 or n == 0:
        return Cost(0, 0)
    if operation in ("broadcast", "reduce", "scan"):
        elements = n
    else:
        times = 2 if operation == "allreduce" else 1
        elements = -(-times * n * (size - 1) // size)
    return Cost((size - 1).bit_length(), elements)


def _ring_allreduce(size: int, n: int, *, chunks: int = 1) -> Cost:
    """No block is longer than the one before it, and rank size - 2 sends all blocks twice but the last two."""
    messages = elements = 0
    for start, stop in lanes_of(n, chunks) if size > 1 else ():
        blocks = Blocks.even(stop - start, size)
        kept = [blocks.count(size - 2), blocks.count(size - 1)]
        messages += 2 * min(stop - start, size) - sum(count > 0 for count in kept)
        elements += 2 * (stop - start) - sum(kept)
    return Cost(messages, elements)


def _all_but_mine(size: int, blocks: Blocks, *, chunks: int = 1) -> Cost:
    """Each rank sends all chunks except those of its own block."""
    if size == 1:
        return Cost(0, 0)
    counts = blocks.counts()
    pieces = [min(count, chunks) for count in counts]
    return Cost(sum(pieces) - min(pieces), blocks.total - min(counts))


def _tree_broadcast(size: int, n: int, *, chunks: int = 1) -> Cost:
    """Root sends everything to each of its children."""
    return Cost(rounds(size) * len(lanes_of(n, chunks)), rounds(size) * n)


def _tree_reduce(size: int, n: int, *, chunks: int = 1) -> Cost:
    """Every rank except root sends everything once."""
    return Cost(len(lanes_of(n, chunks)), n) if size > 1 else Cost(0, 0)


def _chain(size: int, n: int, *, chunks: int = 1) -> Cost:
    """Every rank except the last sends everything once."""
    return Cost(len(cut(n, chunks)), n) if size > 1 else Cost(0, 0)


def _direct_broadcast(size: int, n: int) -> Cost:
    """Root sends all blocks except its own."""
    return Cost(size - 1 if n else 0, (size - 1) * n)


def _direct_allreduce(size: int, n: int, *, chunks: int = 1) -> Cost:
    """Rank 0 sends the result to all, or its block, the longest of each chunk, after the others' blocks."""
    if n < LONG or size == 1:
        return _direct_broadcast(size, n)
    spans = [stop - start for start, stop in lanes_of(n, chunks)]
    return Cost(2 * (size - 1) * len(spans), sum(span + (size - 2) * -(-span // size) for span in spans))


def _direct_reduce(size: int, n: int, *, chunks: int = 1) -> Cost:
    """Every rank except root sends everything once, in blocks to the ranks that combine them if it is long."""
    if size == 1 or n == 0:
        return Cost(0, 0)
    return Cost(1, n) if n < LONG else Cost(size * len(lanes_of(n, chunks)), n)


def _direct_allgather(size: int, blocks: Blocks) -> Cost:
    """The rank with the longest block sends it to all others."""
    return _direct_broadcast(size, blocks.largest)


def _bruck_allgather(size: int, blocks: Blocks) -> Cost:
    """The largest part of a rank before each exchange, as far as it is sent."""
    sent = [min(1 << i, size - (1 << i)) for i in range(rounds(size))]
    if blocks.total == 0:
        return Cost(0, 0)
    messages = elements = 0
    for rank in range(size):
        lengths = [length(blocks, rank, count) for count in sent]
        messages = max(messages, sum(length > 0 for length in lengths))
        elements = max(elements, sum(lengths))
    return Cost(messages, elements)


def _bruck_alltoall(size: int, sends: Blocks) -> Cost:
    """At each distance, the blocks with that bit in their distance: the last half of each 2 * distance blocks."""
    count = sends.largest
    moved = 0
    for distance in (1 << i for i in range(rounds(size))):
        whole, rest = divmod(size, 2 * distance)
        moved += whole * distance + max(rest - distance, 0)
    return Cost(rounds(size) if count else 0, moved * count)


def _doubling_allreduce(size: int, n: int) -> Cost:
    """A rank that acts for another sends it the result, after log2 of the power of two below `size` exchanges."""
    core = Core.of(size)
    messages = len(core.halves()) + (core.extra > 0)
    return Cost(messages if n else 0, messages * n)


def _doubling_scan(size: int, n: int) -> Cost:
    """Rank 0 has a rank above it at each distance."""
    return Cost(rounds(size) if n else 0, rounds(size) * n)


def _halving_allreduce(size: int, n: int) -> Cost:
    """The first of the core sends most: its blocks are the longest, and it acts for another if any does."""
    if size == 1 or n == 0:
        return Cost(0, 0)
    core = Core.of(size)
    blocks = Blocks.even(n, core.count)
    acts = core.extra > 0
    messages = sum(1 + (half < min(n, core.count)) for half in core.halves())
    return Cost(messages + acts, n * (1 + acts) + sum(blocks.start(half) for half in core.halves()[1:]))


def _halving_reduce_scatter(size: int, blocks: Blocks) -> Cost:
    """A rank outside the core sends all elements; inside it, each sends what is not its own."""
    if size == 1:
        return Cost(0, 0)
    core = Core.of(size)
    bounds = [bound(blocks, core, i) for i in range(core.count + 1)]
    # From the leaves of the tree of halves to its root: the most messages of any rank below each node.
    most = [int(core.acts(core.rank(i)) and blocks.count(2 * i) > 0) for i in range(core.count)]
    for half in core.halves():
        other = [bounds[i + half] > bounds[i] for i in range(0, core.count, half)]
        sums = [most[i] + other[i ^ 1] for i in range(len(most))]
        most = _higher(sums)
    return Cost(most[0], blocks.total if core.extra else blocks.total - min(blocks.counts()))


def _doubling_allgather(size: int, blocks: Blocks) -> Cost:
    """The part of each rank of the core before each exchange, and everything for a rank that acts for another."""
    core = Core.of(size)
    bounds = [bound(blocks, core, i) for i in range(core.count + 1)]
    acts = [core.acts(core.rank(i)) for i in range(core.count)]
    messages = [int(act and blocks.total > 0) for act in acts]
    elements = [blocks.total * act for act in acts]
    for half in core.halves():
        lengths = [bounds[i + half] - bounds[i] for i in range(0, core.count, half)]
        messages = _higher([number + (length > 0) for number, length in zip(messages, lengths, strict=True)])
        elements = _higher([number + length for number, length in zip(elements, lengths, strict=True)])
    return Cost(messages[0], elements[0])


def _higher(numbers: list[int]) -> list[int]:
    return [max(numbers[i], numbers[i + 1]) for i in range(0, len(numbers), 2)]


_COSTS: dict[str, dict[str, Callable[..., Cost]]] = {
    "allreduce": {
        "ring": _ring_allreduce,
        "doubling": _doubling_allreduce,
        "halving": _halving_allreduce,
        "tree": _tree_broadcast,  # others than root send once more, to the parent, but have a child less
        "direct": _direct_allreduce,
    },
    "broadcast": {"tree": _tree_broadcast, "chain": _chain, "direct": _direct_broadcast},
    "reduce": {"tree": _tree_reduce, "chain": _chain, "direct": _direct_reduce},
    "allgather": {
        "ring": _all_but_mine,  # all chunks but those of the next rank's block
        "doubling": _doubling_allgather,
        "bruck": _bruck_allgather,
        "direct": _direct_allgather,
    },
    "reduce_scatter": {"ring": _all_but_mine, "halving": _halving_reduce_scatter, "direct": _all_but_mine},
    "scan": {"doubling": _doubling_scan, "chain": _chain, "direct": _chain},
    "alltoall": {"bruck": _bruck_alltoall, "direct": _all_but_mine},
}
