"""The state machine of a shard queue, without I/O.

Each event is a call, which returns instructions; `queue_messages` performs these in order. A record is identified by
its position in the order of the epoch.

    in the pool - handed to a rank - used
         ^------ returned, or its rank was lost
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_PLENTY = 64
"""Maximum records of a hand-out that joins several small shards."""
_MOST = 1024
"""Maximum records of such a hand-out while many are left, so that the kernel can read ahead."""


class Range(NamedTuple):
    """Positions from `start` to before `stop`."""

    start: int
    stop: int


class Take(NamedTuple):
    """A request of a rank for records, by `number`."""

    rank: int
    number: int
    waits: bool
    """True to wait if other ranks hold all unused records, since they may return some."""


class Hand(NamedTuple):
    """Answer request `number` of a rank with these ranges, which are empty if no records are left."""

    rank: int
    number: int
    ranges: tuple[Range, ...]


class Hold(NamedTuple):
    """Report to a rank that its request `number` waits for these ranks."""

    rank: int
    number: int
    holders: dict[int, int]
    """Number of records that each of these ranks holds."""


Instruction = Hand | Hold


@dataclass
class Share:
    """The records that one rank was handed in an epoch, in order, and the used ones."""

    held: deque[Range] = field(default_factory=deque)
    used: list[Range] = field(default_factory=list)
    total: int = 0
    """Number of used records."""

    @property
    def holds(self) -> int:
        return total(self.held)

    def use(self, total: int) -> None:
        """Count `total` records as used; raise `ValueError` for an impossible number."""
        more = total - self.total
        if not 0 <= more <= self.holds:
            raise ValueError(f"{total} records used: expected from {self.total} to {self.total + self.holds}")
        self.total = total
        while more:
            start, stop = self.held.popleft()
            end = min(stop, start + more)
            self.used[-1:] = _joined([*self.used[-1:], Range(start, end)])
            more -= end - start
            if end < stop:
                self.held.appendleft(Range(end, stop))

    def hand_back(self) -> list[Range]:
        back, self.held = list(self.held), deque()
        return back


class QueueMachine:
    """Hands out the records of one epoch, each to one rank.

    For p ranks, a hand-out is at most a 2p-th part of the remaining records, but at least `least`. It ends with a shard
    once it has 64 records, or a 16p-th part of the remaining ones, up to 1024 records. So a fast rank takes more
    hand-outs than a slow one, and the last hand-outs are small: ranks end at about the same time. Returned records are
    handed out first.

    Source: guided self-scheduling, Polychronopoulos and Kuck 1987, doi:10.1109/TC.1987.5009495; the queue of tasks is
    that of ElasticDL's master (its docs/designs/dynamic_data_sharding.md).
    """

    def __init__(self, ends: Sequence[int], ranks: int, least: int = 1, used: Iterable[Range] = ()) -> None:
        """`ends` are the end positions of the shards, `used` the records of this epoch that were used before."""
        self._ends = ends
        self._ranks = ranks
        self._least = least
        self._before = merged(used)
        edges = [0, *(edge for each in self._before for edge in each), ends[-1] if ends else 0]
        rest = [Range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
        self._pool = deque(rest)
        self.left = total(self._pool)
        """Number of records in the pool."""
        self._shares: dict[int, Share] = {}
        self._waiting: deque[Take] = deque()

    def take(self, rank: int, number: int, waits: bool = False) -> list[Instruction]:
        return [self._answer(Take(rank, number, waits))]

    def use(self, rank: int, total: int) -> list[Instruction]:
        """Handle the report of a rank that has used the first `total` of its records.

        Raises `ValueError`, with nothing changed, for an impossible number.
        """
        self._share(rank).use(total)
        return self._answer_waiting()

    def hand_back(self, rank: int, total: int | None) -> list[Instruction]:
        """Handle the return of a rank's records after `total` used ones, or its loss (None). Raises as `use`."""
        share = self._share(rank)
        if total is not None:
            share.use(total)
        self.left += share.holds
        self._pool.extendleft(reversed(share.hand_back()))
        self._waiting = deque(take for take in self._waiting if take.rank != rank)
        return self._answer_waiting()

    @property
    def used(self) -> list[Range]:
        return merged(self._before, *(share.used for share in self._shares.values()))

    @property
    def holders(self) -> dict[int, int]:
        return {rank: share.holds for rank, share in sorted(self._shares.items()) if share.held}

    def _share(self, rank: int) -> Share:
        return self._shares.setdefault(rank, Share())

    def _answer(self, take: Take) -> Instruction:
        ranges = self._next()
        if not ranges and take.waits:
            others = {rank: count for rank, count in self.holders.items() if rank != take.rank}
            if others:
                self._waiting.append(take)
                return Hold(take.rank, take.number, others)
        self._share(take.rank).held.extend(ranges)
        return Hand(take.rank, take.number, tuple(ranges))

    def _answer_waiting(self) -> list[Instruction]:
        """Answer the waiting ranks that can get records now."""
        waiting, self._waiting = self._waiting, deque()
        return [answer for answer in map(self._answer, waiting) if isinstance(answer, Hand)]

    def _next(self) -> list[Range]:
        want = max(self._least, -(-self.left // (2 * self._ranks)))
        enough = min(want, max(self._least, _PLENTY, min(_MOST, self.left // (16 * self._ranks))))
        taken: list[Range] = []
        count = 0
        while self._pool and count < enough:
            start, stop = self._pool.popleft()
            end = min(stop, start + want - count, self._ends[bisect_right(self._ends, start)])
            taken.append(Range(start, end))
            count += end - start
            if end < stop:
                self._pool.appendleft(Range(end, stop))
        self.left -= count
        return _joined(taken)


def total(ranges: Iterable[Range]) -> int:
    """Return the number of records in `ranges`."""
    return sum(stop - start for start, stop in ranges)


def merged(*several: Iterable[Range]) -> list[Range]:
    """Return the union of ranges, in order.

    >>> merged([Range(4, 6), Range(0, 2)], [Range(2, 3)])
    [Range(start=0, stop=3), Range(start=4, stop=6)]
    """
    return _joined(sorted(each for ranges in several for each in ranges))


def _joined(ranges: Iterable[Range]) -> list[Range]:
    """Return the same records in the same order, with adjacent ranges joined."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1].stop == start:
            joined[-1] = Range(joined[-1].start, stop)
        elif start < stop:
            joined.append(Range(start, stop))
    return joined
