"""One rank's part in a collective, as data, without tensor, transport and clock.

A `Schedule` is for one rank. Its *working buffer* is a range of elements of these tensors (n elements; `blocks` and
`sends`, `receives` cut a buffer in one part for each rank):

| operation                        | [0, n)                  | then               | then               |
|----------------------------------|-------------------------|--------------------|--------------------|
| allreduce, broadcast, scan       | the tensor, in and out  | scratch up to room |                    |
| reduce                           | the tensor; only root's | scratch up to room |                    |
|                                  | is written to           |                    |                    |
| allgather                        | the result, in which my | scratch up to room |                    |
|                                  | block is there already  |                    |                    |
| reduce_scatter                   | the tensor, only read   | my block, reduced  | scratch up to room |
| alltoall                         | the input, only read    | the output         | scratch up to room |

No transfer and no copy crosses a border between two of these. The initial content of scratch is undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import accumulate
from typing import NamedTuple, ParamSpec

P = ParamSpec("P")
MAX_LANES = 32
"""Most lanes of a schedule. Each has its own tags, and libraries have few."""


class Send(NamedTuple):
    """Send elements [start, stop) of the working buffer, at least one, to rank `peer`."""

    peer: int
    start: int
    stop: int


class Recv(NamedTuple):
    """Receive elements [start, stop) from rank `peer`, and overwrite the buffer or combine into it."""

    peer: int
    start: int
    stop: int
    combine: bool = False


class Copy(NamedTuple):
    """Copy elements [start, stop) to those from `to` on, or combine them there, without a transfer."""

    start: int
    stop: int
    to: int
    combine: bool = False


Step = tuple[Send | Recv | Copy, ...]
"""A step of a lane. Its transfers start together. When all are finished, combinations and copies run in their order.

So a step may combine into elements that it sends: it sends the old values. No other transfer of the step sends or
receives the elements of a plain receive. Between two ranks, messages of a lane arrive in the order sent.
"""

Lane = Callable[[], Iterator[Step]]
"""Makes the steps of a lane one at a time, so a schedule for many ranks costs nothing before it runs."""


class Schedule(NamedTuple):
    """The whole part of one rank: at most `MAX_LANES` lanes, which run independently.

    Lane i exchanges messages with lane i of the other ranks. Lanes share no element that one of them writes.
    """

    room: int
    """Elements of the working buffer, scratch included."""
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to run an operation on any number of ranks.

    `plan(rank, size, n)` for allreduce and scan, `plan(rank, size, n, root)` for broadcast and reduce,
    `plan(rank, size, blocks)` for allgather and reduce_scatter, `plan(rank, size, sends, receives)` for alltoall. A
    `chunked` plan also takes `chunks=`, the number of parts that are in flight together or in a row.
    """

    plan: Callable[..., Schedule]
    most_chunks: int = 1
    equal: bool = False
    """True if the blocks must have equal lengths (alltoall)."""

    @property
    def chunked(self) -> bool:
        """True if the plan takes `chunks=`, up to `most_chunks`."""
        return self.most_chunks > 1


class Blocks:
    """A buffer cut in consecutive blocks, which may be empty. Block i is [start(i), start(i + 1))."""

    __slots__ = ("_bounds", "_even", "_rest", "largest", "parts", "total")

    def __init__(self, counts: Sequence[int]) -> None:
        self._bounds: list[int] | None = [0, *accumulate(counts)]
        self._even = self._rest = 0
        self.parts = len(counts)
        self.total = self._bounds[-1]
        self.largest = max(counts, default=0)
        """Elements of the longest block."""

    @classmethod
    def even(cls, n: int, parts: int) -> Blocks:
        """Return `n` elements in `parts` blocks that differ by one at most, the longer ones first, in O(1)."""
        self = cls.__new__(cls)
        self._bounds = None
        self._even, self._rest = divmod(n, parts)
        self.parts = parts
        self.total = n
        self.largest = self._even + (self._rest > 0)
        return self

    def start(self, i: int) -> int:
        """Return the first element of block `i`, or the end of the buffer for `parts`."""
        if self._bounds is not None:
            return self._bounds[i]
        return i * self._even + min(i, self._rest)

    def stop(self, i: int) -> int:
        return self.start(i + 1)

    def count(self, i: int) -> int:
        return self.start(i + 1) - self.start(i)

    def counts(self) -> list[int]:
        return [self.count(i) for i in range(self.parts)]


# --- helpers of the algorithms -------------------------------------------------------------------------------


def one_lane(room: Callable[..., int]) -> Callable[[Callable[P, Iterator[Step]]], Callable[P, Schedule]]:
    """Decorate a function that yields the steps of one lane, so that it returns a `Schedule` of this lane.

    `room`, of the same arguments, returns the room of the schedule.
    """

    def planned(steps: Callable[P, Iterator[Step]]) -> Callable[P, Schedule]:
        @wraps(steps)
        def plan(*args: P.args, **kwargs: P.kwargs) -> Schedule:
            return Schedule(room(*args, **kwargs), (partial(steps, *args, **kwargs),))

        return plan

    return planned


def cut(n: int, chunks: int) -> list[tuple[int, int]]:
    """Return [0, n) in `chunks` parts that differ by one element at most, without empty ones."""
    if chunks < 1:
        raise ValueError(f"{chunks} chunks: expected at least 1")
    blocks = Blocks.even(n, chunks)
    return [(blocks.start(i), blocks.stop(i)) for i in range(min(n, chunks))]


def lanes_of(n: int, chunks: int) -> list[tuple[int, int]]:
    """Return `cut(n, chunks)` for one lane per chunk. Raise ValueError for too many chunks."""
    if chunks > MAX_LANES:
        raise ValueError(f"{chunks} chunks at once: expected at most {MAX_LANES}")
    return cut(n, chunks)


def piece(blocks: Blocks, i: int, chunk: int, chunks: int) -> tuple[int, int]:
    """Return the elements of chunk number `chunk` of block `i`, of `chunks` in each block."""
    first = blocks.start(i)
    parts = Blocks.even(blocks.count(i), chunks)
    return first + parts.start(chunk), first + parts.stop(chunk)


def combined(starts: Sequence[int], n: int) -> list[Copy]:
    """Return the copies that combine the `n` elements at each of `starts` into those at the first of them.

    Neighbours are combined first, then neighbouring pairs, and so on: ((0 1)(2 3))(4 5) for six. The order depends on
    nothing but their number.
    """
    pairs = [(1 << k, i) for k in range(rounds(len(starts))) for i in range(0, len(starts) - (1 << k), 2 << k)]
    return [Copy(starts[i + half], starts[i + half] + n, starts[i], combine=True) for half, i in pairs]


def rounds(size: int) -> int:
    """Return log2(size), rounded up: the number of doublings from one rank to all."""
    return (size - 1).bit_length()


def step(*moves: Send | Recv | Copy) -> Step:
    """Return a step of the `moves` that have elements."""
    return tuple(move for move in moves if move.start < move.stop)
