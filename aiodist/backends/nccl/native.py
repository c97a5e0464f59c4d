"""NCCL's collectives, enqueued behind the current stream and before what it queues next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, dtype

from aiodist.backends.base import Begin, Done
from aiodist.backends.inplace import bytes_of, divide
from aiodist.backends.nccl.group import Launch, NcclGroup
from aiodist.backends.nccl.kinds import as_numbers, native_op, supports
from aiodist.backends.nccl.launch_order import LaunchSlot
from aiodist.errors import BackendError
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

    def supports(self, operation: str, kind: dtype, op: ReduceOp | None, numel: int) -> bool:
        """Return True when the method named `operation` takes such tensors; any number of elements goes."""
        return supports(operation, kind, op)

    def plan_allreduce(self, kind: dtype, numel: int, op: ReduceOp) -> Begin:
        """Return what `allreduce` does."""
        return lambda t, _, done: self.allreduce(t, op, done)

    def allreduce(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Reduce `t` in place on every rank: ncclAllReduce."""
        numbers, native = as_numbers(t), self._op(op)
        self._call(
            "allreduce",
            lambda comm, stream: comm.allreduce(numbers, numbers, native, stream=stream),
            done,
            after=self._division(t, op),
            empty=t.numel() == 0,
        )

    def broadcast(self, t: Tensor, root: int, done: Done) -> None:
        """Overwrite `t` with root's: ncclBroadcast."""
        data = bytes_of(t)
        self._call(
            "broadcast",
            lambda comm, stream: comm.broadcast(data, data, root, stream=stream),
            done,
            empty=t.numel() == 0,
        )

    def reduce(self, t: Tensor, op: ReduceOp, root: int, done: Done) -> None:
        """Reduce into root's `t`, the others' is only read: ncclReduce."""
        numbers, native = as_numbers(t), self._op(op)
        self._call(
            "reduce",
            lambda comm, stream: comm.reduce(numbers, numbers, native, root, stream=stream),
            done,
            after=self._division(t, op) if self._group.rank == root else None,
            empty=t.numel() == 0,
        )

    def allgather(self, t: Tensor, out: Tensor, counts: Sequence[int], done: Done) -> None:
        """Fill flat `out` with every rank's `counts[rank]` elements; `t` may be its own block.

        ncclAllGather where the counts are equal, else one ncclBroadcast for each rank, launched together.
        """
        mine, everything = bytes_of(t), bytes_of(out)
        blocks = _blocks(everything, [count * out.element_size() for count in counts])

        def launch(comm: Any, stream: int) -> None:  # noqa: ANN401
            if len(set(counts)) == 1:
                comm.allgather(mine, everything, stream=stream)
                return
            with self._group.library.group():
                for root, block in enumerate(blocks):
                    if block.numel():
                        comm.broadcast(mine, block, root, stream=stream)

        self._call("allgather", launch, done, empty=out.numel() == 0)

    def reduce_scatter(self, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp, done: Done) -> None:
        """Reduce `t`, which is only read, and give rank r the `counts[r]` elements of block r in `out`.

        ncclReduceScatter where the counts are equal, else one ncclReduce for each rank, launched together.
        """
        numbers, mine, native = as_numbers(t), as_numbers(out), self._op(op)
        parts = 2 if t.is_complex() else 1
        blocks = _blocks(numbers, [count * parts for count in counts])

        def launch(comm: Any, stream: int) -> None:  # noqa: ANN401
            if len(set(counts)) == 1:
                comm.reduce_scatter(numbers, mine, native, stream=stream)
                return
            with self._group.library.group():
                for root, block in enumerate(blocks):
                    if block.numel():
                        comm.reduce(block, mine, native, root, stream=stream)

        self._call("reduce_scatter", launch, done, after=self._division(out, op), empty=t.numel() == 0)

    def scan(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Not offered: NCCL has none."""
        done(BackendError("NCCL: there is no scan"))

    def _call(
        self, what: str, launch: Launch, done: Done, *, after: Callable[[], None] | None = None, empty: bool = False
    ) -> None:
        if empty:  # on all ranks: they know the counts
            done(None)
        else:
            self._group.call(launch, what, done, after=after, slot=self._slot, behind=self._behind)

    def _op(self, op: ReduceOp) -> Any:  # noqa: ANN401
        return self._group.library.ops[native_op(op)]

    def _division(self, t: Tensor, op: ReduceOp) -> Callable[[], None] | None:
        if op is not ReduceOp.MEAN or self._group.size == 1:
            return None
        return lambda: divide(t, self._group.size)


def _blocks(t: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = list(accumulate(sizes))
    return [t[end - size : end] for size, end in zip(sizes, ends, strict=True)]
