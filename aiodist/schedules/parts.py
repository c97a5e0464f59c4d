"""The fixed order of reductions over parts: which partial results each rank makes, and how they combine.

The order is a tree over the indices of all parts. A node of level k has the parts from i to i + 2^k - 1, as far as they
exist, with i a multiple of 2^k. So the result does not depend on the ranks that have the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """The parts of one node, [start, stop)."""

    start: int
    stop: int


def spans_of(start: int, stop: int, total: int) -> list[Span]:
    """Return the largest nodes within parts [start, stop) of `total`.

    >>> spans_of(0, 4, 7), spans_of(4, 7, 7), spans_of(1, 4, 7)
    ([Span(start=0, stop=4)], [Span(start=4, stop=7)], [Span(start=1, stop=2), Span(start=2, stop=4)])
    """
    spans: list[Span] = []
    while start < stop:
        size = 1
        while start % (2 * size) == 0 and size < total and min(start + 2 * size, total) <= stop:
            size *= 2
        spans.append(Span(start, min(start + size, total)))
        start = spans[-1].stop
    return spans


def merges(spans: Sequence[Span], total: int) -> list[tuple[int, int]]:
    """Return the pairs (i, j) of consecutive nodes that cover all parts: the j-th is combined into the i-th, in turn.

    >>> merges([Span(0, 1), Span(1, 2), Span(2, 4), Span(4, 5)], 5)
    [(0, 1), (0, 2), (0, 3)]
    """
    pairs: list[tuple[int, int]] = []
    open_nodes: list[tuple[Span, int]] = []
    for i, span in enumerate(spans):
        open_nodes.append((span, i))
        while len(open_nodes) > 1:
            (left, first), (right, second) = open_nodes[-2:]
            size = left.stop - left.start
            if left.start % (2 * size) or right.stop != min(left.stop + size, total):
                break
            pairs.append((first, second))
            open_nodes[-2:] = [(Span(left.start, right.stop), first)]
    return pairs


def follows_ranks(spans: Sequence[Sequence[Span]]) -> bool:
    """Return True if each rank has one node, and a reduction over the ranks combines these nodes in the same tree."""
    sizes = [of_rank[0].stop - of_rank[0].start for of_rank in spans if len(of_rank) == 1]
    return len(sizes) == len(spans) and all(a == b for a, b in pairwise(sizes[:-1])) and sizes[-1] <= sizes[0]
