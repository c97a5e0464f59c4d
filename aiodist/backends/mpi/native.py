"""MPI's own non-blocking collectives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import Begin, Done, ours
from aiodist.backends.inplace import bytes_of, copy, divide, flat
from aiodist.backends.mpi.library import DTYPES, MPI, NARROW, OPS, PIECE_BYTES, SATURATES, as_backend_error
from aiodist.backends.mpi.requests import Requests, address, spec, start
from aiodist.handles import LARGE_BYTES, join
from aiodist.types import ReduceOp

__all__ = ["Conveyor", "MpiNative"]

_REDUCTIONS = frozenset({"allreduce", "reduce", "reduce_scatter", "scan"})
_SUMS = {**OPS, ReduceOp.MEAN: OPS[ReduceOp.SUM]}
_CONVEYED_BYTES = 1 << 20
_CONVEYED_AT_ONCE = 2
_SPECS = 256  # descriptions of buffers that are kept: programs reduce the same tensors again and again


class Conveyor:
    """Large reductions in pieces, few of them in flight, on a communicator of their own.

    Two pieces of 1 MiB stay in the caches, where Open MPI reduces 64 MiB more than twice as fast as in one call, and
    no poll of a piece lasts long. Pieces are started as others end, at different times on each rank: on the
    communicator that carries everything else they would mix with what is issued meanwhile.
    """

    def __init__(self, comm: MPI.Intracomm, requests: Requests) -> None:
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.comm = comm
        self._requests = requests
        self._waiting: deque[tuple[Tensor, ReduceOp, Done]] = deque()
        self._moving = 0

    def allreduce(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Reduce `t` in place; behind what was given earlier. A mean divides each piece while it is in the caches."""
        pieces = flat(t).split(_CONVEYED_BYTES // t.element_size())
        joined = join(len(pieces), self._requests.progress.counted(done))
        self._waiting.extend((piece, op, joined) for piece in pieces)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and self._moving < _CONVEYED_AT_ONCE:
            piece, op, joined = self._waiting.popleft()
            self._moving += 1
            call = partial(self._start, piece, op)
            start(self._requests, call, piece.nbytes, partial(self._ended, piece, op, joined))

    def _start(self, piece: Tensor, op: ReduceOp) -> MPI.Request:
        return self.comm.Iallreduce(MPI.IN_PLACE, spec(piece), _SUMS[op])

    def _ended(self, piece: Tensor, op: ReduceOp, joined: Done, error: BaseException | None) -> None:
        self._moving -= 1
        self._fill()
        if op is ReduceOp.MEAN:
            joined = _divided(piece, self.comm.size, joined)
        joined(error)


class MpiNative:
    """MPI's own non-blocking collectives."""

    def __init__(self, comm: MPI.Intracomm, requests: Requests, conveyor: Conveyor) -> None:
        self._comm = comm
        self._requests = requests
        self._conveyor = conveyor

    def supports(self, operation: str, kind: torch.dtype, op: ReduceOp | None, numel: int) -> bool:
        """Return True for what MPI has a type and an operator for; large counts go piecewise elsewhere."""
        if numel * kind.itemsize > PIECE_BYTES:
            return operation in ("allreduce", "broadcast", "reduce")
        if op is ReduceOp.MEAN:
            return operation == "allreduce" and kind in DTYPES
        return operation not in _REDUCTIONS or (kind in DTYPES and (op is None or op in OPS))

    def allreduce(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Reduce `t` in place: Iallreduce, in pieces where `t` is large."""
        t, done = _widened(t, op, done, t)
        if t.nbytes >= LARGE_BYTES:
            self._conveyor.allreduce(t, op, done)
        else:
            if op is ReduceOp.MEAN:
                done = _divided(t, self._comm.size, done)
            start(self._requests, lambda: self._comm.Iallreduce(MPI.IN_PLACE, spec(t), _SUMS[op]), t.nbytes, done)

    def plan_allreduce(self, kind: torch.dtype, numel: int, op: ReduceOp) -> Begin:
        """Return what `allreduce` does to tensors of this kind, with all that can be known ahead worked out."""
        call, mpi_type, nbytes = self._comm.Iallreduce, DTYPES[kind], numel * kind.itemsize
        mpi_op, mean, ranks = _SUMS[op], op is ReduceOp.MEAN, self._comm.size
        in_place, track = MPI.IN_PLACE, self._requests.track
        if nbytes >= LARGE_BYTES or _saturates(kind, op):
            return lambda t, _, done: self.allreduce(t, op, done)
        specs: dict[int, list[Any]] = {}

        def described(at: int) -> list[Any]:
            if len(specs) >= _SPECS:
                specs.clear()
            made = specs[at] = [address(at, nbytes), numel, mpi_type]
            return made

        def begin(t: Tensor, _: int, done: Done) -> None:
            at = t.data_ptr()
            if mean:
                done = _divided(t, ranks, done)
            try:
                request = call(in_place, specs.get(at) or described(at), mpi_op)
            except MPI.Exception as error:
                done(as_backend_error(error))
            else:
                track(request, done, nbytes)

        return begin

    def broadcast(self, t: Tensor, root: int, done: Done) -> None:
        """Overwrite `t`: Ibcast of bytes."""
        self._piecewise(bytes_of(t), done, lambda piece: self._comm.Ibcast(piece, root))

    def reduce(self, t: Tensor, op: ReduceOp, root: int, done: Done) -> None:
        """Reduce into root's `t`: Ireduce."""
        t, done = _widened(t, op, done, t if self._comm.rank == root else None)
        if self._comm.rank == root:
            self._piecewise(t, done, lambda piece: self._comm.Ireduce(MPI.IN_PLACE, piece, OPS[op], root))
        else:
            self._piecewise(t, done, lambda piece: self._comm.Ireduce(piece, None, OPS[op], root))

    def allgather(self, t: Tensor, out: Tensor, counts: Sequence[int], done: Done) -> None:
        """Fill `out`: Iallgather(v) of bytes."""
        sizes = [count * out.element_size() for count in counts]
        mine: Any = MPI.IN_PLACE if _own_block(t, out, counts, self._comm.rank) else spec(bytes_of(t))
        if len(set(sizes)) == 1:
            everything = [address(out.data_ptr(), out.nbytes), sizes[0], MPI.BYTE]
            self._start(lambda: self._comm.Iallgather(mine, everything), out.nbytes, done)
        else:
            offsets = [sum(sizes[:rank]) for rank in range(len(sizes))]
            vector = [address(out.data_ptr(), out.nbytes), (sizes, offsets), MPI.BYTE]
            self._start(lambda: self._comm.Iallgatherv(mine, vector), out.nbytes, done)

    def reduce_scatter(self, t: Tensor, out: Tensor, counts: Sequence[int], op: ReduceOp, done: Done) -> None:
        """Reduce `t` and keep my block: Ireduce_scatter."""
        if _saturates(t.dtype, op):
            t, done = _widened(t, op, done, None)
            out, done = _widened(out, op, done, out)
        self._start(lambda: self._comm.Ireduce_scatter(spec(t), spec(out), list(counts), OPS[op]), t.nbytes, done)

    def scan(self, t: Tensor, op: ReduceOp, done: Done) -> None:
        """Reduce `t` over the ranks up to mine: Iscan."""
        t, done = _widened(t, op, done, t)
        self._start(lambda: self._comm.Iscan(MPI.IN_PLACE, spec(t), OPS[op]), t.nbytes, done)

    def _piecewise(self, t: Tensor, done: Done, call: Callable[[Any], MPI.Request]) -> None:
        if t.nbytes <= PIECE_BYTES:
            self._start(lambda: call(spec(t)), t.nbytes, done)
            return
        pieces = flat(t).split(PIECE_BYTES // t.element_size())
        joined = join(len(pieces), done)
        for piece in pieces:
            self._start(lambda piece=piece: call(spec(piece)), piece.nbytes, joined)  # type: ignore[misc]

    def _start(self, call: Callable[[], MPI.Request], nbytes: int, done: Done) -> None:
        start(self._requests, call, nbytes, done)


def _divided(t: Tensor, ranks: int, done: Done) -> Done:
    """Return a `done` that first makes a mean of the sum."""
    return _behind(partial(divide, t, ranks), done)


def _behind(work: Callable[[], None], done: Done) -> Done:
    """Return a `done` that first does `work`, unless there is an error, and whose error is what that raises."""

    def over(error: BaseException | None) -> None:
        if error is None:
            try:
                work()
            except Exception as raised:  # noqa: BLE001  - it belongs to the task that awaits the operation
                error = ours(raised)
        done(error)

    return over


def _saturates(kind: torch.dtype, op: ReduceOp) -> bool:
    return SATURATES and op is ReduceOp.SUM and kind in NARROW


def _widened(t: Tensor, op: ReduceOp, done: Done, into: Tensor | None) -> tuple[Tensor, Done]:
    """Return `t` as the library sums it right, and a `done` that first writes the result back to `into`."""
    if not _saturates(t.dtype, op):
        return t, done
    wide = t.to(torch.int32)

    def narrow() -> None:  # also what keeps `wide` until the library is done with it
        if into is not None:
            copy(into, wide)

    return wide, _behind(narrow, done)


def _own_block(t: Tensor, out: Tensor, counts: Sequence[int], rank: int) -> bool:
    return t.data_ptr() == out.data_ptr() + sum(counts[:rank]) * out.element_size() and t.numel() > 0
