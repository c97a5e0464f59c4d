"""One rank's part in a collective, as data: no tensor, no transport, no clock.

A `Schedule` is made for one rank. Its *working buffer* is a range of elements; which tensors it is made of depends
on the operation (n elements; `blocks` and `sends`, `receives` cut a buffer in one part for each rank):

| operation                        | [0, n)                  | then               | then               |
|----------------------------------|-------------------------|--------------------|--------------------|
| allreduce, broadcast, scan       | the tensor, in and out  | scratch up to room |                    |
| reduce                           | the tensor; only root's | scratch up to room |                    |
|                                  | is written to           |                    |                    |
| allgather                        | the result, in which my | scratch up to room |                    |
|                                  | block is there already  |                    |                    |
| reduce_scatter                   | the tensor, only read   | my block, reduced  | scratch up to room |
| alltoall                         | what I send, only read  | what I receive     | scratch up to room |

No transfer and no copy reaches over a border between two of these. What scratch holds at the start is undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import accumulate
from typing import NamedTuple, ParamSpec

P = ParamSpec("P")
MAX_LANES = 32
"""The most lanes of a schedule: each has tags of its own, and libraries have few."""


class Send(NamedTuple):
    """Send elements [start, stop) of the working buffer to rank `peer`; never none."""

    peer: int
    start: int
    stop: int


class Recv(NamedTuple):
    """Receive elements [start, stop) from rank `peer`: over what is there, or combined into it."""

    peer: int
    start: int
    stop: int
    combine: bool = False


class Copy(NamedTuple):
    """Copy elements [start, stop) to where `to` is the first, or combine them into what is there; no transfer."""

    start: int
    stop: int
    to: int
    combine: bool = False


Step = tuple[Send | Recv | Copy, ...]
"""Its transfers, if any, start at once; when all are over, what combines and what copies happens, in this order.

So a step may send what it combines into: the elements go out as they were. What a plain receive fills is neither
sent nor received by another transfer of the step. Between two ranks, messages of a lane arrive in the order sent.
"""

Lane = Callable[[], Iterator[Step]]
"""Makes the steps of a lane, one after another, so that a schedule for many ranks costs nothing until it runs."""


class Schedule(NamedTuple):
    """All that one rank does: lanes that run independently of one another, at most `MAX_LANES`.

    Lane number i talks to lane number i of the others. Lanes share no element that any of them writes to.
    """

    room: int
    """Elements of the working buffer, scratch included."""
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to run an operation on any number of ranks.

    `plan(rank, size, n)` for allreduce and scan, `plan(rank, size, n, root)` for broadcast and reduce,
    `plan(rank, size, blocks)` for allgather and reduce_scatter, `plan(rank, size, sends, receives)` for alltoall;
    with `chunks=` too where `chunked`, the number of parts that are on their way at once or one behind the other.
    """

    plan: Callable[..., Schedule]
    most_chunks: int = 1
    equal: bool = False
    """Only for blocks of equal length (alltoall)."""

    @property
    def chunked(self) -> bool:
        """Whether it takes `chunks=`, up to `most_chunks`."""
        return self.most_chunks > 1


class Blocks:
    """A buffer cut in consecutive parts, some maybe empty; block i is [start(i), start(i + 1))."""

    __slots__ = ("_bounds", "_even", "_rest", "largest", "parts", "total")

    def __init__(self, counts: Sequence[int]) -> None:
        self._bounds: list[int] | None = [0, *accumulate(counts)]
        self._even = self._rest = 0
        self.parts = len(counts)
        self.total = self._bounds[-1]
        self.largest = max(counts, default=0)
        """Elements of the longest."""

    @classmethod
    def even(cls, n: int, parts: int) -> Blocks:
        """Return `n` elements in `parts` blocks that differ by one at most, the longer ones first; O(1)."""
        self = cls.__new__(cls)
        self._bounds = None
        self._even, self._rest = divmod(n, parts)
        self.parts = parts
        self.total = n
        self.largest = self._even + (self._rest > 0)
        return self

    def start(self, i: int) -> int:
        """Return the first element of block `i`; of block `parts`, the end."""
        if self._bounds is not None:
            return self._bounds[i]
        return i * self._even + min(i, self._rest)

    def stop(self, i: int) -> int:
        return self.start(i + 1)

    def count(self, i: int) -> int:
        return self.start(i + 1) - self.start(i)

    def counts(self) -> list[int]:
        return [self.count(i) for i in range(self.parts)]


# --- what the families of schedules share: one lane, cutting buffers, and steps without empty transfers ---


def one_lane(room: Callable[..., int]) -> Callable[[Callable[P, Iterator[Step]]], Callable[P, Schedule]]:
    """Make a plan of a function that yields the steps of the only lane; `room`, of the same arguments, see `Schedule`.

    The lane begins with a call of the function, whose arguments the plan has.
    """

    def planned(steps: Callable[P, Iterator[Step]]) -> Callable[P, Schedule]:
        @wraps(steps)
        def plan(*args: P.args, **kwargs: P.kwargs) -> Schedule:
            return Schedule(room(*args, **kwargs), (partial(steps, *args, **kwargs),))

        return plan

    return planned


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
