"""Collectives in shared memory, for communicators whose ranks are all on one host."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aiodist.backends.base import Done
from aiodist.backends.shm.group import Group
from aiodist.backends.shm.works import Allgather, Allreduce, Broadcast, Reduce, ReduceScatter, Scan, flat
from aiodist.types import ReduceOp

__all__ = ["ShmNative"]


class ShmNative:
    """What `Group` does, as collectives; `key` is the operation's, the same on all ranks."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._place = group.rank, group.size

    def allreduce(self, t: Tensor, op: ReduceOp, key: int, done: Done) -> None:
        """Reduce `t` in place."""
        self.group.submit(Allreduce(key, self._place, flat(t), op, -1, done))

    def broadcast(self, t: Tensor, root: int, key: int, done: Done) -> None:
        """Overwrite `t` with root's."""
        self.group.submit(Broadcast(key, self._place, flat(t), root, done))

    def reduce(self, t: Tensor, op: ReduceOp, root: int, key: int, done: Done) -> None:
        """Reduce into root's `t`."""
        self.group.submit(Reduce(key, self._place, flat(t), op, root, done))

    def allgather(self, t: Tensor, out: Tensor, counts: Sequence[int], key: int, done: Done) -> None:
        """Fill `out` with everybody's `t`."""
        self.group.submit(Allgather(key, self._place, flat(t), flat(out), counts, done))

    def reduce_scatter(self, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp, key: int, done: Done) -> None:
        """Reduce `t` and keep my block in `out`."""
        self.group.submit(ReduceScatter(key, self._place, flat(t), flat(out), counts, op, done))

    def scan(self, t: Tensor, op: ReduceOp, key: int, done: Done) -> None:
        """Reduce `t` over the ranks up to mine."""
        self.group.submit(Scan(key, self._place, flat(t), op, -1, done))
