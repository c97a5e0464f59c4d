"""Chains: each rank sends the buffer to the next rank in `chunks` parts, each part while it receives the next one.

A chain has size - 1 + chunks - 1 steps of n / chunks elements. With many chunks, it takes hardly longer than one
message of n elements, for any number of ranks. For long buffers.

Pješivac-Grbović et al.: Performance analysis of MPI collective operations, 2007, DOI 10.1007/s10586-007-0012-0.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aiodist.schedules.plan import Copy, Recv, Schedule, Send, Step, cut, step

MOST_CHUNKS = 1 << 16


def broadcast(rank: int, size: int, n: int, root: int, *, chunks: int = 1) -> Schedule:
    """Send from root to the next rank, and so on cyclically: one message for each chunk, n elements."""
    place = (rank - root) % size
    before = (rank - 1) % size if place else None
    after = (rank + 1) % size if place < size - 1 else None
    return Schedule(n, (partial(_pass_on, before, after, cut(n, chunks), combine=False),))


def scan(rank: int, size: int, n: int, *, chunks: int = 1) -> Schedule:
    """Send from rank 0 to the last; each rank combines before it sends: one message for each chunk, n elements."""
    before = rank - 1 if rank else None
    after = rank + 1 if rank < size - 1 else None
    return Schedule(n, (partial(_pass_on, before, after, cut(n, chunks), combine=True),))


def reduce(rank: int, size: int, n: int, root: int, *, chunks: int = 1) -> Schedule:
    """Send from the rank before root cyclically down to root: one message for each chunk, n elements.

    Scratch: two chunks for a rank between root and the last, since its tensor is not written.
    """
    place = (rank - root) % size
    pieces = cut(n, chunks)
    before = (rank + 1) % size if place < size - 1 else None
    after = (rank - 1) % size if place else None
    if before is None or after is None:
        return Schedule(n, (partial(_pass_on, before, after, pieces, combine=True),))
    slot = pieces[0][1] if pieces else 0  # the first is the longest
    return Schedule(n + 2 * slot, (partial(_pass_through, before, after, pieces, (n, n + slot)),))


def _pass_on(before: int | None, after: int | None, pieces: list[tuple[int, int]], combine: bool) -> Iterator[Step]:
    for turn in range(len(pieces) + 1):
        sends = [Send(after, *pieces[turn - 1])] if after is not None and turn else []
        receives = [Recv(before, *pieces[turn], combine)] if before is not None and turn < len(pieces) else []
        yield step(*sends, *receives)


def _pass_through(before: int, after: int, pieces: list[tuple[int, int]], slots: tuple[int, int]) -> Iterator[Step]:
    """Combine my elements into those from `before`, in two slots in turn, and send the result to `after`."""
    ready: list[Send] = []
    for turn, (start, stop) in enumerate(pieces):
        at = slots[turn % 2]
        arrived = (at, at + stop - start)
        yield step(*ready, Recv(before, *arrived), Copy(start, stop, at, combine=True))
        ready = [Send(after, *arrived)]
    yield step(*ready)
