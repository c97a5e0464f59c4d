"""Binomial trees: log2(size) steps of the whole buffer, for short buffers.

The parent of rank v, counted from the root, is v without its lowest bit. Thakur, Rabenseifner, Gropp: Optimization of
collective communication operations in MPICH, 2005, DOI 10.1177/1094342005051521.

With `chunks`, parts of the buffer are in flight together, each in its own tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aiodist.schedules.plan import Copy, Recv, Schedule, Send, Step, lanes_of, rounds, step


def broadcast(rank: int, size: int, n: int, root: int, *, chunks: int = 1) -> Schedule:
    """Receive from the parent and send to the children, the largest subtree first. Root sends log2(size) times."""
    return Schedule(n, tuple(partial(_broadcast, rank, size, root, *chunk) for chunk in lanes_of(n, chunks)))


def _broadcast(rank: int, size: int, root: int, start: int, stop: int) -> Iterator[Step]:
    parent, children = _family(rank, size, root)
    if parent is not None:
        yield step(Recv(parent, start, stop))
    if children:
        yield step(*(Send(child, start, stop) for child in reversed(children)))


def reduce(rank: int, size: int, n: int, root: int, *, chunks: int = 1) -> Schedule:
    """Combine the elements of the children, the smallest subtree first, and send the result to the parent.

    One message for each chunk; scratch: n for a rank between root and leaves, since its tensor is not written.
    """
    parent, children = _family(rank, size, root)
    at = n if parent is not None and children else 0
    lanes = tuple(partial(_reduce, rank, size, root, *chunk, at) for chunk in lanes_of(n, chunks))
    return Schedule(n + at, lanes)


def _reduce(rank: int, size: int, root: int, start: int, stop: int, at: int) -> Iterator[Step]:
    """Reduce [start, stop) in place, or `at` elements further on."""
    parent, children = _family(rank, size, root)
    for child in children:
        if at and child == children[0]:
            yield step(Recv(child, at + start, at + stop), Copy(start, stop, at + start, combine=True))
        else:
            yield step(Recv(child, at + start, at + stop, combine=True))
    if parent is not None:
        yield step(Send(parent, at + start, at + stop))


def allreduce(rank: int, size: int, n: int, *, chunks: int = 1) -> Schedule:
    """Reduce to rank 0, then broadcast: log2(size) messages for each chunk, no scratch."""
    return Schedule(n, tuple(partial(_allreduce, rank, size, *chunk) for chunk in lanes_of(n, chunks)))


def _allreduce(rank: int, size: int, start: int, stop: int) -> Iterator[Step]:
    yield from _reduce(rank, size, 0, start, stop, 0)
    yield from _broadcast(rank, size, 0, start, stop)


def _family(rank: int, size: int, root: int) -> tuple[int | None, list[int]]:
    """Return the parent, or None for root, and the children, the smallest subtree first."""
    place = (rank - root) % size
    below = place & -place or 1 << rounds(size)
    parent = (rank - below) % size if place else None
    bits = (1 << i for i in range(below.bit_length() - 1))
    return parent, [(rank + bit) % size for bit in bits if place + bit < size]
