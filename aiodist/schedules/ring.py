"""Rings: each rank sends to the next rank and receives from the previous one, 1/size of the buffer at a time.

Rings send the fewest bytes, in about as many messages as ranks. For long buffers.

Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009,
DOI 10.1016/j.jpdc.2008.09.002; with one block for each rank, Chan et al. 2007, DOI 10.1002/cpe.1206.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aiodist.schedules.plan import Blocks, Copy, Recv, Schedule, Send, Step, lanes_of, piece, step


def allreduce(rank: int, size: int, n: int, *, chunks: int = 1) -> Schedule:
    """Reduce-scatter around the ring, then allgather. The buffer is cut in `chunks`, each with its own ring.

    2 (size - 1) messages for each chunk, 2 n (size - 1) / size elements.
    """
    return Schedule(n, tuple(partial(_allreduce, rank, size, *chunk) for chunk in lanes_of(n, chunks)))


def _allreduce(rank: int, size: int, first: int, last: int) -> Iterator[Step]:
    blocks = Blocks.even(last - first, size)
    after, before = (rank + 1) % size, (rank - 1) % size
    for turn in range(2 * (size - 1)):
        goes, comes = (rank - 1 - turn) % size, (rank - 2 - turn) % size
        yield step(
            Send(after, first + blocks.start(goes), first + blocks.stop(goes)),
            Recv(before, first + blocks.start(comes), first + blocks.stop(comes), combine=turn < size - 1),
        )


def reduce_scatter(rank: int, size: int, blocks: Blocks, *, chunks: int = 1) -> Schedule:
    """Send partial results of each block around until they reach its rank. Each of `chunks` has its own ring.

    size - 1 messages for each chunk, all elements except my block. Scratch: two chunks of the longest block per ring.
    """
    lanes = len(lanes_of(blocks.largest, chunks))
    slot = -(-blocks.largest // chunks)
    scratch = blocks.total + blocks.count(rank)
    return Schedule(
        scratch + 2 * slot * lanes,
        tuple(
            partial(_reduce_scatter, rank, size, blocks, (lane, chunks), (scratch + 2 * slot * lane, slot))
            for lane in range(lanes)
        ),
    )


def _reduce_scatter(
    rank: int, size: int, blocks: Blocks, chunk: tuple[int, int], scratch: tuple[int, int]
) -> Iterator[Step]:
    own = piece(blocks, rank, *chunk)
    out = blocks.total + own[0] - blocks.start(rank)
    if size == 1:
        yield step(Copy(*own, out))
        return
    after, before = (rank + 1) % size, (rank - 1) % size
    goes = piece(blocks, before, *chunk)
    for turn in range(size - 1):
        comes = piece(blocks, (rank - 2 - turn) % size, *chunk)
        to = out if turn == size - 2 else scratch[0] + turn % 2 * scratch[1]
        arrived = (to, to + comes[1] - comes[0])
        yield step(Send(after, *goes), Recv(before, *arrived), Copy(*comes, to, combine=True))
        goes = arrived


def allgather(rank: int, size: int, blocks: Blocks, *, chunks: int = 1) -> Schedule:
    """Send the last received block to the next rank. Each of `chunks` has its own ring.

    size - 1 messages for each chunk, all elements except the next rank's block.
    """
    lanes = len(lanes_of(blocks.largest, chunks))
    return Schedule(
        blocks.total, tuple(partial(_allgather, rank, size, blocks, (lane, chunks)) for lane in range(lanes))
    )


def _allgather(rank: int, size: int, blocks: Blocks, chunk: tuple[int, int]) -> Iterator[Step]:
    after, before = (rank + 1) % size, (rank - 1) % size
    for turn in range(size - 1):
        goes = piece(blocks, (rank - turn) % size, *chunk)
        comes = piece(blocks, (rank - 1 - turn) % size, *chunk)
        yield step(Send(after, *goes), Recv(before, *comes))
