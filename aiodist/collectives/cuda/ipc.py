"""Collectives in device memory that the ranks of a host map from one another.

Each operation goes like this: a rank waits until its stream is ready for it, announces its tensor to those who work in
it, queues its own part of the work, in its own memory and in that of the others, waits until the device has done that,
and says so to those in whose memory it worked. When all have heard what they wait for it is over. All waiting is on the
host. A kernel that spins would keep the GPU from the very process that it waits for, since those that share a GPU take
turns on it; and an event of a process that was killed would never come.

Ranks that share a device take turns on it, and each turn costs a switch between their contexts. So the first rank of
each device does what is to be reduced elementwise for all on it: it has one share of the tensors, reads it of every
rank, and writes the result wherever it belongs. The others send one message and wait for one. No two ranks touch the
same bytes, nothing is copied on the way, and all have the same bits. n bytes per rank, p ranks:

    allreduce       all together read and write pn, as if each rank copied its tensor once
    reduce          all together read pn, write n
    scan            all together read 2n(p-1), write n(p-1)
    reduce_scatter  each rank reads n, writes n/p
    allgather       each rank reads and writes what all bring
    broadcast       each rank reads and writes n, root nothing

So much where one kernel does it (see `fused`): all but scan. Without one, in pieces that stay in the device's cache.
16-bit floats are added up in float32 and rounded once. On a stream that has nothing queued no event is waited for:
it would be over only at the next turn.

A rank that hears that another one died touches nobody's memory any more. One that has not heard of it yet may still be
writing into the tensors of all: after such a failure they hold anything. Memory that was freed meanwhile is not reused
before its last mapping is gone (see [Note: kept memory] in `backends/cuda_ipc/mapping.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, dtype

from aiodist.backends.base import Done, Primitive, Wanted
from aiodist.backends.cuda_ipc import FRAME_BYTES, Loan, Mappings
from aiodist.backends.inplace import FUNCTIONS, combine, copy, divide, writable
from aiodist.collectives.arithmetic import wire_op
from aiodist.collectives.cuda import fused
from aiodist.collectives.cuda.on_device import OnHost, StaysOnHost
from aiodist.collectives.endpoint import Endpoint, Implementation
from aiodist.collectives.scheduled import SubEndpoint
from aiodist.errors import BackendError, MismatchError
from aiodist.handles.kernel import Program, transfers
from aiodist.streams import Events, OnStream
from aiodist.streams.events import device_error, idle
from aiodist.types import OPERATIONS, ReduceOp

_ALIGNED_BYTES = 512  # shares begin at multiples of it, so that kernels read whole words
_FAILED, _DISAGREES = 1, 2  # what a verdict begins with; 0: all is well

Parts = Sequence[Tensor]  # of all ranks, flat, mine included; of those who lend nothing, nothing
Work = Callable[[Parts], None]


class _Group(NamedTuple):
    """The ranks of an endpoint."""

    numbers: Sequence[int]
    """In the world."""
    workers: Sequence[int]
    """The first rank of each device."""


class CudaIpc(Implementation):
    """See the module, and `Implementation`; its programs run under `on_devices`.

    Raises BackendError on all ranks where the memory of one of them cannot be mapped, MismatchError where they bring
    tensors of different dtype or size. When a rank dies, the ranks that wait for it get the transport's error.
    """

    name = "cuda_ipc"
    finishes = True
    compares = True  # the device is not held up

    def __init__(
        self,
        mappings: Mappings,
        ranks: Sequence[int],
        places: Sequence[str],
        events: Events,
        limits: Mapping[str, int],
    ) -> None:
        """`ranks` are the numbers in the world of the communicator's ranks, `places` names of their devices.

        Those say who works for whom, also where a tensor lies on another device than its rank's. See `LIMITS`.
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

    def run(self, ep: Endpoint, operation: Primitive) -> Program[None]:
        """Run an operation; an allreduce is equal to the bit on all ranks."""
        o = operation
        if o.kind == "broadcast":
            return self._broadcast(ep, o.t, o.root)
        if o.kind == "allgather":
            return self._allgather(ep, o.t, o.out, o.counts)
        if o.kind == "reduce_scatter":
            return self._reduce_scatter(ep, o)
        work: Callable[..., None] = {
            "allreduce": self._allreduced,
            "reduce": self._reduced,
            "scan": self._scanned,
        }[o.kind]
        return self._with_all(ep, o.t, partial(work, ep, o), shared=True)

    def _allreduced(self, ep: Endpoint, o: Primitive, parts: Parts) -> None:
        mine = self._share(ep, parts)
        self._write(mine, mine, o.op)

    def _reduced(self, ep: Endpoint, o: Primitive, parts: Parts) -> None:
        mine = self._share(ep, parts)
        into = mine[o.root - ep.rank]  # they begin with this rank's
        self._write([into], mine if o.root == ep.rank else [*(t for t in mine if t is not into), into], o.op)

    def _scanned(self, ep: Endpoint, o: Primitive, parts: Parts) -> None:
        mine = self._share(ep, parts)
        for pieces in self._pieces([mine[rank - ep.rank] for rank in range(ep.size)]):
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

    async def _reduce_scatter(self, ep: Endpoint, o: Primitive) -> None:
        start = sum(o.counts[: ep.rank])
        block = slice(start, start + o.counts[ep.rank])
        if ep.size == 1:
            copy(o.out, o.t)
        await self._with_all(ep, o.t, partial(self._block_reduced, ep.rank, o.op, _plain(o.out), block))

    def _block_reduced(self, me: int, op: ReduceOp, out: Tensor, block: slice, parts: Parts) -> None:
        self._write([out], [parts[rank][block] for rank in _around(me, len(parts))], op)

    async def _broadcast(self, ep: Endpoint, t: Tensor, root: int) -> None:
        def work(parts: Parts) -> None:
            if ep.rank != root:
                copy(parts[ep.rank], parts[root])

        await self._with_lenders(ep, t, {root: t.numel()}, work)

    async def _allgather(self, ep: Endpoint, t: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        ends = list(accumulate(counts))
        blocks = [_plain(out)[end - count : end] for end, count in zip(ends, counts, strict=True)]
        if blocks[ep.rank].data_ptr() != t.data_ptr():
            copy(blocks[ep.rank], _plain(t))

        def work(parts: Parts) -> None:
            for rank in _around(ep.rank, ep.size)[1:]:
                copy(blocks[rank], parts[rank])

        await self._with_lenders(ep, t, dict(enumerate(counts)), work)

    # --- what a rank reduces ------------------------------------------------------------------------------------------

    def _share(self, ep: Endpoint, parts: Parts) -> Sequence[Tensor]:
        """Return my share of each tensor: of mine, and of those of the ranks behind me, around to the one before."""
        t, workers = parts[ep.rank], self._group(ep).workers
        share = _share(workers.index(ep.rank), len(workers), t.numel(), t.dtype.itemsize)
        return [parts[rank][share] for rank in _around(ep.rank, ep.size)]

    def _write(self, into: Sequence[Tensor], ts: Sequence[Tensor], op: ReduceOp) -> None:
        """Write what `ts` come to into each of `into`: some of them too, of which the first is the first or the last.

        Or no memory of theirs.
        """
        if not into[0].numel() or fused.reduce(into, ts, op):
            return
        for pieces in self._pieces([*ts, *into]):
            terms, (target, *others) = pieces[: len(ts)], pieces[len(ts) :]
            at = target.data_ptr()
            reduce(next((t for t in terms if t.data_ptr() == at), target), terms, op)
            for other in others:
                copy(other, target)

    def _pieces(self, ts: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yield piece after piece of tensors of one size, counted as they are added up."""
        kind, numel = ts[0].dtype, ts[0].numel()
        itemsize = 4 if kind.is_floating_point and kind.itemsize == 2 else kind.itemsize
        step = max(self.limits["cuda_ipc.piece_bytes"] // itemsize, 1)
        if numel <= step:
            return iter((ts,) if numel else ())
        return zip(*(t.split(step) for t in ts), strict=True)

    # --- memory that is lent ------------------------------------------------------------------------------------------

    def _group(self, ep: Endpoint) -> _Group:
        """Return what is known of the ranks of `ep`."""
        ranks: Sequence[int] = tuple(ep.ranks) if isinstance(ep, SubEndpoint) else range(ep.size)
        group = self._groups.get(ranks)
        if group is None:
            places = [self._places[rank] for rank in ranks]
            workers = [places.index(place) for place in dict.fromkeys(places)]
            group = self._groups[ranks] = _Group([self._ranks[rank] for rank in ranks], workers)
        return group

    def _with_all(self, ep: Endpoint, t: Tensor, work: Work, *, shared: bool = False) -> Program[None]:
        return self._with_lenders(ep, t, dict.fromkeys(range(ep.size), t.numel()), work, shared=shared)

    async def _with_lenders(
        self, ep: Endpoint, t: Tensor, lent: Mapping[int, int], work: Work, *, shared: bool = False
    ) -> None:
        """Have `work` queue what this rank does in the tensors of those who lend theirs, and wait for all.

        `lent` are their numbers of elements. `shared`: all do, and the first rank of each device works for all on it.
        """
        numbers, workers = self._group(ep)
        others = _around(ep.rank, ep.size)[1:]
        lenders = [rank for rank in others if lent.get(rank)]
        hearers = others if lent.get(ep.rank) else []
        if shared and lenders:
            hearers = [rank for rank in workers if rank != ep.rank]
            lenders = lenders if ep.rank in workers else []
        if not lenders and not hearers:
            return
        t = _plain(t)
        loan = Loan(self._mappings, t)
        stream = torch.cuda.current_stream(t.device)
        failure = await self._settle(ep, stream)
        frames = {rank: bytearray(FRAME_BYTES) for rank in lenders}
        await transfers(
            StaysOnHost(
                [
                    *[ep.recv(_tensor(frame), rank) for rank, frame in frames.items()],
                    *[ep.send(_tensor(loan.announce(numbers[rank], failure)), rank) for rank in hearers],
                ]
            )
        )
        for rank, frame in frames.items():
            failure = _failure(failure, loan.hear, numbers[rank], frame, lent[rank])
        if frames and failure is None:
            with OnStream(stream):
                failure = _failure(None, self._queue, ep, loan, t, {rank: numbers[rank] for rank in lenders}, work)
        failure = (await self._settle(ep, stream)) or failure
        loan.release()
        failure = await self._agree(ep, lenders, hearers, failure)
        loan.end()
        if failure is not None:
            raise failure

    def _queue(self, ep: Endpoint, loan: Loan, t: Tensor, numbers: Mapping[int, int], work: Work) -> None:
        """Have `work` queue kernels in what was lent by the ranks that have `numbers`."""
        parts = [t[:0]] * ep.size
        parts[ep.rank] = t
        for rank, number in numbers.items():
            parts[rank] = loan.tensor(number)
        work(parts)

    async def _settle(self, ep: Endpoint, stream: torch.cuda.Stream) -> Exception | None:
        """Wait until all that is queued is done; return what the device failed with.

        Programs that share an endpoint take the same number of steps on all ranks, or their messages would be mixed up.
        """
        if ep.shared or not idle(stream):
            try:
                await transfers(StaysOnHost([partial(self._settled, stream)]))
            except BackendError as error:
                return error
        return None

    def _settled(self, stream: torch.cuda.Stream, done: Done) -> None:
        if idle(stream):
            done(None)
            return
        try:
            self.events.watch(stream, done)
        except RuntimeError as error:
            done(device_error(error))

    async def _agree(
        self, ep: Endpoint, lenders: Sequence[int], hearers: Sequence[int], failure: Exception | None
    ) -> Exception | None:
        """Tell those in whose memory I worked that I am through, and hear it of those who worked in mine.

        Returns what went wrong, here or there.
        """
        verdict = self._well
        if failure is not None:
            kind = _DISAGREES if isinstance(failure, MismatchError) else _FAILED
            verdict = _frame(bytes([kind]) + (str(failure) or repr(failure)).encode())
        heard = [bytearray(FRAME_BYTES) for _ in hearers]
        await transfers(
            OnHost(
                [
                    *[ep.recv(_tensor(frame), rank) for rank, frame in zip(hearers, heard, strict=True)],
                    *[ep.send(verdict, rank) for rank in lenders],
                ]
            )
        )
        for rank, frame in zip(hearers, heard, strict=True):
            if frame[0] and failure is None:
                told = frame[1:].rstrip(b"\0").decode(errors="replace")
                failure = (MismatchError if frame[0] == _DISAGREES else BackendError)(
                    f"rank {self._group(ep).numbers[rank]} failed in an operation by CUDA IPC: {told}"
                )
        return failure


def _failure(before: Exception | None, call: Callable[..., None], *args: object) -> Exception | None:
    """Make `call` and return what went wrong, `before` it if anything had: the other ranks wait for this one."""
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001  - raised once the others have been told
        return before or error
    return before


def _frame(words: bytes) -> Tensor:
    """Return a message that begins with as much of `words` as it has room for."""
    return _tensor(bytearray(words[:FRAME_BYTES].ljust(FRAME_BYTES, b"\0")))


def _tensor(frame: bytearray) -> Tensor:
    return torch.frombuffer(frame, dtype=torch.uint8)


def _plain(t: Tensor) -> Tensor:
    """Return `t` without a history; bool as bytes, since 0 and 1 are combined alike."""
    t = t.detach()
    return t.view(torch.uint8) if t.dtype is torch.bool else t


def _around(me: int, size: int) -> list[int]:
    """Return all ranks, from me on: so ranks that go through them read and write in different places at a time."""
    return [*range(me, size), *range(me)]


def _share(worker: int, workers: int, numel: int, itemsize: int) -> slice:
    """Return which of so many elements are the worker's, of so many workers."""
    unit = max(_ALIGNED_BYTES // itemsize, 1)
    units = -(-numel // unit)
    return slice(*(min(units * i // workers * unit, numel) for i in (worker, worker + 1)))


def _is_widened(kind: dtype, op: ReduceOp, terms: int) -> bool:
    """Return True where what is reduced is kept in float32: 16-bit floats that would be rounded more than once."""
    rounds = op is ReduceOp.MEAN or (terms > 2 and op in (ReduceOp.SUM, ReduceOp.PROD))
    return rounds and kind.is_floating_point and kind.itemsize == 2


def reduce(into: Tensor, ts: Sequence[Tensor], op: ReduceOp) -> None:
    """Reduce `ts`, one of each rank, into `into`, which may be the first or the last of them; the others stay."""
    step = wire_op(op)
    if _is_widened(into.dtype, op, len(ts)):
        total = ts[0].float()
        for t in ts[1:]:
            combine(total, t, step)
        if op is ReduceOp.MEAN:
            divide(total, len(ts))
        copy(into, total)
        return
    if into is ts[0]:
        for t in ts[1:]:
            combine(into, t, step)
    else:
        total = ts[0] if len(ts) == 2 else FUNCTIONS[step](ts[0], ts[1])
        for t in ts[2:-1]:
            combine(total, t, step)
        with writable(into):
            FUNCTIONS[step](total, ts[-1], out=into)
    if op is ReduceOp.MEAN:
        divide(into, len(ts))
