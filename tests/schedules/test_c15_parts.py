"""C15: which partial results of parts the ranks make, and that they combine as one tree over all parts."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from aiodist.schedules.parts import Span, follows_ranks, merges, spans_of


def tree(start: int, stop: int) -> str:
    """Return the tree of parts [start, stop) as text: the two halves of a power of two, or the largest and the rest."""
    if stop - start == 1:
        return str(start)
    half = 1 << (stop - start - 1).bit_length() - 1
    return f"({tree(start, start + half)} {tree(start + half, stop)})"


@given(st.lists(st.integers(1, 19), min_size=1, max_size=9))
def test_c15_any_cut_of_the_parts_combines_as_one_tree(counts: list[int]) -> None:
    ends = [0, *accumulate(counts)]
    spans = [spans_of(start, stop, ends[-1]) for start, stop in pairwise(ends)]
    for of_rank, (start, stop) in zip(spans, pairwise(ends), strict=True):
        assert [of_rank[0].start, *(span.stop for span in of_rank)] == [*(span.start for span in of_rank), stop]
        assert of_rank[0].start == start
        assert len(of_rank) <= 2 * max(1, (stop - start).bit_length())
    nodes = [span for of_rank in spans for span in of_rank]
    texts = [tree(*span) for span in nodes]
    for i, j in merges(nodes, ends[-1]):
        texts[i] = f"({texts[i]} {texts[j]})"
    assert texts[0] == tree(0, ends[-1])
    if follows_ranks(spans):
        assert merges(nodes, ends[-1]) == merges([Span(r, r + 1) for r in range(len(counts))], len(counts))


@given(st.integers(1, 12), st.integers(0, 5))
def test_c15_even_cuts_of_a_power_of_two_follow_the_ranks(ranks: int, level: int) -> None:
    ends = [rank << level for rank in range(ranks + 1)]
    assert follows_ranks([spans_of(start, stop, ends[-1]) for start, stop in pairwise(ends)])
