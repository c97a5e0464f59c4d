"""Bruck's algorithms: log2(size) messages for any number of ranks, for short blocks.

Bruck, Ho, Kipnis, Upfal, Weathersby: Efficient algorithms for all-to-all communications in multiport message-passing
systems, 1997, DOI 10.1109/71.642949.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aiodist.schedules.plan import Blocks, Copy, Recv, Schedule, Send, Step, one_lane, rounds, step


@one_lane(lambda rank, size, blocks: 2 * blocks.total if rank else blocks.total)
def allgather(rank: int, size: int, blocks: Blocks) -> Iterator[Step]:
    """Send all my blocks to the rank 1, 2, 4 and so on below me: log2(size) messages, all elements except some block.

    Blocks may differ. Scratch has them in order from mine on. The last step copies them to their places.
    """
    n = blocks.total
    at = n if rank else 0  # rank 0 receives the blocks at their places
    if rank:
        yield step(Copy(blocks.start(rank), blocks.stop(rank), at))
    for have in (1 << i for i in range(rounds(size))):
        more = min(have, size - have)
        yield step(
            Send((rank - have) % size, at, at + length(blocks, rank, more)),
            Recv(
                (rank + have) % size,
                at + length(blocks, rank, have),
                at + length(blocks, rank, have + more),
            ),
        )
    if rank:
        first = blocks.start(rank)
        yield step(Copy(at, at + n - first, first), Copy(at + n - first, at + n, 0))


def length(blocks: Blocks, rank: int, count: int) -> int:
    """Return the number of elements of `count` blocks from that of `rank` on, cyclically."""
    end = rank + count
    if end <= blocks.parts:
        return blocks.start(end) - blocks.start(rank)
    return blocks.total - blocks.start(rank) + blocks.start(end - blocks.parts)


def alltoall(rank: int, size: int, sends: Blocks, receives: Blocks) -> Schedule:
    """Send half of the equal blocks to the rank 1, 2, 4 and so on above me, until each has arrived.

    log2(size) messages of size / 2 blocks; scratch: size blocks.
    """
    if sends.largest * size != sends.total or receives.total != sends.total or receives.largest != sends.largest:
        raise ValueError("Bruck's alltoall takes blocks of equal length only")
    return Schedule(3 * sends.total, (partial(_alltoall, rank, size, sends.largest),))


def _alltoall(rank: int, size: int, count: int) -> Iterator[Step]:
    n = size * count
    out, scratch = n, 2 * n  # until the end, the output has room for packed blocks
    pack, unpack = out, out + size // 2 * count
    # In scratch, block i goes to the rank i above its source.
    first = rank * count
    yield step(Copy(first, n, scratch), Copy(0, first, scratch + n - first))
    for distance in (1 << i for i in range(rounds(size))):
        going = [scratch + i * count for i in range(size) if i & distance]
        length = len(going) * count
        yield step(*(Copy(block, block + count, pack + i * count) for i, block in enumerate(going)))
        yield step(
            Send((rank + distance) % size, pack, pack + length),
            Recv((rank - distance) % size, unpack, unpack + length),
            *(Copy(unpack + i * count, unpack + (i + 1) * count, block) for i, block in enumerate(going)),
        )
    places = (out + (rank - i) % size * count for i in range(size))
    yield step(*(Copy(scratch + i * count, scratch + (i + 1) * count, to) for i, to in enumerate(places)))
