"""Exchanges with partners at distances 1, 2, 4 and so on: log2(size) steps, for any number of ranks.

The largest power of two of the ranks takes part. Each of the other ranks sends its elements to a neighbour before, and
receives the result after.

Thakur, Rabenseifner, Gropp: Optimization of collective communication operations in MPICH, 2005,
DOI 10.1177/1094342005051521. Rabenseifner: Optimization of collective reduction operations, 2004,
DOI 10.1007/978-3-540-24685-5_1. Scan: Hillis, Steele: Data parallel algorithms, 1986, DOI 10.1145/7902.7903.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from aiodist.schedules.plan import Blocks, Copy, Recv, Schedule, Send, Step, one_lane, rounds, step


@dataclass(frozen=True, slots=True)
class Core:
    """A power of two of ranks, by index. The first `extra` ones also act for the rank below them."""

    count: int
    extra: int

    @classmethod
    def of(cls, size: int) -> Core:
        """Return the core of `size` ranks."""
        count = 1 << (size.bit_length() - 1)
        return cls(count, size - count)

    def rank(self, index: int) -> int:
        return 2 * index + 1 if index < self.extra else index + self.extra

    def index(self, rank: int) -> int:
        """Return the index of a rank of the core."""
        return rank // 2 if self.acts(rank) else rank - self.extra

    def acts(self, rank: int) -> bool:
        """Return True for a rank of the core that acts for the one below it."""
        return rank < 2 * self.extra and rank % 2 == 1

    def stands_by(self, rank: int) -> bool:
        """Return True for a rank outside the core."""
        return rank < 2 * self.extra and rank % 2 == 0

    def halves(self) -> list[int]:
        """Return 1, 2, 4 and so on: the number of ranks with equal elements before each exchange."""
        return [1 << i for i in range(self.count.bit_length() - 1)]

    def first(self, index: int) -> int:
        """Return the first of the one or two adjacent ranks for which the rank at `index` acts."""
        return min(2 * index, index + self.extra)


# --- recursive doubling: the whole buffer in each step, for short buffers -----------------------------------------


@one_lane(lambda rank, size, n: 2 * n if size > 1 else n)
def allreduce(rank: int, size: int, n: int) -> Iterator[Step]:
    """Exchange all `n` elements with a partner in each of log2(size) steps; scratch: n.

    Both partners combine the lower partner's partial result with the higher one's, so their results are equal.
    """
    return _in_core(Core.of(size), rank, n, _doubled)


def _in_core(core: Core, rank: int, n: int, steps: Callable[[Core, int, int], Iterator[Step]]) -> Iterator[Step]:
    """Run `steps` on the ranks of the core. The other ranks send their elements before, and receive all after."""
    if core.stands_by(rank):
        yield step(Send(rank + 1, 0, n))
        yield step(Recv(rank + 1, 0, n))
        return
    if core.acts(rank):
        yield step(Recv(rank - 1, 0, n, combine=True))
    yield from steps(core, rank, n)
    if core.acts(rank):
        yield step(Send(rank - 1, 0, n))


def _doubled(core: Core, rank: int, n: int) -> Iterator[Step]:
    here, there = 0, n  # my partial result, and room for a partner's
    index = core.index(rank)
    for half in core.halves():
        peer = core.rank(index ^ half)
        lower, higher = (there, here) if index & half else (here, there)
        yield step(
            Send(peer, here, here + n), Recv(peer, there, there + n), Copy(higher, higher + n, lower, combine=True)
        )
        here, there = lower, higher
    if here:
        yield step(Copy(here, here + n, 0))


@one_lane(lambda rank, size, n: n)
def scan(rank: int, size: int, n: int) -> Iterator[Step]:
    """Send my partial result to the rank 1, 2, 4 and so on above me, and combine the one from below."""
    for distance in (1 << i for i in range(rounds(size))):
        sends = [Send(rank + distance, 0, n)] if rank + distance < size else []
        receives = [Recv(rank - distance, 0, n, combine=True)] if rank >= distance else []
        yield step(*sends, *receives)


# --- recursive halving: in each step half the elements of the step before, for long buffers -----------------------


@one_lane(lambda rank, size, n: n)
def halving_allreduce(rank: int, size: int, n: int) -> Iterator[Step]:
    """Reduce-scatter by halving, then allgather by doubling (Rabenseifner): 2 log2(size) messages.

    2 n (size - 1) / size elements for a `size` that is a power of two; n more for a rank that acts for another.
    """
    return _in_core(Core.of(size), rank, n, _halved)


def _halved(core: Core, rank: int, n: int) -> Iterator[Step]:
    halves = list(_halves(core, rank, Blocks.even(n, core.count).start))
    for _, peer, mine, theirs in halves:
        yield step(Send(peer, *theirs), Recv(peer, *mine, combine=True))
    for _, peer, mine, theirs in reversed(halves):
        yield step(Send(peer, *mine), Recv(peer, *theirs))


def reduce_scatter(rank: int, size: int, blocks: Blocks) -> Schedule:
    """Exchange halves of the remaining elements with a partner, log2(size) times, until my block remains.

    Sends all elements except my block. A rank outside the power of two sends all elements, and its neighbour, which
    acts for it, also its block. Scratch: half of the elements, or all for a rank that acts for another.
    """
    core = Core.of(size)
    scratch = 0
    if core.acts(rank):
        scratch = blocks.total
    elif core.count > 2 and not core.stands_by(rank):
        _, _, mine, _ = next(_halves(core, rank, partial(bound, blocks, core)))
        scratch = mine[1] - mine[0]
    return Schedule(blocks.total + blocks.count(rank) + scratch, (partial(_reduce_scatter, rank, size, blocks),))


def _reduce_scatter(rank: int, size: int, blocks: Blocks) -> Iterator[Step]:
    core = Core.of(size)
    n, count = blocks.total, blocks.count(rank)
    own = blocks.start(rank)
    if size == 1:
        yield step(Copy(0, n, n))
    elif core.stands_by(rank):
        yield step(Send(rank + 1, 0, n))
        yield step(Recv(rank + 1, n, n + count))
    elif core.acts(rank):
        at = n + count  # element 0 of my partial results, which are all in scratch
        yield step(Recv(rank - 1, at, at + n), Copy(0, n, at, combine=True))
        for _, peer, mine, theirs in _halves(core, rank, partial(bound, blocks, core)):
            yield step(Send(peer, at + theirs[0], at + theirs[1]), Recv(peer, at + mine[0], at + mine[1], combine=True))
        yield step(Send(rank - 1, at + blocks.start(rank - 1), at + own), Copy(at + own, at + own + count, n))
    else:
        at = 0  # element 0 of the tensor, which is not written, then of the remaining elements in scratch
        for half, peer, mine, theirs in _halves(core, rank, partial(bound, blocks, core)):
            length = mine[1] - mine[0]
            send = Send(peer, at + theirs[0], at + theirs[1])
            if half == 1:
                yield step(send, Recv(peer, n, n + length), Copy(at + mine[0], at + mine[1], n, combine=True))
            elif half == core.count // 2:
                to = n + count
                yield step(send, Recv(peer, to, to + length), Copy(*mine, to, combine=True))
                at = to - mine[0]
            else:
                yield step(send, Recv(peer, at + mine[0], at + mine[1], combine=True))


@one_lane(lambda rank, size, blocks: blocks.total)
def allgather(rank: int, size: int, blocks: Blocks) -> Iterator[Step]:
    """Exchange all my blocks with a partner, log2(size) times, which doubles them each time.

    Sends all elements except some block for a `size` that is a power of two. A rank that acts for another also sends
    all elements to it.
    """
    core = Core.of(size)
    if core.stands_by(rank):
        yield step(Send(rank + 1, blocks.start(rank), blocks.stop(rank)))
        yield step(Recv(rank + 1, 0, blocks.total))
        return
    if core.acts(rank):
        yield step(Recv(rank - 1, blocks.start(rank - 1), blocks.stop(rank - 1)))
    for _, peer, mine, theirs in reversed(list(_halves(core, rank, partial(bound, blocks, core)))):
        yield step(Send(peer, *mine), Recv(peer, *theirs))
    if core.acts(rank):
        yield step(Send(rank - 1, 0, blocks.total))


def bound(blocks: Blocks, core: Core, index: int) -> int:
    """Return the first element of the rank or ranks for which the rank at `index` acts."""
    return blocks.start(core.first(index))


_Span = tuple[int, int]


def _halves(core: Core, rank: int, bound: Callable[[int], int]) -> Iterator[tuple[int, int, _Span, _Span]]:
    """Yield for each exchange, largest halves first: ranks in a half, my partner, and the elements of both halves.

    The first half is mine. The elements of the rank at index i begin at `bound(i)`.
    """
    index = core.index(rank)
    for half in reversed(core.halves()):
        mine = index // half * half
        theirs = mine ^ half
        yield half, core.rank(index ^ half), (bound(mine), bound(mine + half)), (bound(theirs), bound(theirs + half))
