"""NCCL's collectives, enqueued in the order of the current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, dtype

from aiodist.backends.base import DTYPES, Done, Exchange, Primitive
from aiodist.backends.nccl.group import Launch, NcclGroup
from aiodist.backends.nccl.launch_order import LaunchSlot
from aiodist.streams.memory import bytes_of, flat, numbers_of
from aiodist.types import REDUCTIONS, ReduceOp

_MOVES = frozenset({"broadcast", "allgather", "alltoall", "exchange"})

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64, torch.uint32, torch.uint64})
_HALVES = frozenset({torch.float16, torch.bfloat16})
_FLOATS = frozenset({torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_TAKES = {
    ReduceOp.SUM: _INTEGERS | _FLOATS | _COMPLEX,
    ReduceOp.MEAN: _FLOATS | _COMPLEX,
    ReduceOp.PROD: _INTEGERS | _FLOATS,
    # Minimum and maximum do not round, so 16-bit floats need no conversion.
    ReduceOp.MIN: _INTEGERS | _FLOATS | _HALVES | {torch.bool},
    ReduceOp.MAX: _INTEGERS | _FLOATS | _HALVES | {torch.bool},
    # Booleans are bytes of 0 or 1: AND is the minimum, OR the maximum.
    ReduceOp.BAND: frozenset({torch.bool}),
    ReduceOp.BOR: frozenset({torch.bool}),
}
_NATIVE_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.MEAN: "sum",
    ReduceOp.PROD: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "min",
    ReduceOp.BOR: "max",
}
"""NCCL's operator for numbers of `as_numbers`. A mean is a sum with a later division."""


def reducer(group: NcclGroup, kind: dtype, op: ReduceOp) -> Callable[[Any, Tensor, int], None]:
    """Return a function of (communicator, numbers, stream) that enqueues an in-place allreduce of `kind`.

    The numbers are `as_numbers` of a tensor. A mean is the sum, which the caller divides.
    """
    return group.library.reducer(torch.uint8 if kind is torch.bool else kind.to_real(), _NATIVE_OPS[op])


def supports(operation: str, kind: dtype, op: ReduceOp | None) -> bool:
    """Return True if `NcclNative` has the operation. [Note: nccl] has the reasons for missing ones."""
    if operation in _MOVES:
        return kind in DTYPES
    return operation in REDUCTIONS and operation != "scan" and op is not None and kind in _TAKES.get(op, ())


@dataclass(eq=False, slots=True)
class NcclNative:
    """NCCL calls of one operation, with a slot in the launch order, or of all operations without a slot.

    Tensors are dense, flat and on the group's device. `done(None)` means that the calls are *enqueued* (see
    `NcclGroup.call`): the results are valid on the stream that was current. All ranks make the same calls in the same
    order (`LaunchOrder`), except that ranks without transfers make no call for an exchange.
    """

    _group: NcclGroup
    _slot: LaunchSlot | None = None

    def start(self, o: Primitive, done: Done) -> None:
        """Enqueue a supported operation."""
        self.start_all([o], done)

    def start_all(self, operations: Sequence[Primitive], done: Done) -> None:
        """Enqueue several operations, launched together."""
        launches = [launch for o in operations if not _is_empty(o) for launch in _LAUNCHES[o.kind](self, o)]
        if not launches:
            done(None)
            return
        launch = launches[0] if len(launches) == 1 else partial(self._together, launches)
        what = ", ".join(dict.fromkeys(o.kind for o in operations))
        results = [o for o in operations if o.kind != "reduce" or o.root == self._group.rank]
        means = [o.out for o in results if o.op is ReduceOp.MEAN]
        self._group.call(launch, what, done, means=means, slot=self._slot)

    def _together(self, launches: Sequence[Launch], comm: Any, stream: int) -> None:  # noqa: ANN401
        with self._group.library.group():
            for launch in launches:
                launch(comm, stream)

    def _allreduce(self, o: Primitive) -> list[Launch]:
        numbers = as_numbers(o.t)
        reduce = reducer(self._group, o.t.dtype, o.op)
        return [lambda comm, stream: reduce(comm, numbers, stream)]

    def _broadcast(self, o: Primitive) -> list[Launch]:
        data = bytes_of(o.t)
        return [_call("broadcast", data, data, o.root)]

    def _reduce(self, o: Primitive) -> list[Launch]:
        numbers = as_numbers(o.t)
        return [_call("reduce", numbers, numbers, self._op(o.op), o.root)]

    def _allgather(self, o: Primitive) -> list[Launch]:
        """Call ncclAllGather for equal counts, else one ncclBroadcast for each rank, launched together."""
        mine, everything = bytes_of(o.t), bytes_of(o.out)
        if len(set(o.counts)) == 1:
            return [_call("allgather", mine, everything)]
        blocks = enumerate(_blocks(everything, [count * o.out.element_size() for count in o.counts]))
        return [_call("broadcast", mine, block, root) for root, block in blocks if block.numel()]

    def _reduce_scatter(self, o: Primitive) -> list[Launch]:
        """Call ncclReduceScatter for equal counts, else one ncclReduce for each rank, launched together."""
        numbers, mine, native = as_numbers(o.t), as_numbers(o.out), self._op(o.op)
        if len(set(o.counts)) == 1:
            return [_call("reduce_scatter", numbers, mine, native)]
        parts = 2 if o.t.is_complex() else 1
        blocks = enumerate(_blocks(numbers, [count * parts for count in o.counts]))
        return [_call("reduce", block, mine, native, root) for root, block in blocks if block.numel()]

    def _alltoall(self, o: Primitive) -> list[Launch]:
        sends, receives = o.t.split(list(o.counts)), o.out.split(list(o.received))
        return self._exchange(Exchange(o.t, list(enumerate(sends)), list(enumerate(receives))))

    def _exchange(self, o: Primitive) -> list[Launch]:
        assert isinstance(o, Exchange)
        sends = [_call("send", bytes_of(t), rank) for rank, t in o.sends]
        return sends + [_call("recv", bytes_of(t), rank) for rank, t in o.receives]

    def _op(self, op: ReduceOp) -> Any:  # noqa: ANN401
        return self._group.library.ops[_NATIVE_OPS[op]]


_LAUNCHES: dict[str, Callable[[NcclNative, Primitive], list[Launch]]] = {
    "allreduce": NcclNative._allreduce,
    "broadcast": NcclNative._broadcast,
    "reduce": NcclNative._reduce,
    "allgather": NcclNative._allgather,
    "reduce_scatter": NcclNative._reduce_scatter,
    "alltoall": NcclNative._alltoall,
    "exchange": NcclNative._exchange,
}


def _call(name: str, *args: object) -> Launch:
    return lambda comm, stream: getattr(comm, name)(*args, stream=stream)


def as_numbers(t: Tensor) -> Tensor:
    """Return a flat view of `t` to reduce: bool as bytes, complex numbers as pairs."""
    kind = t.dtype
    if kind.is_floating_point and t.dim() == 1 and t.numel() > 1 and not t.requires_grad:
        return t
    numbers = numbers_of(t)
    return flat(torch.view_as_real(numbers)) if kind.is_complex else numbers


def _is_empty(o: Primitive) -> bool:
    """Return True if no call is needed: for an exchange on this rank, else on all ranks."""
    if isinstance(o, Exchange):
        return not (o.sends or o.receives)
    return o.t.numel() == o.out.numel() == 0


def _blocks(t: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = list(accumulate(sizes))
    return [t[end - size : end] for size, end in zip(sizes, ends, strict=True)]
