"""Collectives in shared memory, for communicators whose ranks are all on one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, dtype

from aiodist.backends.base import Done
from aiodist.backends.shm.group import Group
from aiodist.backends.shm.works import Allgather, Allreduce, Broadcast, Reduce, ReduceScatter, Scan, Task
from aiodist.types import ReduceOp

__all__ = ["ShmNative"]


class ShmNative:
    """What `Group` does, as collectives; `key` is the operation's, the same on all ranks."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._place = group.rank, group.size

    def allreduce(self, t: Tensor, op: ReduceOp, key: int, done: Done) -> None:
        """Reduce `t` in place."""
        self.group.submit(Task(key, Allreduce(*self._place, t.dtype, t.numel(), op), t, done))

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Callable[[Tensor, int, Done], None]:
        """Return what `allreduce` does to tensors of this kind, with all that can be known ahead worked out."""
        work, submit = Allreduce(*self._place, kind, numel, op), self.group.submit
        return lambda t, key, done: submit(Task(key, work, t, done))

    def broadcast(self, t: Tensor, root: int, key: int, done: Done) -> None:
        """Overwrite `t` with root's."""
        self.group.submit(Task(key, Broadcast(*self._place, t.dtype, t.numel(), root), t, done))

    def reduce(self, t: Tensor, op: ReduceOp, root: int, key: int, done: Done) -> None:
        """Reduce into root's `t`."""
        self.group.submit(Task(key, Reduce(*self._place, t.dtype, t.numel(), op, root), t, done))

    def allgather(self, t: Tensor, out: Tensor, counts: Sequence[int], key: int, done: Done) -> None:
        """Fill `out` with everybody's `t`."""
        self.group.submit(Task(key, Allgather(*self._place, t.dtype, counts), t, done, out))

    def reduce_scatter(self, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp, key: int, done: Done) -> None:
        """Reduce `t` and keep my block in `out`."""
        self.group.submit(Task(key, ReduceScatter(*self._place, t.dtype, counts, op), t, done, out))

    def scan(self, t: Tensor, op: ReduceOp, key: int, done: Done) -> None:
        """Reduce `t` over the ranks up to mine."""
        self.group.submit(Task(key, Scan(*self._place, t.dtype, t.numel(), op), t, done))
