"""Each rank with each other, or all with one: fewest steps, most messages.

Reductions combine in the order of `plan.combined`, which depends on nothing but the number of ranks. For long tensors,
rank r combines block r of all ranks: each rank then sends as few elements as in a ring.

Rabenseifner: Optimization of collective reduction operations, 2004, DOI 10.1007/978-3-540-24685-5_1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aiodist.schedules.plan import Blocks, Copy, Recv, Schedule, Send, Step, combined, lanes_of, one_lane, piece, step

_AT_ONCE = 16
"""Most receives of root at a time, of n elements of memory each: a power of two."""
LONG = 1 << 14
"""Smallest tensor, in elements, whose blocks are combined by different ranks. Its messages are worth their number."""


def broadcast(rank: int, size: int, n: int, root: int) -> Schedule:
    """Send from root to each rank: size - 1 messages of n elements, all from root."""
    return Schedule(n, (partial(_broadcast, rank, size, n, root),))


def _broadcast(rank: int, size: int, n: int, root: int) -> Iterator[Step]:
    if rank == root:
        yield step(*(Send(peer, 0, n) for peer in _others(rank, size)))
    else:
        yield step(Recv(root, 0, n))


def reduce(rank: int, size: int, n: int, root: int, *, chunks: int = 1) -> Schedule:
    """Send to root, which combines: one message of n elements. Scratch of root: n for each of 17 ranks, at most.

    Long tensors are cut in `chunks`. Block r goes to rank r, which combines and sends to root: size messages for each
    chunk, n elements; scratch: n.
    """
    if n < LONG:
        return Schedule(n * (1 + _slots(size)) if rank == root else n, (partial(_reduce, rank, size, n, root),))
    return _in_blocks(rank, size, n, chunks, root)


def allreduce(rank: int, size: int, n: int, *, chunks: int = 1) -> Schedule:
    """Reduce to rank 0, then broadcast: size - 1 messages of n elements from rank 0, one from each other rank.

    Long tensors are cut in `chunks`. Block r goes to rank r, which combines and sends to all: 2 (size - 1) messages for
    each chunk, 2 n (size - 1) / size elements; scratch: n.
    """
    if n < LONG:
        return Schedule(n * (1 + _slots(size)) if rank == 0 else n, (partial(_allreduce, rank, size, n),))
    return _in_blocks(rank, size, n, chunks, None)


def _allreduce(rank: int, size: int, n: int) -> Iterator[Step]:
    yield from _reduce(rank, size, n, 0)
    yield from _broadcast(rank, size, n, 0)


def _slots(size: int) -> int:
    """Return the number of scratch tensors of `_reduce`: of a group of ranks, and of complete groups."""
    groups = -(-size // _AT_ONCE)
    return min(size, _AT_ONCE) + groups.bit_length()


def _reduce(rank: int, size: int, n: int, root: int) -> Iterator[Step]:
    """Yield the same number of steps on all ranks, with each message in the same step on both sides.

    So a list may join them with the steps of long tensors.
    """
    groups = range(0, size, _AT_ONCE)
    if rank != root:
        yield from (step(Send(root, 0, n)) if first == rank - rank % _AT_ONCE else step() for first in groups)
        return
    done: list[int] = []  # sums of complete groups of 1, 2, 4 and so on times `_AT_ONCE` ranks, the largest first
    for group, first in enumerate(groups):
        members = range(first, min(first + _AT_ONCE, size))
        at = [0 if peer == root else n * (1 + peer - first) for peer in members]
        receives = [Recv(peer, start, start + n) for peer, start in zip(members, at, strict=True) if peer != root]
        done.append(n * (1 + min(size, _AT_ONCE) + len(done)))
        merged = [Copy(at[0], at[0] + n, done[-1])]
        last = members.stop == size
        while len(done) > 1 and (last or group & 1):
            merged += combined(done[-2:], n)
            done.pop()
            group >>= 1
        yield step(*receives, *combined(at, n), *merged, *([Copy(done[0], done[0] + n, 0)] if last else []))


def _in_blocks(rank: int, size: int, n: int, chunks: int, root: int | None) -> Schedule:
    """Combine block r of each chunk on rank r, then send the result to `root`, or to all ranks for None."""
    lanes, room = [], n
    for first, last in lanes_of(n, chunks):
        blocks = Blocks.even(last - first, size)
        lanes.append(partial(_combine_block, rank, size, first, blocks, room, root))
        room += size * blocks.largest
    return Schedule(room, tuple(lanes))


def _combine_block(rank: int, size: int, first: int, blocks: Blocks, scratch: int, root: int | None) -> Iterator[Step]:
    others = _others(rank, size)
    start, length = first + blocks.start(rank), blocks.count(rank)
    writes = root in (None, rank)
    sends = [Send(peer, first + blocks.start(peer), first + blocks.stop(peer)) for peer in others]
    moves, total = _parts(rank, size, start, length, [scratch + q * length for q in range(size)], writes=writes)
    yield step(*moves, *sends, *([Copy(total, total + length, start)] if writes and total != start else []))
    if not writes and root is not None:
        yield step(Send(root, total, total + length))
        return
    yield step(
        *(Recv(peer, first + blocks.start(peer), first + blocks.stop(peer)) for peer in others),
        *(Send(peer, start, start + length) for peer in others if root is None),
    )


def _parts(
    rank: int, size: int, own: int, length: int, slots: list[int], *, writes: bool
) -> tuple[list[Recv | Copy], int]:
    """Return the moves that combine the ranks' parts, in `slots`, and the place of the result.

    This rank's part is at `own`. False for `writes` means that it is only read.
    """
    receives: list[Recv | Copy] = [Recv(peer, slots[peer], slots[peer] + length) for peer in _others(rank, size)]
    if writes or rank % 2:  # nothing is combined into the second of a pair
        slots = [*slots[:rank], own, *slots[rank + 1 :]]
    else:
        receives.append(Copy(own, own + length, slots[rank]))
    return [*receives, *combined(slots, length)], slots[0]


@one_lane(lambda rank, size, blocks: blocks.total)
def allgather(rank: int, size: int, blocks: Blocks) -> Iterator[Step]:
    """Send my block to each rank: size - 1 messages."""
    others = _others(rank, size)
    yield step(
        *(Recv(peer, blocks.start(peer), blocks.stop(peer)) for peer in others),
        *(Send(peer, blocks.start(rank), blocks.stop(rank)) for peer in others),
    )


def reduce_scatter(rank: int, size: int, blocks: Blocks, *, chunks: int = 1) -> Schedule:
    """Send block r to rank r, which combines: size - 1 messages for each chunk, all elements except my block.

    Scratch: size - 1 times my block.
    """
    lanes = len(lanes_of(blocks.largest, chunks))
    room = blocks.total + size * blocks.count(rank)
    return Schedule(room, tuple(partial(_reduce_scatter, rank, size, blocks, (lane, chunks)) for lane in range(lanes)))


def _reduce_scatter(rank: int, size: int, blocks: Blocks, chunk: tuple[int, int]) -> Iterator[Step]:
    own, stop = piece(blocks, rank, *chunk)
    out = blocks.total + own - blocks.start(rank)  # the result is in the first slot
    slots = [out + q * blocks.count(rank) for q in range(size)]
    moves, _ = _parts(rank, size, own, stop - own, slots, writes=False)
    yield step(*moves, *(Send(peer, *piece(blocks, peer, *chunk)) for peer in _others(rank, size)))


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
