"""Tensors of a call that share one buffer and may overlap, as hypothesis draws them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

__all__ = ["Layout", "drawn_layout", "places_of"]


@dataclass(frozen=True)
class Layout:
    """An example: which call, and where its tensors lie."""

    call: str
    numel: int
    halves: tuple[int, ...]
    """Start of each tensor, inputs first, in halves of `numel`; the other tensors follow these."""
    own: bool
    """The input is this rank's block of the first output, or the first output this rank's block of the input."""


def drawn_layout(calls: Iterable[str]) -> tuple[SearchStrategy[Any], ...]:
    """Return what draws each field of a `Layout`."""
    return (
        st.sampled_from(sorted(calls)),
        st.sampled_from([2, 6, 1000, 20_000, 300_000]),
        st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple),
        st.booleans(),
    )


def places_of(layout: Layout, blocks: Sequence[int], rank: int, *, one_input: bool) -> list[tuple[int, int]]:
    """Return start and length of each tensor, in elements; `blocks` has the number of blocks of `layout.numel` of each.

    `one_input` is True if `layout.own` applies: the call has one input, and an output.
    """
    numel, after, places = layout.numel, 4 * layout.numel, list[tuple[int, int]]()
    for i, length in enumerate(blocks):
        start = layout.halves[i] * numel // 2 if i < len(layout.halves) else after
        places.append((start, length * numel))
        after = max(after, sum(places[-1]))
    if layout.own and one_input:
        (t, t_length), (out, out_length) = places[:2]
        if out_length > t_length:
            places[0] = (out + rank * numel, t_length)
        else:
            places[1] = (t + (rank * numel if t_length > out_length else 0), out_length)
    return places
