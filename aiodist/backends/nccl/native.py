"""NCCL's collectives, enqueued behind the current stream and before what it queues next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import Done, Operation
from aiodist.backends.inplace import bytes_of, divide
from aiodist.backends.nccl.group import Launch, NcclGroup
from aiodist.backends.nccl.kinds import as_numbers, native_op
from aiodist.backends.nccl.launch_order import LaunchSlot
from aiodist.types import ReduceOp

__all__ = ["NcclNative"]


class NcclNative:
    """What one operation does with NCCL, or all of them where they need no order.

    Tensors are dense, flat and on the group's device. Calls take part in the order of the stream that is current when
    the method is called, and `done(None)` says that they are *enqueued*: results are there when that stream has come
    so far, and until then the tensors are in use. They run on the group's own stream, where nothing is allocated. All
    ranks must make the same calls in the same order; see `LaunchOrder`.
    """

    def __init__(
        self, group: NcclGroup, slot: LaunchSlot | None = None, behind: torch.cuda.Event | None = None
    ) -> None:
        """With `behind`, the calls come behind that event, and no stream is ordered behind them."""
        self._group = group
        self._slot = slot
        self._behind = behind

    def start(self, o: Operation, done: Done) -> None:
        """Enqueue an operation; see `kinds.supports` for which."""
        _STARTS[o.kind](self, o, done)

    def _allreduce(self, o: Operation, done: Done) -> None:
        """NcclAllReduce."""
        numbers, native = as_numbers(o.t), self._op(o.op)

        def launch(comm: Any, stream: int) -> None:  # noqa: ANN401
            comm.allreduce(numbers, numbers, native, stream=stream)

        self._call(o, launch, done, after=self._division(o))

    def _broadcast(self, o: Operation, done: Done) -> None:
        """NcclBroadcast."""
        data = bytes_of(o.t)

        def launch(comm: Any, stream: int) -> None:  # noqa: ANN401
            comm.broadcast(data, data, o.root, stream=stream)

        self._call(o, launch, done)

    def _reduce(self, o: Operation, done: Done) -> None:
        """NcclReduce."""
        numbers, native = as_numbers(o.t), self._op(o.op)

        def launch(comm: Any, stream: int) -> None:  # noqa: ANN401
            comm.reduce(numbers, numbers, native, o.root, stream=stream)

        self._call(o, launch, done, after=self._division(o) if self._group.rank == o.root else None)

    def _allgather(self, o: Operation, done: Done) -> None:
        """NcclAllGather where the counts are equal, else one ncclBroadcast for each rank, launched together."""
        mine, everything, counts = bytes_of(o.t), bytes_of(o.out), o.counts
        blocks = _blocks(everything, [count * o.out.element_size() for count in counts])

        def launch(comm: Any, stream: int) -> None:  # noqa: ANN401
            if len(set(counts)) == 1:
                comm.allgather(mine, everything, stream=stream)
                return
            with self._group.library.group():
                for root, block in enumerate(blocks):
                    if block.numel():
                        comm.broadcast(mine, block, root, stream=stream)

        self._call(o, launch, done)

    def _reduce_scatter(self, o: Operation, done: Done) -> None:
        """NcclReduceScatter where the counts are equal, else one ncclReduce for each rank, launched together."""
        numbers, mine, native, counts = as_numbers(o.t), as_numbers(o.out), self._op(o.op), o.counts
        parts = 2 if o.t.is_complex() else 1
        blocks = _blocks(numbers, [count * parts for count in counts])

        def launch(comm: Any, stream: int) -> None:  # noqa: ANN401
            if len(set(counts)) == 1:
                comm.reduce_scatter(numbers, mine, native, stream=stream)
                return
            with self._group.library.group():
                for root, block in enumerate(blocks):
                    if block.numel():
                        comm.reduce(block, mine, native, root, stream=stream)

        self._call(o, launch, done, after=self._division(o))

    def _call(self, o: Operation, launch: Launch, done: Done, *, after: Callable[[], None] | None = None) -> None:
        if o.t.numel() == o.out.numel() == 0:  # as on all ranks, which know the counts
            done(None)
        else:
            self._group.call(launch, o.kind, done, after=after, slot=self._slot, behind=self._behind)

    def _op(self, op: ReduceOp) -> Any:  # noqa: ANN401
        return self._group.library.ops[native_op(op)]

    def _division(self, o: Operation) -> Callable[[], None] | None:
        if o.op is not ReduceOp.MEAN or self._group.size == 1:
            return None
        return lambda: divide(o.out, self._group.size)


_STARTS = {
    "allreduce": NcclNative._allreduce,
    "broadcast": NcclNative._broadcast,
    "reduce": NcclNative._reduce,
    "allgather": NcclNative._allgather,
    "reduce_scatter": NcclNative._reduce_scatter,
}


def _blocks(t: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = list(accumulate(sizes))
    return [t[end - size : end] for size, end in zip(sizes, ends, strict=True)]
