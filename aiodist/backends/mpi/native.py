"""MPI's own non-blocking collectives."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.arithmetic import divide
from aiodist.backends.base import Begin, Done, Primitive, Wanted, again, ours, tell
from aiodist.backends.mpi.library import DTYPES, MPI, NARROW, OPS, PIECE_BYTES, SATURATES, as_backend_error
from aiodist.backends.mpi.requests import Requests, address, spec, start
from aiodist.handles import LARGE_BYTES, join
from aiodist.streams.memory import bytes_of, flat
from aiodist.types import REDUCTIONS, ReduceOp

_SUMS = {**OPS, ReduceOp.MEAN: OPS[ReduceOp.SUM]}
_PIPELINED_BYTES = 1 << 20
_PIPELINED_AT_ONCE = 2
_SPECS = 256  # cached descriptions of buffers: programs reduce the same tensors repeatedly


class Pipeline:
    """Large reductions in chunks, few of them in flight, on a separate communicator.

    Two chunks of 1 MiB stay in the caches: Open MPI reduces 64 MiB more than twice as fast as in one call. Each poll is
    short. A chunk starts when an earlier one ends, at a time that differs between the ranks. A separate communicator
    keeps the chunks from matching other operations.
    """

    def __init__(self, comm: MPI.Intracomm, requests: Requests) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self._requests = requests
        self._waiting: deque[tuple[Tensor, ReduceOp, Done]] = deque()
        self._moving = 0

    def allreduce(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Reduce `t` in place, after earlier reductions. A mean divides each chunk while the chunk is in the caches."""
        pieces = flat(t).split(_PIPELINED_BYTES // t.element_size())
        joined = join(len(pieces), self._requests.progress.counted(done))
        self._waiting.extend((piece, op, joined) for piece in pieces)
        self._fill()

    def _fill(self) -> None:
        if (left := self._requests.left) is not None:
            waiting, self._waiting = self._waiting, deque()
            tell((joined, again(left)) for _, _, joined in waiting)
        while self._waiting and self._moving < _PIPELINED_AT_ONCE:
            piece, op, joined = self._waiting.popleft()
            self._moving += 1
            ended = partial(self._ended, piece, op, joined)
            start(self._requests, piece.nbytes, ended, self.comm.Iallreduce, MPI.IN_PLACE, spec(piece), _SUMS[op])

    def _ended(self, piece: Tensor, op: ReduceOp, joined: Done, error: BaseException | None) -> None:
        self._moving -= 1
        self._fill()
        if op is ReduceOp.MEAN:
            joined = _divided(piece, self.comm.size, joined)
        joined(error)


class MpiNative:
    """MPI's own non-blocking collectives."""

    finishes = False
    in_order = True
    recallable = False

    def __init__(self, comm: MPI.Intracomm, requests: Requests, pipeline: Pipeline) -> None:
        self._comm = comm
        self._requests = requests
        self._pipeline = pipeline

    def supports(self, wanted: Wanted) -> bool:
        """Return True if MPI has the type and the operator, and every library can represent the count."""
        operation, kind, op = wanted.operation, wanted.kind, wanted.op
        if operation not in _STARTS or (wanted.nbytes > PIECE_BYTES and operation != "allreduce"):  # `Pipeline`
            return False
        if op is ReduceOp.MEAN:
            return operation == "allreduce" and kind in DTYPES
        if SATURATES and op is ReduceOp.SUM and kind in NARROW:
            return False
        return operation not in REDUCTIONS or (kind in DTYPES and op in OPS)

    def start(self, operation: Primitive, _: int, done: Done) -> None:
        _STARTS[operation.kind](self, operation, done)

    def _allreduce(self, o: Primitive, done: Done) -> None:
        t, op = o.t, o.op
        if t.nbytes >= LARGE_BYTES:
            self._pipeline.allreduce(t, op, done)
        else:
            if op is ReduceOp.MEAN:
                done = _divided(t, self._comm.size, done)
            start(self._requests, t.nbytes, done, self._comm.Iallreduce, MPI.IN_PLACE, spec(t), _SUMS[op])

    def plan_allreduce(self, kind: torch.dtype, numel: int, op: ReduceOp) -> Begin:
        """Return a function that starts an allreduce with arguments computed in advance."""
        call, mpi_type, nbytes = self._comm.Iallreduce, DTYPES[kind], numel * kind.itemsize
        mpi_op, mean, ranks = _SUMS[op], op is ReduceOp.MEAN, self._comm.size
        in_place, requests = MPI.IN_PLACE, self._requests
        track = requests.track
        if nbytes >= LARGE_BYTES:
            return lambda t, _, done: self._allreduce(Primitive("allreduce", t, op=op), done)
        specs: dict[int, list[Any]] = {}

        def describe(at: int) -> list[Any]:
            if len(specs) >= _SPECS:
                specs.clear()
            made = specs[at] = [address(at, nbytes), numel, mpi_type]
            return made

        def begin(t: Tensor, _: int, done: Done) -> None:
            at = t.data_ptr()
            if mean:
                done = _divided(t, ranks, done)
            if requests.left is not None:
                done(again(requests.left))
                return
            try:
                request = call(in_place, specs.get(at) or describe(at), mpi_op)
            except MPI.Exception as error:
                done(as_backend_error(error))
            else:
                track(request, done, nbytes)

        return begin

    def _broadcast(self, o: Primitive, done: Done) -> None:
        start(self._requests, o.t.nbytes, done, self._comm.Ibcast, spec(bytes_of(o.t)), o.root)

    def _reduce(self, o: Primitive, done: Done) -> None:
        mine, into = (MPI.IN_PLACE, spec(o.t)) if self._comm.rank == o.root else (spec(o.t), None)
        start(self._requests, o.t.nbytes, done, self._comm.Ireduce, mine, into, OPS[o.op], o.root)

    def _allgather(self, o: Primitive, done: Done) -> None:
        """Gather blocks of equal size. Blocks of unequal sizes are not gathered natively."""
        everything = [address(o.out.data_ptr(), o.out.nbytes), o.t.nbytes, MPI.BYTE]
        start(self._requests, o.out.nbytes, done, self._comm.Iallgather, spec(bytes_of(o.t)), everything)

    def _reduce_scatter(self, o: Primitive, done: Done) -> None:
        args = spec(o.t), spec(o.out), list(o.counts), OPS[o.op]
        start(self._requests, o.t.nbytes, done, self._comm.Ireduce_scatter, *args)

    def _scan(self, o: Primitive, done: Done) -> None:
        start(self._requests, o.t.nbytes, done, self._comm.Iscan, MPI.IN_PLACE, spec(o.t), OPS[o.op])


_STARTS = {
    "allreduce": MpiNative._allreduce,
    "broadcast": MpiNative._broadcast,
    "reduce": MpiNative._reduce,
    "allgather": MpiNative._allgather,
    "reduce_scatter": MpiNative._reduce_scatter,
    "scan": MpiNative._scan,
}


def _divided(t: Tensor, ranks: int, done: Done) -> Done:
    def divide_then_done(error: BaseException | None) -> None:
        if error is None:
            try:
                divide(t, ranks)
            except Exception as raised:  # noqa: BLE001  - the error belongs to the task that awaits the operation
                error = ours(raised)
        done(error)

    return divide_then_done
