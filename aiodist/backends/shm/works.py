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

from aiodist.backends.base import DTYPES, Done, dtype_name
from aiodist.backends.inplace import COMBINE, divide, numbers_of
from aiodist.backends.shm.boards import Facts
from aiodist.types import ReduceOp

__all__ = [
    "Allgather",
    "Allreduce",
    "At",
    "Broadcast",
    "Reduce",
    "ReduceScatter",
    "Scan",
    "Task",
    "Work",
    "described",
]

At = Callable[[int, int, int, int], Tensor]
"""(rank, part, first, last): elements first to last of a part of that rank's window."""

_OPS = tuple(ReduceOp)
_CODES = {kind: code for code, kind in enumerate(DTYPES)}
_HALVES = frozenset({torch.float16, torch.bfloat16})


class Work(ABC):
    """An operation on tensors of one kind, as one rank does it; good for any number of them."""

    kind: ClassVar[int]
    name: ClassVar[str]
    parts: int
    """How many parts of a window are looked at in one round."""
    steady: ClassVar[bool] = False
    """It touches nothing but windows."""
    in_place: Work | None = None
    """What does the same, better, where all ranks' windows can be reached."""

    def __init__(self, rank: int, facts: Facts, longest: int) -> None:
        self.rank = rank
        self.facts = facts
        self.longest = longest
        """The number of elements in the longest part."""
        self.dtype = DTYPES[facts.dtype]

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
    def step(self, at: At, out: Tensor, first: int, last: int) -> None:
        """Do elements first to last of what this rank works on; `out` is what it fills beside windows."""


class _Shared(Work):
    """The window is cut in p parts of equal size, of which each rank works on one."""

    steady = True

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype, numel: int, op: ReduceOp, root: int = -1) -> None:
        super().__init__(rank, _facts(self.kind, dtype, numel, op, root), -(-numel // ranks))
        self.parts = ranks
        self.op = op
        self._cut = [numel * i // ranks for i in range(ranks + 1)]
        self._others = [other for other in range(ranks) if other != rank]

    def lent(self) -> Sequence[int]:
        return self._others

    def part(self, rank: int, part: int) -> tuple[int, int]:
        return self._cut[part], self._cut[part + 1]


class Allreduce(_Shared):
    """Each rank reduces one part and writes it to the others': 2n(p-1)/p bytes read and as many written."""

    kind, name = 0, "allreduce"

    def writes(self, rank: int) -> bool:
        return True

    def step(self, at: At, out: Tensor, first: int, last: int) -> None:
        me = self.rank
        mine = at(me, me, first, last)
        others = [at(rank, me, first, last) for rank in self._others]
        _reduce(mine, mine, others, self.op, self.parts)
        for other in others:
            other.copy_(mine)


class Reduce(_Shared):
    """Each rank reduces one part into root's window."""

    kind, name = 1, "reduce"

    def writes(self, rank: int) -> bool:
        return rank == self.facts.root

    def step(self, at: At, out: Tensor, first: int, last: int) -> None:
        me, root = self.rank, self.facts.root
        into = at(root, me, first, last)
        others = [at(rank, me, first, last) for rank in range(self.parts) if rank != root]
        _reduce(into, into, others, self.op, self.parts)


class Scan(_Shared):
    """Each rank adds up one part along the ranks, and leaves every rank's share in its window."""

    kind, name = 2, "scan"

    def writes(self, rank: int) -> bool:
        return True

    def step(self, at: At, out: Tensor, first: int, last: int) -> None:
        me = self.rank
        total = at(0, me, first, last)
        total = total.float() if total.dtype in _HALVES else total.clone()
        mean = self.op is ReduceOp.MEAN
        op = ReduceOp.SUM if mean else self.op
        for rank in range(1, self.parts):
            share = at(rank, me, first, last)
            COMBINE[op](total, share.to(total.dtype))
            result = total.clone() if mean else total
            if mean:
                divide(result, rank + 1)
            share.copy_(result)


class Broadcast(Work):
    """Each rank copies root's window: n bytes read and written by each."""

    kind, name = 3, "broadcast"
    parts = 1

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype, numel: int, root: int) -> None:
        super().__init__(rank, _facts(self.kind, dtype, numel, None, root), numel)
        self.in_place = _SharedBroadcast(rank, ranks, dtype, numel, ReduceOp.SUM, root)

    def reads(self, rank: int) -> bool:
        return rank == self.facts.root

    def part(self, rank: int, part: int) -> tuple[int, int]:
        return 0, self.facts.numel

    def step(self, at: At, out: Tensor, first: int, last: int) -> None:
        if self.rank != self.facts.root:
            out[first:last].copy_(at(self.facts.root, 0, first, last))


class _SharedBroadcast(_Shared):
    """Each rank, root too, copies a part of root's window into everybody's: (p-1)n/p bytes read and written."""

    kind, name = 3, "broadcast"

    def step(self, at: At, out: Tensor, first: int, last: int) -> None:
        root = self.facts.root
        source = at(root, self.rank, first, last)
        for rank in range(self.parts):
            if rank != root:
                at(rank, self.rank, first, last).copy_(source)


class Allgather(Work):
    """Each rank copies everybody's window: n bytes read of each and written."""

    kind, name = 4, "allgather"
    parts = 1

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype, counts: Sequence[int]) -> None:
        super().__init__(rank, _facts(self.kind, dtype, sum(counts), None, -1, counts), max(counts))
        self._counts = counts
        self._starts = list(accumulate(counts, initial=0))

    def part(self, rank: int, part: int) -> tuple[int, int]:
        return 0, self._counts[rank]

    def step(self, at: At, out: Tensor, first: int, last: int) -> None:
        for rank, (start, count) in enumerate(zip(self._starts, self._counts, strict=False)):
            if first < count:
                piece = at(rank, 0, first, last)
                into = out[start + first : start + min(last, count)]
                if into.data_ptr() != piece.data_ptr():
                    into.copy_(piece)


class ReduceScatter(Work):
    """Each rank reduces its block of everybody's window into memory of its own."""

    kind, name = 5, "reduce_scatter"

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype, counts: Sequence[int], op: ReduceOp) -> None:
        super().__init__(rank, _facts(self.kind, dtype, sum(counts), op, -1, counts), max(counts))
        self.parts = ranks
        self.op = op
        self._cut = [0, *accumulate(counts)]
        self._others = [other for other in range(ranks) if other != rank]

    def lent(self) -> Sequence[int]:
        return self._others

    def part(self, rank: int, part: int) -> tuple[int, int]:
        return self._cut[part], self._cut[part + 1]

    def step(self, at: At, out: Tensor, first: int, last: int) -> None:
        me = self.rank
        into = out[first:last]
        others = [at(rank, me, first, last) for rank in self._others]
        _reduce(into, at(me, me, first, last), others, self.op, self.parts)


_NAMES = {work.kind: work.name for work in (Allreduce, Reduce, Scan, Broadcast, Allgather, ReduceScatter)}


class Task:
    """One operation that was issued: which tensors, and who is told."""

    __slots__ = ("_out", "done", "key", "reached", "tensor", "work")

    def __init__(self, key: int, work: Work, t: Tensor, done: Done, out: Tensor | None = None) -> None:
        """`key` is the same on all ranks and tells operations apart; `t` is the window, `out` what else is filled."""
        self.key = key
        self.work = work
        self.done = done
        self.tensor = t
        self._out = t if out is None else out
        self.reached = False
        """The others reach the window where it is."""

    @property
    def nbytes(self) -> int:
        """The size of what is moved."""
        return max(self.tensor.nbytes, self._out.nbytes)

    @property
    def window(self) -> Tensor:
        """The window, flat."""
        return numbers_of(self.tensor)

    @property
    def out(self) -> Tensor:
        """What is filled, flat."""
        return numbers_of(self._out)


def described(facts: Facts) -> str:
    """Return facts as words."""
    what = f"{_NAMES[facts.kind]} {dtype_name(DTYPES[facts.dtype])}[{facts.numel}]"
    op = f" {_OPS[facts.op]}" if facts.op >= 0 else ""
    root = f" root {facts.root}" if facts.root >= 0 else ""
    return what + op + root + (f" cut {facts.cut:08x}" if facts.cut else "")


def _facts(
    kind: int, dtype: torch.dtype, numel: int, op: ReduceOp | None, root: int, counts: Sequence[int] = ()
) -> Facts:
    code = _CODES[torch.uint8 if dtype is torch.bool else dtype]
    cut = crc32(repr(list(counts)).encode()) if counts else 0
    return Facts(kind, code, -1 if op is None else _OPS.index(op), root, numel, cut)


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
