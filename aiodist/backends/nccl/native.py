"""NCCL's collectives, enqueued in the order of the current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, dtype

from aiodist.backends.arithmetic import divide
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


class _NcclCall(NamedTuple):
    launch: Launch
    after: Callable[[], None] | None = None
    """Function that queues more work after the calls, or None."""


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
        parts = [_CALLS[o.kind](self, o) for o in operations if not _is_empty(o)]
        if not parts:
            done(None)
            return
        launch, after = parts[0]
        if len(parts) > 1:
            launch = partial(self._together, [part.launch for part in parts])
            after = partial(_in_turn, [part.after for part in parts if part.after is not None])
        what = ", ".join(dict.fromkeys(o.kind for o in operations))
        self._group.call(launch, what, done, after=after, slot=self._slot)

    def _together(self, launches: Sequence[Launch], comm: Any, stream: int) -> None:  # noqa: ANN401
        with self._group.library.group():
            for launch in launches:
                launch(comm, stream)

    def _allreduce(self, o: Primitive) -> _NcclCall:
        numbers = as_numbers(o.t)
        reduce = reducer(self._group, o.t.dtype, o.op)
        return _NcclCall(lambda comm, stream: reduce(comm, numbers, stream), self._division(o))

    def _broadcast(self, o: Primitive) -> _NcclCall:
        data = bytes_of(o.t)
        return _NcclCall(_call("broadcast", data, data, o.root))

    def _reduce(self, o: Primitive) -> _NcclCall:
        numbers = as_numbers(o.t)
        launch = _call("reduce", numbers, numbers, self._op(o.op), o.root)
        return _NcclCall(launch, self._division(o) if self._group.rank == o.root else None)

    def _allgather(self, o: Primitive) -> _NcclCall:
        """Call ncclAllGather for equal counts, else one ncclBroadcast for each rank, launched together."""
        mine, everything = bytes_of(o.t), bytes_of(o.out)
        if len(set(o.counts)) == 1:
            return _NcclCall(_call("allgather", mine, everything))
        blocks = enumerate(_blocks(everything, [count * o.out.element_size() for count in o.counts]))
        calls = [_call("broadcast", mine, block, root) for root, block in blocks if block.numel()]
        return _NcclCall(partial(self._together, calls))

    def _reduce_scatter(self, o: Primitive) -> _NcclCall:
        """Call ncclReduceScatter for equal counts, else one ncclReduce for each rank, launched together."""
        numbers, mine, native = as_numbers(o.t), as_numbers(o.out), self._op(o.op)
        if len(set(o.counts)) == 1:
            return _NcclCall(_call("reduce_scatter", numbers, mine, native), self._division(o))
        parts = 2 if o.t.is_complex() else 1
        blocks = enumerate(_blocks(numbers, [count * parts for count in o.counts]))
        calls = [_call("reduce", block, mine, native, root) for root, block in blocks if block.numel()]
        return _NcclCall(partial(self._together, calls), self._division(o))

    def _alltoall(self, o: Primitive) -> _NcclCall:
        sends, receives = o.t.split(list(o.counts)), o.out.split(list(o.received))
        return self._exchange(Exchange(o.t, list(enumerate(sends)), list(enumerate(receives))))

    def _exchange(self, o: Primitive) -> _NcclCall:
        assert isinstance(o, Exchange)
        calls = [_call("send", bytes_of(t), rank) for rank, t in o.sends]
        calls += [_call("recv", bytes_of(t), rank) for rank, t in o.receives]
        return _NcclCall(partial(self._together, calls))

    def _op(self, op: ReduceOp) -> Any:  # noqa: ANN401
        return self._group.library.ops[_NATIVE_OPS[op]]

    def _division(self, o: Primitive) -> Callable[[], None] | None:
        if o.op is not ReduceOp.MEAN or self._group.size == 1:
            return None
        return lambda: divide(o.out, self._group.size)


_CALLS: dict[str, Callable[[NcclNative, Primitive], _NcclCall]] = {
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


def _in_turn(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _blocks(t: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = list(accumulate(sizes))
    return [t[end - size : end] for size, end in zip(sizes, ends, strict=True)]
