"""What a rank does in each collective, given the memory of all: its part of the arithmetic, round by round.

p ranks, n bytes per rank. A *window* is the tensor of a rank that others look into; it is cut into parts. In each
round a rank works on the next piece of those parts that are its own to work on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import ClassVar
from zlib import crc32

import torch
from torch import Tensor

from aiodist.backends.base import DTYPES, Done
from aiodist.backends.inplace import COMBINE, divide
from aiodist.backends.shm.boards import Facts
from aiodist.types import ReduceOp

__all__ = ["Allgather", "Allreduce", "At", "Broadcast", "Reduce", "ReduceScatter", "Scan", "Work", "flat"]

At = Callable[[int, int, int, int], Tensor]
"""(rank, part, first, last): elements first to last of a part of that rank's window."""

_OPS = tuple(ReduceOp)
_CODES = {kind: code for code, kind in enumerate(DTYPES)}
_HALVES = frozenset({torch.float16, torch.bfloat16})


class Work(ABC):
    """One rank's side of an operation."""

    kind: ClassVar[int]
    name: ClassVar[str]
    parts: int
    """How many parts of a window are looked at in one round."""

    def __init__(self, key: int, rank: int, window: Tensor, facts: Facts, done: Done) -> None:
        """`key` is the same on all ranks and tells operations apart; `window` is flat."""
        self.key = key
        self.rank = rank
        self.window = window
        self.target = window
        """What this rank writes to."""
        self.facts = facts
        self.done = done
        self.longest = facts.numel
        """The number of elements in the longest part."""

    @staticmethod
    def described(facts: Facts) -> str:
        """Return facts as words."""
        what = f"{_NAMES[facts.kind]} {str(DTYPES[facts.dtype]).removeprefix('torch.')}[{facts.numel}]"
        op = f" {_OPS[facts.op]}" if facts.op >= 0 else ""
        op += f" cut {facts.cut:08x}" if facts.cut else ""
        return what + op + (f" root {facts.root}" if facts.root >= 0 else "")

    def reads(self, rank: int) -> bool:
        """Return whether others read the window of `rank`."""
        return True

    def writes(self, rank: int) -> bool:
        """Return whether others write the window of `rank`."""
        return False

    def lent(self) -> Sequence[int]:
        """Return the parts of this rank's window that others look at."""
        return range(self.parts)

    @abstractmethod
    def part(self, rank: int, part: int) -> tuple[int, int]:
        """Return where a part of that rank's window begins and ends."""

    def window_numel(self, rank: int) -> int:
        """Return how long the window of `rank` is."""
        return self.part(rank, self.parts - 1)[1]

    @abstractmethod
    def step(self, at: At, first: int, last: int) -> None:
        """Do elements first to last of what this rank works on."""


class _Shared(Work):
    """The window is cut in p parts of equal size, of which each rank works on one."""

    def __init__(self, key: int, place: tuple[int, int], t: Tensor, op: ReduceOp, root: int, done: Done) -> None:
        rank, self.parts = place
        super().__init__(key, rank, t, _facts(self.kind, t, op, root), done)
        self.op = op
        self._cut = [t.numel() * i // self.parts for i in range(self.parts + 1)]
        self.longest = -(-t.numel() // self.parts)

    def lent(self) -> Sequence[int]:
        return [part for part in range(self.parts) if part != self.rank]

    def part(self, rank: int, part: int) -> tuple[int, int]:
        return self._cut[part], self._cut[part + 1]


class Allreduce(_Shared):
    """Each rank reduces one part and writes it to the others': 2n(p-1)/p bytes read and as many written."""

    kind, name = 0, "allreduce"

    def writes(self, rank: int) -> bool:
        return True

    def step(self, at: At, first: int, last: int) -> None:
        me = self.rank
        mine = at(me, me, first, last)
        others = [at(rank, me, first, last) for rank in range(self.parts) if rank != me]
        _reduce(mine, mine, others, self.op, self.parts)
        for other in others:
            other.copy_(mine)


class Reduce(_Shared):
    """Each rank reduces one part into root's window."""

    kind, name = 1, "reduce"

    def writes(self, rank: int) -> bool:
        return rank == self.facts.root

    def step(self, at: At, first: int, last: int) -> None:
        me, root = self.rank, self.facts.root
        into = at(root, me, first, last)
        others = [at(rank, me, first, last) for rank in range(self.parts) if rank != root]
        _reduce(into, into, others, self.op, self.parts)


class Scan(_Shared):
    """Each rank adds up one part along the ranks, and leaves every rank's share in its window."""

    kind, name = 2, "scan"

    def writes(self, rank: int) -> bool:
        return True

    def step(self, at: At, first: int, last: int) -> None:
        me = self.rank
        total = at(0, me, first, last)
        total = total.float() if total.dtype in _HALVES else total.clone()
        mean = self.op is ReduceOp.MEAN
        op = ReduceOp.SUM if mean else self.op
        for rank in range(1, self.parts):
            share = at(rank, me, first, last)
            COMBINE[op](total, share.to(total.dtype))
            share.copy_(total / (rank + 1) if mean else total)


class Broadcast(Work):
    """Each rank copies root's window: n bytes read and written by each."""

    kind, name = 3, "broadcast"
    parts = 1

    def __init__(self, key: int, place: tuple[int, int], t: Tensor, root: int, done: Done) -> None:
        super().__init__(key, place[0], t, _facts(self.kind, t, None, root), done)

    def reads(self, rank: int) -> bool:
        return rank == self.facts.root

    def part(self, rank: int, part: int) -> tuple[int, int]:
        return 0, self.facts.numel

    def step(self, at: At, first: int, last: int) -> None:
        if self.rank != self.facts.root:
            at(self.rank, 0, first, last).copy_(at(self.facts.root, 0, first, last))


class Allgather(Work):
    """Each rank copies everybody's window: n bytes read of each and written."""

    kind, name = 4, "allgather"
    parts = 1

    def __init__(
        self, key: int, place: tuple[int, int], t: Tensor, out: Tensor, counts: Sequence[int], done: Done
    ) -> None:
        super().__init__(key, place[0], t, _facts(self.kind, out, None, -1, counts), done)
        self.target = out
        self._blocks = out.split(list(counts))
        self.longest = max(counts)

    def part(self, rank: int, part: int) -> tuple[int, int]:
        return 0, self._blocks[rank].numel()

    def step(self, at: At, first: int, last: int) -> None:
        for rank, block in enumerate(self._blocks):
            if first < block.numel():
                piece = at(rank, 0, first, last)
                into = block[first:last]
                if into.data_ptr() != piece.data_ptr():
                    into.copy_(piece)


class ReduceScatter(Work):
    """Each rank reduces its block of everybody's window into memory of its own."""

    kind, name = 5, "reduce_scatter"

    def __init__(
        self,
        key: int,
        place: tuple[int, int],
        t: Tensor,
        out: Tensor,
        counts: Sequence[int],
        op: ReduceOp,
        done: Done,
    ) -> None:
        rank, self.parts = place
        super().__init__(key, rank, t, _facts(self.kind, t, op, -1, counts), done)
        self.target = out
        self.op = op
        self._cut = [0, *accumulate(counts)]
        self.longest = max(counts)

    def lent(self) -> Sequence[int]:
        return [part for part in range(self.parts) if part != self.rank]

    def part(self, rank: int, part: int) -> tuple[int, int]:
        return self._cut[part], self._cut[part + 1]

    def step(self, at: At, first: int, last: int) -> None:
        me = self.rank
        into = self.target[first:last]
        others = [at(rank, me, first, last) for rank in range(self.parts) if rank != me]
        _reduce(into, at(me, me, first, last), others, self.op, self.parts)


_NAMES = {work.kind: work.name for work in (Allreduce, Reduce, Scan, Broadcast, Allgather, ReduceScatter)}


def flat(t: Tensor) -> Tensor:
    """Return `t` as works take it: without a history, flat, bool as bytes."""
    one = t.detach().view(-1)
    return one.view(torch.uint8) if one.dtype is torch.bool else one


def _facts(kind: int, t: Tensor, op: ReduceOp | None, root: int, counts: Sequence[int] = ()) -> Facts:
    cut = crc32(repr(list(counts)).encode()) if counts else 0
    return Facts(kind, _CODES[t.dtype], -1 if op is None else _OPS.index(op), root, t.numel(), cut)


def _reduce(into: Tensor, first: Tensor, others: Sequence[Tensor], op: ReduceOp, ranks: int) -> None:
    """Write the reduction of `first` and `others` to `into`, which may be `first`; 16-bit floats are rounded once."""
    mean = op is ReduceOp.MEAN
    combine = COMBINE[ReduceOp.SUM if mean else op]
    if into.dtype in _HALVES:
        total = first.float()
        for other in others:
            combine(total, other.float())
        if mean:
            total.div_(ranks)
        into.copy_(total)
        return
    if into is not first:
        if op is ReduceOp.SUM and others:
            torch.add(first, others[0], out=into)
            others = others[1:]
        else:
            into.copy_(first)
    for other in others:
        combine(into, other)
    if mean:
        divide(into, ranks)
