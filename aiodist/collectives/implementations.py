"""The ways in which a communicator can run a collective, each known by a name.

Every implementation offers the same programs on flat tensors in wire dtype, with counts that all ranks know:
`broadcast(ep, t, root)`, `allreduce(ep, t, op)`, `reduce(ep, t, op, root)`, `allgather(ep, t, out, counts)`,
`reduce_scatter(ep, t, out, counts, op)` and `scan(ep, t, op)`. Which of them it lacks, `lacks` tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor, dtype

from aiodist.backends.base import Begin, Native, dtype_name
from aiodist.backends.shm import INLINE_BYTES, ShmNative
from aiodist.collectives.program import Endpoint, Program, tag_of
from aiodist.collectives.scheduled import Scheduled
from aiodist.handles import LARGE_BYTES
from aiodist.schedules import SCHEDULES
from aiodist.types import ReduceOp

__all__ = ["Implementation", "NativeCollectives", "ScheduledMessages", "SharedMemory", "Wanted"]


class Wanted(NamedTuple):
    """An operation on tensors of some kind; the same on all ranks."""

    operation: str
    kind: dtype
    op: ReduceOp | None
    numel: int
    device: str = "cpu"
    """Where they lie, "cpu" or "cuda"."""

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor."""
        return self.numel * self.kind.itemsize

    def __str__(self) -> str:
        what = f"{self.operation} of {self.numel} {dtype_name(self.kind)}"
        what += f" with {self.op}" if self.op else ""
        return what if self.device == "cpu" else f"{what} on {self.device}"


class Implementation(Protocol):
    """See the module."""

    name: str
    finishes: bool
    """Its reductions take 16-bit floats and means as they are, and round once."""
    inline_bytes: int
    """Shorter tensors are worked on by the thread that issues or awaits, longer ones by the progress thread."""
    in_order: bool
    """It tells operations apart by the order of its calls alone, so it is for the first step of an operation only."""
    recallable: bool
    """All of it is messages of the endpoint, which can be taken off the wire; else ranks wait for one another in it."""
    compares: bool
    """It has hosts compare large operations by itself, between what it does within a host and what it does beyond."""

    def lacks(self, wanted: Wanted) -> str | None:
        """Return why it cannot do that, None where it can; the same on all ranks."""

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Begin | None:
        """Return what reduces such tensors, as they are, in place and with a single call; None where there is none."""

    def broadcast(self, ep: Endpoint, t: Tensor, root: int) -> Program[None]:
        """Overwrite `t` with root's."""

    def allreduce(self, ep: Endpoint, t: Tensor, op: ReduceOp) -> Program[None]:
        """Reduce `t` in place."""

    def reduce(self, ep: Endpoint, t: Tensor, op: ReduceOp, root: int) -> Program[None]:
        """Reduce into root's `t`; the others' is only read."""

    def allgather(self, ep: Endpoint, t: Tensor, out: Tensor, counts: Sequence[int]) -> Program[None]:
        """Fill `out` with everybody's elements, in rank order; `t` may be my block of it."""

    def reduce_scatter(
        self, ep: Endpoint, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Program[None]:
        """Reduce `t`, which is only read; `out` is my block."""

    def scan(self, ep: Endpoint, t: Tensor, op: ReduceOp) -> Program[None]:
        """Reduce `t` over the ranks up to mine."""


class NativeCollectives:
    """The collectives of the library that carries the communicator."""

    finishes = False
    inline_bytes = LARGE_BYTES
    in_order = True
    recallable = False
    compares = False

    def __init__(self, name: str, native: Native) -> None:
        self.name = name
        self._native = native

    def lacks(self, wanted: Wanted) -> str | None:
        if self._native.supports(wanted.operation, wanted.kind, wanted.op, wanted.numel):
            return None
        return f"{self.name} has no {wanted}"

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Begin | None:
        short = kind.is_floating_point and kind.itemsize < 4  # those are summed in float32
        if short or not self._native.supports("allreduce", kind, op, numel):
            return None
        return self._native.plan_allreduce(kind, numel, op)

    def broadcast(self, ep: Endpoint, t: Tensor, root: int) -> Program[None]:
        yield [partial(self._native.broadcast, t, root)]

    def allreduce(self, ep: Endpoint, t: Tensor, op: ReduceOp) -> Program[None]:
        yield [partial(self._native.allreduce, t, op)]

    def reduce(self, ep: Endpoint, t: Tensor, op: ReduceOp, root: int) -> Program[None]:
        yield [partial(self._native.reduce, t, op, root)]

    def allgather(self, ep: Endpoint, t: Tensor, out: Tensor, counts: Sequence[int]) -> Program[None]:
        yield [partial(self._native.allgather, t, out, counts)]

    def reduce_scatter(
        self, ep: Endpoint, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Program[None]:
        yield [partial(self._native.reduce_scatter, t, out, counts, op)]

    def scan(self, ep: Endpoint, t: Tensor, op: ReduceOp) -> Program[None]:
        yield [partial(self._native.scan, t, op)]


class SharedMemory:
    """Memory that all ranks of the endpoint map."""

    name = "shm"
    finishes = True
    inline_bytes = INLINE_BYTES
    in_order = False
    recallable = False
    compares = False

    def __init__(self, native: ShmNative) -> None:
        self._native = native

    def lacks(self, wanted: Wanted) -> str | None:
        return None

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Begin | None:
        begin = self._native.plan_allreduce(kind, numel, op)
        return lambda t, seq, done: begin(t, tag_of(seq), done)

    def broadcast(self, ep: Endpoint, t: Tensor, root: int) -> Program[None]:
        yield [partial(self._native.broadcast, t, root, ep.tag)]

    def allreduce(self, ep: Endpoint, t: Tensor, op: ReduceOp) -> Program[None]:
        yield [partial(self._native.allreduce, t, op, ep.tag)]

    def reduce(self, ep: Endpoint, t: Tensor, op: ReduceOp, root: int) -> Program[None]:
        yield [partial(self._native.reduce, t, op, root, ep.tag)]

    def allgather(self, ep: Endpoint, t: Tensor, out: Tensor, counts: Sequence[int]) -> Program[None]:
        yield [partial(self._native.allgather, t, out, counts, ep.tag)]

    def reduce_scatter(
        self, ep: Endpoint, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp
    ) -> Program[None]:
        yield [partial(self._native.reduce_scatter, t, out, counts, op, ep.tag)]

    def scan(self, ep: Endpoint, t: Tensor, op: ReduceOp) -> Program[None]:
        yield [partial(self._native.scan, t, op, ep.tag)]


class ScheduledMessages(Scheduled):
    """A schedule over the messages of the endpoint."""

    finishes = False
    inline_bytes = LARGE_BYTES
    in_order = False
    recallable = True
    compares = False

    def lacks(self, wanted: Wanted) -> str | None:
        names = SCHEDULES.get(wanted.operation, {})
        if self.name in names:
            return None
        return f"there is no schedule {self.name!r} of {wanted.operation}, only {', '.join(names) or 'none'}"

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Begin | None:
        return None
