"""Collectives in shared memory, for communicators whose ranks are all on one host."""

from __future__ import annotations

from collections.abc import Callable

from torch import dtype

from aiodist.backends.base import Begin, Done, Operation, Wanted, tag_of
from aiodist.backends.shm.group import INLINE_BYTES, Group
from aiodist.backends.shm.works import Allgather, Allreduce, Broadcast, Reduce, ReduceScatter, Scan, Task, Work
from aiodist.types import ReduceOp

__all__ = ["ShmNative"]

_WORKS: dict[str, Callable[[int, int, Operation], Work]] = {
    "allreduce": lambda rank, ranks, o: Allreduce(rank, ranks, o.t.dtype, o.t.numel(), o.op),
    "broadcast": lambda rank, ranks, o: Broadcast(rank, ranks, o.t.dtype, o.t.numel(), o.root),
    "reduce": lambda rank, ranks, o: Reduce(rank, ranks, o.t.dtype, o.t.numel(), o.op, o.root),
    "allgather": lambda rank, ranks, o: Allgather(rank, ranks, o.t.dtype, o.counts),
    "reduce_scatter": lambda rank, ranks, o: ReduceScatter(rank, ranks, o.t.dtype, o.counts, o.op),
    "scan": lambda rank, ranks, o: Scan(rank, ranks, o.t.dtype, o.t.numel(), o.op),
}


class ShmNative:
    """What `Group` does, as collectives."""

    finishes = True
    inline_bytes = INLINE_BYTES
    in_order = False

    def __init__(self, group: Group) -> None:
        self.group = group
        self._place = group.rank, group.size

    def supports(self, wanted: Wanted) -> bool:
        """Return True for each of its collectives: it takes every dtype and operator."""
        return wanted.operation in _WORKS

    def start(self, operation: Operation, key: int, done: Done) -> None:
        """Begin an operation."""
        work = _WORKS[operation.kind](*self._place, operation)
        self.group.submit(Task(key, work, operation.t, done, operation.out))

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Begin:
        """Return what begins an allreduce, with all that can be known ahead worked out."""
        work, submit = Allreduce(*self._place, kind, numel, op), self.group.submit
        return lambda t, seq, done: submit(Task(tag_of(seq), work, t, done))
