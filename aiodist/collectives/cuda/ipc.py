"""Collectives in device memory that the ranks of a host map from one another.

An operation has these steps. A rank waits until its stream has finished earlier work, then announces its tensor to the
ranks that use the tensor. The rank queues its part of the work, on its own memory and on other ranks' memory. After a
wait for the device, the rank reports the end to the owners of the used memory. The operation ends on a rank when all
messages for that rank have arrived. All waits are on the host, for two reasons. Processes that share a GPU take turns,
so a spinning kernel would block the other process. The event of a killed process would never be recorded.

Ranks that share a device take turns. Each turn costs a switch between contexts. So the first rank of each device does
the elementwise reductions for all ranks there. This rank reads a share of every rank's tensor, and writes the result to
every rank. The other ranks send one message and receive one. No two ranks access the same bytes. There are no
intermediate copies. All ranks get the same bits. With n bytes per rank and p ranks:

    allreduce       all together read and write pn, as if each rank copied its tensor once
    reduce          all together read pn, write n
    scan            all together read 2n(p-1), write n(p-1)
    reduce_scatter  each rank reads n, writes n/p
    allgather       each rank reads and writes the tensors of all
    broadcast       each rank reads and writes n, root nothing

Each reduction except scan has one fused kernel (see `fused`). Without NVRTC, a reduction runs in chunks that fit the
device's cache, and needs more reads and writes. 16-bit floats are added in float32 and rounded once. A stream without
queued work needs no wait for an event, which would be recorded only at the next turn.

A rank that learns of a lost rank stops using other ranks' memory. A rank without that knowledge may still write to the
tensors of all. After such a failure the content of the tensors is undefined. Freed memory is not reused before the
close of its last mapping (see [Note: kept memory] in `backends/cuda_ipc/mapping.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, dtype

from aiodist.backends.arithmetic import combine, combined, copy, from_wire, wire_op
from aiodist.backends.base import Done, Primitive, Wanted
from aiodist.backends.cuda_ipc import FRAME_BYTES, Loan, Mappings
from aiodist.collectives.cuda import fused
from aiodist.collectives.cuda.on_device import OnHost, StaysOnHost
from aiodist.collectives.endpoint import Endpoint, Implementation
from aiodist.errors import BackendError, MismatchError
from aiodist.handles.kernel import transfers
from aiodist.streams import Events, OnStream
from aiodist.streams.events import device_error, idle
from aiodist.types import OPERATIONS, ReduceOp

_ALIGNED_BYTES = 512  # alignment of shares, so that kernels read whole words
_FAILED, _DISAGREES = 1, 2  # first byte of a verdict (0 is success)

Parts = Sequence[Tensor]  # the flat tensor of each rank (empty for ranks that lend none)
Work = Callable[[Parts], None]


class _Group(NamedTuple):
    """The ranks of an endpoint."""

    numbers: Sequence[int]
    """World ranks."""
    workers: Sequence[int]
    """The first rank of each device."""


class CudaIpc(Implementation):
    """See the module and `Implementation`. The programs run under `on_devices`.

    Raises BackendError on all ranks if the memory of one rank cannot be mapped. Raises MismatchError if the tensors
    differ in dtype or size. After the loss of a rank, the waiting ranks get the transport's error.
    """

    name = "cuda_ipc"
    finishes = True
    compares = True  # operations on devices do not wait for the agreement

    def __init__(
        self,
        mappings: Mappings,
        ranks: Sequence[int],
        places: Sequence[str],
        events: Events,
        limits: Mapping[str, int],
    ) -> None:
        """`ranks` are the world ranks of the communicator's ranks, `places` are names of their devices.

        The first rank of each place does the work of that place, also if a tensor is on another device. For `limits`
        see `LIMITS`.
        """
        self._mappings = mappings
        self._ranks = ranks
        self._places = places
        self.events = events
        self.limits = limits
        self._groups: dict[Sequence[int], _Group] = {}
        self._well = _frame(b"")

    def lacks(self, wanted: Wanted) -> str | None:
        if wanted.operation not in OPERATIONS:
            return f"CUDA IPC has no {wanted}"
        return None if wanted.device == "cuda" else "CUDA IPC is for CUDA devices"

    def in_fixed_order(self, operation: str, ranks: int) -> bool:
        return True

    async def run(self, ep: Endpoint, primitives: Sequence[Primitive]) -> None:
        """Run collectives of one kind, with joined steps. An allreduce gives all ranks the same bits."""
        loans = [loan for o in primitives if (loan := self._loan(ep, o)) is not None]
        if not loans:
            return
        numbers = self._group(ep).numbers
        await self._settle(loans)
        receives = [ep.recv(_tensor(frame), rank) for loan in loans for rank, frame in loan.frames.items()]
        announced = [(loan.lent.announce(numbers[rank], loan.failure), rank) for loan in loans for rank in loan.hearers]
        await transfers(StaysOnHost([*receives, *[ep.send(_tensor(frame), rank) for frame, rank in announced]]))
        for loan in loans:
            self._work(ep, loan)
        await self._settle(loans)
        for loan in loans:
            loan.lent.release()
        await self._agree(ep, loans)
        for loan in loans:
            loan.lent.end()
        if failure := next((loan.failure for loan in loans if loan.failure is not None), None):
            raise failure

    def _loan(self, ep: Endpoint, o: Primitive) -> _Loan | None:
        """Return this rank's part of a collective, or None if the rank neither lends its tensor nor uses another."""
        if o.kind == "broadcast":
            return self._lend(ep, o.t, {o.root: o.t.numel()}, partial(_copied, ep.rank, o.root))
        if o.kind == "allgather":
            ends = list(accumulate(o.counts))
            blocks = [_plain(o.out)[end - count : end] for end, count in zip(ends, o.counts, strict=True)]
            if blocks[ep.rank].data_ptr() != o.t.data_ptr():
                copy(blocks[ep.rank], _plain(o.t))
            return self._lend(ep, o.t, dict(enumerate(o.counts)), partial(_gathered, ep.rank, blocks))
        of_all = dict.fromkeys(range(ep.size), o.t.numel())
        if o.kind == "reduce_scatter":
            start = sum(o.counts[: ep.rank])
            block = slice(start, start + o.counts[ep.rank])
            if ep.size == 1:
                copy(o.out, o.t)
            return self._lend(ep, o.t, of_all, partial(self._block_reduced, o.op, _plain(o.out), block))
        work: Callable[..., None] = {
            "allreduce": self._allreduced,
            "reduce": self._reduced,
            "scan": self._scanned,
        }[o.kind]
        return self._lend(ep, o.t, of_all, partial(work, ep, o), shared=True)

    def _allreduced(self, ep: Endpoint, o: Primitive, parts: Parts) -> None:
        mine = self._share(ep, parts)
        self._write(mine, mine, o.op)

    def _reduced(self, ep: Endpoint, o: Primitive, parts: Parts) -> None:
        mine = self._share(ep, parts)
        self._write([mine[o.root]], mine, o.op)

    def _scanned(self, ep: Endpoint, o: Primitive, parts: Parts) -> None:
        mine = self._share(ep, parts)
        for pieces in self._pieces(mine):
            total = pieces[0]
            if widened := _is_widened(total.dtype, o.op, ep.size):
                total = total.float()
            for piece in pieces[1:]:
                if widened:
                    combine(total, piece, o.op)
                    copy(piece, total)
                else:
                    combine(piece, total, o.op)
                    total = piece

    def _block_reduced(self, op: ReduceOp, out: Tensor, block: slice, parts: Parts) -> None:
        self._write([out], [part[block] for part in parts], op)

    # --- reductions ---------------------------------------------------------------------------------------------------

    def _share(self, ep: Endpoint, parts: Parts) -> Sequence[Tensor]:
        """Return this worker's share of each tensor, by rank."""
        t, workers = parts[ep.rank], self._group(ep).workers
        share = _share(workers.index(ep.rank), len(workers), t.numel(), t.dtype.itemsize)
        return [part[share] for part in parts]

    def _write(self, into: Sequence[Tensor], ts: Sequence[Tensor], op: ReduceOp) -> None:
        """Write the reduction of `ts`, in the fixed order, to each of `into`, which may have tensors of `ts`."""
        if not into[0].numel() or fused.reduce(into, ts, op):
            return
        for pieces in self._pieces([*ts, *into]):
            terms, (target, *others) = pieces[: len(ts)], pieces[len(ts) :]
            reduce(target, terms, op)
            for other in others:
                copy(other, target)

    def _pieces(self, ts: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yield chunks of tensors of one size, limited by the bytes in the dtype of partial results."""
        kind, numel = ts[0].dtype, ts[0].numel()
        itemsize = 4 if kind.is_floating_point and kind.itemsize == 2 else kind.itemsize
        step = max(self.limits["cuda_ipc.piece_bytes"] // itemsize, 1)
        if numel <= step:
            return iter((ts,) if numel else ())
        return zip(*(t.split(step) for t in ts), strict=True)

    # --- lent memory --------------------------------------------------------------------------------------------------

    def _group(self, ep: Endpoint) -> _Group:
        """Return the group of the ranks of `ep`."""
        ranks = tuple(ep.ranks)
        group = self._groups.get(ranks)
        if group is None:
            places = [self._places[rank] for rank in ranks]
            workers = [places.index(place) for place in dict.fromkeys(places)]
            group = self._groups[ranks] = _Group([self._ranks[rank] for rank in ranks], workers)
        return group

    def _lend(
        self, ep: Endpoint, t: Tensor, lent: Mapping[int, int], work: Work, *, shared: bool = False
    ) -> _Loan | None:
        """Return a loan, or None if this rank takes no part.

        `lent` has the numbers of elements, by lending rank. `work` queues this rank's kernels on the lent tensors. True
        for `shared` means that all ranks lend, and the first rank of each device does the work of that device.
        """
        workers = self._group(ep).workers
        others = _around(ep.rank, ep.size)[1:]
        lenders = [rank for rank in others if lent.get(rank)]
        hearers = others if lent.get(ep.rank) else []
        if shared and lenders:
            hearers = [rank for rank in workers if rank != ep.rank]
            lenders = lenders if ep.rank in workers else []
        if not lenders and not hearers:
            return None
        t = _plain(t)
        frames = {rank: bytearray(FRAME_BYTES) for rank in lenders}
        return _Loan(t, Loan(self._mappings, t), torch.cuda.current_stream(t.device), lent, work, frames, hearers)

    def _work(self, ep: Endpoint, loan: _Loan) -> None:
        """Queue this rank's kernels on the announced tensors."""
        numbers = self._group(ep).numbers
        for rank, frame in loan.frames.items():
            loan.attempt(loan.lent.receive, numbers[rank], frame, loan.counts[rank])
        if loan.frames and loan.failure is None:
            with OnStream(loan.stream):
                loan.attempt(self._queue, ep, loan)

    def _queue(self, ep: Endpoint, loan: _Loan) -> None:
        numbers = self._group(ep).numbers
        parts = [loan.t[:0]] * ep.size
        parts[ep.rank] = loan.t
        for rank in loan.frames:
            parts[rank] = loan.lent.tensor(numbers[rank])
        loan.work(parts)

    async def _settle(self, loans: Sequence[_Loan]) -> None:
        """Wait until the devices have done all queued work. Store an error in the loans."""
        busy = [stream for stream in dict.fromkeys(loan.stream for loan in loans) if not idle(stream)]
        if not busy:
            return
        try:
            await transfers(StaysOnHost([(self._settled, stream) for stream in busy]))
        except BackendError as error:
            for loan in loans:
                loan.failure = error

    def _settled(self, stream: torch.cuda.Stream, done: Done) -> None:
        if idle(stream):
            done(None)
            return
        try:
            self.events.watch(stream, done)
        except RuntimeError as error:
            done(device_error(error))

    async def _agree(self, ep: Endpoint, loans: Sequence[_Loan]) -> None:
        """Report the end to the owners of used memory. Receive the reports of the users of this rank's memory."""
        heard = [(loan, rank, bytearray(FRAME_BYTES)) for loan in loans for rank in loan.hearers]
        receives = [ep.recv(_tensor(frame), rank) for _, rank, frame in heard]
        sends = [ep.send(self._verdict(loan), rank) for loan in loans for rank in loan.frames]
        await transfers(OnHost([*receives, *sends]))
        for loan, rank, frame in heard:
            if frame[0] and loan.failure is None:
                reason = frame[1:].rstrip(b"\0").decode(errors="replace")
                loan.failure = (MismatchError if frame[0] == _DISAGREES else BackendError)(
                    f"rank {self._group(ep).numbers[rank]} failed in an operation by CUDA IPC: {reason}"
                )

    def _verdict(self, loan: _Loan) -> Tensor:
        """Return the message about the end of this rank's work."""
        failure = loan.failure
        if failure is None:
            return self._well
        kind = _DISAGREES if isinstance(failure, MismatchError) else _FAILED
        return _frame(bytes([kind]) + (str(failure) or repr(failure)).encode())


@dataclass(eq=False, slots=True)
class _Loan:
    """This rank's part of a collective: the rank's tensor, and the work on other ranks' tensors."""

    t: Tensor
    lent: Loan
    stream: torch.cuda.Stream
    counts: Mapping[int, int]
    """Numbers of elements, by lending rank."""
    work: Work
    frames: dict[int, bytearray]
    """Announcements, by lending rank."""
    hearers: Sequence[int]
    """Ranks that use this rank's memory."""
    failure: Exception | None = None

    def attempt(self, call: Callable[..., None], *args: object) -> None:
        """Make `call`. Keep its error until the end, since the other ranks wait for this rank."""
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001  - raised after the others know
            self.failure = self.failure or error


def _copied(rank: int, root: int, parts: Parts) -> None:
    if rank != root:
        copy(parts[rank], parts[root])


def _gathered(rank: int, blocks: Sequence[Tensor], parts: Parts) -> None:
    for other in _around(rank, len(parts))[1:]:
        copy(blocks[other], parts[other])


def _frame(words: bytes) -> Tensor:
    """Return a message with `words`, truncated to the size of a message."""
    return _tensor(bytearray(words[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0")))


def _tensor(frame: bytearray) -> Tensor:
    return torch.frombuffer(frame, dtype=torch.uint8)


def _plain(t: Tensor) -> Tensor:
    """Return `t` detached from autograd, bool as bytes of 0 and 1."""
    t = t.detach()
    return t.view(torch.uint8) if t.dtype is torch.bool else t


def _around(me: int, size: int) -> list[int]:
    """Return all ranks, beginning with this one, so that ranks access different memory at the same time."""
    return [*range(me, size), *range(me)]


def _share(worker: int, workers: int, numel: int, itemsize: int) -> slice:
    """Return the range of a worker's elements."""
    unit = max(_ALIGNED_BYTES // itemsize, 1)
    units = -(-numel // unit)
    return slice(*(min(units * i // workers * unit, numel) for i in (worker, worker + 1)))


def _is_widened(kind: dtype, op: ReduceOp, terms: int) -> bool:
    """Return True if partial results need float32: 16-bit floats that would be rounded more than once."""
    rounds = op is ReduceOp.MEAN or (terms > 2 and op in (ReduceOp.SUM, ReduceOp.PROD))
    return rounds and kind.is_floating_point and kind.itemsize == 2


def reduce(into: Tensor, ts: Sequence[Tensor], op: ReduceOp) -> None:
    """Reduce `ts`, one of each rank, into `into`, which may be one of `ts`. Other tensors do not change."""
    from_wire(combined(ts, wire_op(op), into.device), into, op, len(ts))
