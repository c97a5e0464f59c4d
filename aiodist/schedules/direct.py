"""Each rank with each other, or all with one: fewest steps, most messages. For few ranks, and as a reference.

Reductions combine in rank order, as a loop over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aiodist.schedules.plan import Blocks, Copy, Recv, Schedule, Send, Step, one_lane, step

_AT_ONCE = 16
"""Most receives of root at a time, of n elements of memory each."""


def broadcast(rank: int, size: int, n: int, root: int) -> Schedule:
    """Send from root to each rank: size - 1 messages of n elements, all from root."""
    return Schedule(n, (partial(_broadcast, rank, size, n, root),))


def _broadcast(rank: int, size: int, n: int, root: int) -> Iterator[Step]:
    if rank == root:
        yield step(*(Send(peer, 0, n) for peer in _others(rank, size)))
    else:
        yield step(Recv(root, 0, n))


def reduce(rank: int, size: int, n: int, root: int) -> Schedule:
    """Send to root, which combines in rank order: one message of n elements; scratch: n on a root other than 0."""
    return Schedule(2 * n if rank == root != 0 else n, (partial(_reduce, rank, size, n, root),))


def _reduce(rank: int, size: int, n: int, root: int) -> Iterator[Step]:
    if rank != root:
        yield step(Send(root, 0, n))
        return
    at = n if root else 0
    moves: list[Recv | Copy] = [Recv(peer, at, at + n, combine=peer > 0) for peer in range(size) if peer != root]
    if root:
        moves.insert(root, Copy(0, n, at, combine=True))
    for i in range(0, len(moves), _AT_ONCE):
        yield step(*moves[i : i + _AT_ONCE])
    if root:
        yield step(Copy(at, at + n, 0))


@one_lane(lambda rank, size, n: n)
def allreduce(rank: int, size: int, n: int) -> Iterator[Step]:
    """Reduce to rank 0, then broadcast: size - 1 messages of n elements from rank 0, one from each other rank."""
    yield from _reduce(rank, size, n, 0)
    yield from _broadcast(rank, size, n, 0)


@one_lane(lambda rank, size, blocks: blocks.total)
def allgather(rank: int, size: int, blocks: Blocks) -> Iterator[Step]:
    """Send my block to each rank: size - 1 messages."""
    others = _others(rank, size)
    yield step(
        *(Recv(peer, blocks.start(peer), blocks.stop(peer)) for peer in others),
        *(Send(peer, blocks.start(rank), blocks.stop(rank)) for peer in others),
    )


@one_lane(lambda rank, size, blocks: blocks.total + blocks.count(rank))
def reduce_scatter(rank: int, size: int, blocks: Blocks) -> Iterator[Step]:
    """Send block r to rank r, which combines in rank order: size - 1 messages, all elements except my block."""
    out, stop = blocks.total, blocks.total + blocks.count(rank)
    sends = [Send(peer, blocks.start(peer), blocks.stop(peer)) for peer in _others(rank, size)]
    receives: list[Recv | Copy] = [Recv(peer, out, stop, combine=peer > 0) for peer in range(size) if peer != rank]
    receives.insert(rank, Copy(blocks.start(rank), blocks.stop(rank), out, combine=rank > 0))
    yield step(*receives, *sends)


@one_lane(lambda rank, size, sends, receives: sends.total + receives.total)
def alltoall(rank: int, size: int, sends: Blocks, receives: Blocks) -> Iterator[Step]:
    """Send block r to rank r: size - 1 messages, all elements except my block; blocks may differ."""
    out = sends.total
    others = _others(rank, size)
    yield step(
        *(Recv(peer, out + receives.start(peer), out + receives.stop(peer)) for peer in others),
        *(Send(peer, sends.start(peer), sends.stop(peer)) for peer in others),
        Copy(sends.start(rank), sends.stop(rank), out + receives.start(rank)),
    )


def _others(rank: int, size: int) -> list[int]:
    """Return all ranks except mine, from the next one on, so that the ranks begin with different ones."""
    return [(rank + i) % size for i in range(1, size)]
