"""What the families of schedules share: cutting buffers, and steps without empty transfers."""

from __future__ import annotations

from aiodist.schedules.plan import MAX_LANES, Blocks, Copy, Recv, Send, Step

__all__ = ["cut", "lanes_of", "piece", "rounds", "step"]


def cut(n: int, chunks: int) -> list[tuple[int, int]]:
    """Return [0, n) in `chunks` parts that differ by one element at most; the empty ones are left out."""
    if chunks < 1:
        raise ValueError(f"{chunks} chunks: expected at least 1")
    blocks = Blocks.even(n, chunks)
    return [(blocks.start(i), blocks.stop(i)) for i in range(min(n, chunks))]


def lanes_of(n: int, chunks: int) -> list[tuple[int, int]]:
    """Return [0, n) cut as `cut` does, for chunks of which each is a lane; raise ValueError for too many."""
    if chunks > MAX_LANES:
        raise ValueError(f"{chunks} chunks at once: expected at most {MAX_LANES}")
    return cut(n, chunks)


def piece(blocks: Blocks, i: int, chunk: int, chunks: int) -> tuple[int, int]:
    """Return where chunk number `chunk` of block `i` lies, when each block is cut in `chunks`."""
    first = blocks.start(i)
    parts = Blocks.even(blocks.count(i), chunks)
    return first + parts.start(chunk), first + parts.stop(chunk)


def rounds(size: int) -> int:
    """Return log2(size), rounded up: after so many doublings one rank's word has reached all."""
    return (size - 1).bit_length()


def step(*moves: Send | Recv | Copy) -> Step:
    """Return a step of those that move anything."""
    return tuple(move for move in moves if move.start < move.stop)
