"""Collectives in memory of CUDA devices that the ranks of a host lend one another.

Each operation goes like this: a rank waits until its stream is ready for it, announces its tensor, describes it to
those who work in it, queues its own part of the work, in its own memory and in that of the others, waits until the
device has done that, and says so. When all have said so it is over. All waiting is on the host. A kernel that spins
would keep the GPU from the very process that it waits for, since those that share a GPU take turns on it; and an event
of a process that was killed would never come.

Ranks that share a device take turns on it, and each turn costs a switch between their contexts. So the first rank of
each device does what is to be reduced elementwise for all on it: it has one share of the tensors, reads it of every
rank, and writes the result wherever it belongs. No two ranks touch the same bytes, nothing is copied on the way, and
all have the same bits. n bytes per rank, p ranks:

    allreduce       all together read and write pn, as if each rank copied its tensor once
    reduce          all together read pn, write n
    scan            all together read 2n(p-1), write n(p-1)
    reduce_scatter  each rank reads n, writes n/p
    allgather       each rank reads and writes what all bring
    broadcast       each rank reads and writes n, root nothing

16-bit floats are added up in float32 and rounded once. On a stream that has nothing queued no event is waited for:
it would be over only at the next turn.

A rank that hears that another one died touches nobody's memory any more. One that has not heard of it yet may still be
writing into the tensors of all: after such a failure they hold anything. Memory that was freed meanwhile is not reused
before its last mapping is gone (see [Note: kept memory] in `backends/cuda_ipc/mapping.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, dtype

from aiodist.backends.base import Done, Operation, Wanted
from aiodist.backends.cuda_ipc import Loan, Mappings
from aiodist.backends.inplace import FUNCTIONS, combine, copy, divide, writable
from aiodist.collectives.arithmetic import wire_op
from aiodist.collectives.metadata import as_bytes, as_tensor
from aiodist.collectives.program import Call, Endpoint, Implementation, Program
from aiodist.collectives.scheduled import SubEndpoint
from aiodist.errors import BackendError
from aiodist.streams import Events
from aiodist.streams.events import device_error, idle
from aiodist.types import OPERATIONS, ReduceOp

_LENGTH = struct.Struct("<I")
_FRAME_BYTES = 512  # of an announcement; what is longer follows
_VERDICT_BYTES = 256
_ALIGNED_BYTES = 512  # shares begin at multiples of it, so that kernels read whole words

Parts = Sequence[Tensor]  # of all ranks, flat, mine included; of those who lend nothing, nothing
Places = Sequence[str]  # the physical devices that they lie on, by name
Work = Callable[[Parts, Places], None]


class CudaIpc(Implementation):
    """See the module, and `Implementation`; its programs run under `on_devices`.

    Raises BackendError on all ranks where the memory of one of them cannot be mapped, MismatchError where they bring
    tensors of different dtype or size. When a rank dies, the ranks that wait for it get the transport's error.
    """

    name = "cuda_ipc"
    finishes = True
    compares = True  # the device is not held up

    def __init__(self, mappings: Mappings, ranks: Sequence[int], events: Events, limits: Mapping[str, int]) -> None:
        """`ranks` are the numbers in the world of the communicator's ranks; see `LIMITS`."""
        self._mappings = mappings
        self._ranks = ranks
        self._events = events
        self._limits = limits
        self._well = torch.zeros(_VERDICT_BYTES, dtype=torch.uint8, device="cpu")

    def lacks(self, wanted: Wanted) -> str | None:
        if wanted.operation not in OPERATIONS:
            return f"CUDA IPC has no {wanted}"
        return None if wanted.device == "cuda" else "CUDA IPC is for CUDA devices"

    def run(self, ep: Endpoint, operation: Operation) -> Program[None]:
        """Run an operation; an allreduce is equal to the bit on all ranks."""
        o = operation
        if o.kind == "broadcast":
            return self._broadcast(ep, o.t, o.root)
        if o.kind == "allgather":
            return self._allgather(ep, o.t, o.out, o.counts)
        if o.kind == "reduce_scatter":
            return self._reduce_scatter(ep, o)
        work: Work = {
            "allreduce": partial(self._allreduced, ep.rank, o.op),
            "reduce": partial(self._reduced, ep.rank, o.op, o.root),
            "scan": partial(self._scanned, ep.rank, o.op),
        }[o.kind]
        return self._with_all(ep, o.t, work, shared=True)

    def _allreduced(self, me: int, op: ReduceOp, parts: Parts, places: Places) -> None:
        for mine, *others in self._share(me, parts, places):
            _reduce(mine, [mine, *others], op)
            for other in others:
                copy(other, mine)

    def _reduced(self, me: int, op: ReduceOp, root: int, parts: Parts, places: Places) -> None:
        for pieces in self._share(me, parts, places):
            into = pieces[root - me]  # they begin with mine
            _reduce(into, [*(piece for piece in pieces if piece is not into), into] if root != me else pieces, op)

    def _scanned(self, me: int, op: ReduceOp, parts: Parts, places: Places) -> None:
        for pieces in self._share(me, parts, places):
            in_order = [pieces[rank - me] for rank in range(len(parts))]
            total = in_order[0]
            if widened := _is_widened(total.dtype, op, len(parts)):
                total = total.float()
            for piece in in_order[1:]:
                if widened:
                    combine(total, piece, op)
                    copy(piece, total)
                else:
                    combine(piece, total, op)
                    total = piece

    def _reduce_scatter(self, ep: Endpoint, o: Operation) -> Program[None]:
        start = sum(o.counts[: ep.rank])
        block = slice(start, start + o.counts[ep.rank])
        if ep.size == 1:
            copy(o.out, o.t)
        yield from self._with_all(ep, o.t, partial(self._block_reduced, ep.rank, o.op, _plain(o.out), block))

    def _block_reduced(self, me: int, op: ReduceOp, out: Tensor, block: slice, parts: Parts, places: Places) -> None:
        if out.numel():
            in_place = out.data_ptr() == parts[me][block].data_ptr()
            for into, *pieces in self._pieces([out, *(parts[rank][block] for rank in _around(me, len(parts)))]):
                _reduce(into, [into, *pieces[1:]] if in_place else pieces, op)

    def _broadcast(self, ep: Endpoint, t: Tensor, root: int) -> Program[None]:
        def work(parts: Parts, places: Places) -> None:
            if ep.rank != root:
                copy(parts[ep.rank], parts[root])

        yield from self._with_lenders(ep, t, {root: t.numel()}, work)

    def _allgather(self, ep: Endpoint, t: Tensor, out: Tensor, counts: Sequence[int]) -> Program[None]:
        ends = list(accumulate(counts))
        blocks = [_plain(out)[end - count : end] for end, count in zip(ends, counts, strict=True)]
        if blocks[ep.rank].data_ptr() != t.data_ptr():
            copy(blocks[ep.rank], _plain(t))

        def work(parts: Parts, places: Places) -> None:
            for rank in _around(ep.rank, ep.size)[1:]:
                copy(blocks[rank], parts[rank])

        yield from self._with_lenders(ep, t, dict(enumerate(counts)), work)

    # --- pieces -----------------------------------------------------------------------------------------------

    def _share(self, me: int, parts: Parts, places: Places) -> Iterator[Sequence[Tensor]]:
        """Yield piece after piece of my share: mine, and those of the ranks behind me, around to the one before."""
        share = _share(me, places, parts[me].numel(), parts[me].dtype.itemsize)
        return self._pieces([parts[rank][share] for rank in _around(me, len(parts))])

    def _pieces(self, ts: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yield piece after piece of tensors of one size, counted as they are added up."""
        kind, numel = ts[0].dtype, ts[0].numel()
        itemsize = 4 if kind.is_floating_point and kind.itemsize == 2 else kind.itemsize
        step = max(self._limits["cuda_ipc.piece_bytes"] // itemsize, 1)
        if numel <= step:
            return iter((ts,) if numel else ())
        return zip(*(t.split(step) for t in ts), strict=True)

    # --- memory that is lent ------------------------------------------------------------------------------------------

    def _with_all(self, ep: Endpoint, t: Tensor, work: Work, *, shared: bool = False) -> Program[None]:
        return self._with_lenders(ep, t, dict.fromkeys(range(ep.size), t.numel()), work, shared=shared)

    def _with_lenders(
        self, ep: Endpoint, t: Tensor, lent: Mapping[int, int], work: Work, *, shared: bool = False
    ) -> Program[None]:
        """Have `work` queue what this rank does in the tensors of those who lend theirs, and wait for all.

        `lent` are their numbers of elements. `shared`: all do, and the first rank of each device works for all on it.
        On all ranks it takes the same number of steps, as lockstep wants it.
        """
        others = _around(ep.rank, ep.size)[1:]
        lenders = [rank for rank in others if lent.get(rank)]
        hearers = others if lent.get(ep.rank) else []
        if not lenders and not hearers:
            return
        t = _plain(t)
        loan = Loan(self._mappings, t)
        known_as = {rank: self._known_as(ep, rank) for rank in others}
        failure = yield from self._settle(t)
        heard = yield from _exchanged(ep, {rank: loan.announce(known_as[rank], failure) for rank in hearers}, lenders)
        places = [""] * ep.size
        places[ep.rank] = self._mappings.place(t.device)
        for rank in lenders:
            failure = _failure(failure, loan.hear, known_as[rank], heard[rank], lent[rank])
            places[rank] = loan.place(known_as[rank])
        if shared:
            hearers = [rank for rank in _workers(places) if rank != ep.rank]
            lenders = lenders if ep.rank in _workers(places) else []
        said = {rank: loan.describe(known_as[rank], failure) for rank in hearers}
        new = [rank for rank in lenders if not loan.knows(known_as[rank])]
        heard = yield from _exchanged(ep, {rank: words for rank, words in said.items() if words is not None}, new)
        for rank in lenders:
            failure = _failure(failure, loan.borrow, known_as[rank], heard.get(rank))
        if lenders and failure is None:
            failure = _failure(None, self._queue, ep, loan, t, {rank: known_as[rank] for rank in lenders}, places, work)
        failure = (yield from self._settle(t)) or failure
        loan.release()
        failure = yield from self._agree(ep, lenders, hearers, failure)
        loan.end()
        if failure is not None:
            raise failure

    def _queue(
        self, ep: Endpoint, loan: Loan, t: Tensor, known_as: Mapping[int, int], places: Places, work: Work
    ) -> None:
        """Have `work` queue kernels in what was lent by the ranks of `known_as`."""
        parts = [t[:0]] * ep.size
        parts[ep.rank] = t
        for rank, number in known_as.items():
            parts[rank] = loan.tensor(number)
        work(parts, places)

    def _known_as(self, ep: Endpoint, rank: int) -> int:
        """Return the number in the world of a rank of `ep`."""
        return self._ranks[ep.ranks[rank] if isinstance(ep, SubEndpoint) else rank]

    def _settle(self, t: Tensor) -> Program[Exception | None]:
        """Wait until all that is queued is done; return what the device failed with."""
        try:
            yield [partial(self._settled, t.device)]
        except BackendError as error:
            return error
        return None

    def _settled(self, device: torch.device, done: Done) -> None:
        stream = torch.cuda.current_stream(device)
        if idle(stream):
            done(None)
            return
        try:
            self._events.watch(stream, done)
        except RuntimeError as error:
            done(device_error(error))

    def _agree(
        self, ep: Endpoint, lenders: Sequence[int], hearers: Sequence[int], failure: Exception | None
    ) -> Program[Exception | None]:
        """Tell those in whose memory I worked that I am through, and hear it of those who worked in mine.

        Returns what went wrong, here or there.
        """
        verdict = self._well
        if failure is not None:
            text = (str(failure) or repr(failure)).encode()[:_VERDICT_BYTES]
            verdict = as_tensor(text.ljust(_VERDICT_BYTES, b"\0"))
        verdicts = torch.empty((len(hearers), _VERDICT_BYTES), dtype=torch.uint8, device="cpu")
        yield [
            *(ep.recv(verdicts[i], rank) for i, rank in enumerate(hearers)),
            *(ep.send(verdict, rank) for rank in lenders),
        ]
        for rank, words in zip(hearers, verdicts, strict=True):
            if words[0] and failure is None:
                told = as_bytes(words).rstrip(b"\0").decode(errors="replace")
                failure = BackendError(f"rank {self._known_as(ep, rank)} failed in an operation by CUDA IPC: {told}")
        return failure


def _failure(before: Exception | None, call: Callable[..., None], *args: object) -> Exception | None:
    """Make `call` and return what went wrong, `before` it if anything had: the other ranks wait for this one."""
    try:
        call(*args)
    except Exception as error:  # noqa: BLE001  - raised once the others have been told
        return before or error
    return before


def _exchanged(ep: Endpoint, said: Mapping[int, bytes], lenders: Sequence[int]) -> Program[Mapping[int, bytes]]:
    """Send what is to be said to each rank, and return what each of `lenders` says."""
    packed = {rank: _LENGTH.pack(len(words)) + words for rank, words in said.items()}
    frames = {rank: torch.empty(_FRAME_BYTES, dtype=torch.uint8, device="cpu") for rank in lenders}
    calls: list[Call] = [ep.recv(frame, rank) for rank, frame in frames.items()]
    calls += [ep.send(as_tensor(data[:_FRAME_BYTES].ljust(_FRAME_BYTES, b"\0")), rank) for rank, data in packed.items()]
    yield calls
    heard = {rank: as_bytes(frame) for rank, frame in frames.items()}
    lengths = {rank: _LENGTH.size + _LENGTH.unpack_from(frame)[0] for rank, frame in heard.items()}
    rests = {
        rank: torch.empty(length - _FRAME_BYTES, dtype=torch.uint8, device="cpu")
        for rank, length in lengths.items()
        if length > _FRAME_BYTES
    }
    calls = [ep.recv(rest, rank) for rank, rest in rests.items()]
    calls += [ep.send(as_tensor(data[_FRAME_BYTES:]), rank) for rank, data in packed.items() if data[_FRAME_BYTES:]]
    yield calls
    for rank, rest in rests.items():
        heard[rank] += as_bytes(rest)
    return {rank: data[_LENGTH.size : lengths[rank]] for rank, data in heard.items()}


def _plain(t: Tensor) -> Tensor:
    """Return `t` without a history; bool as bytes, since 0 and 1 are combined alike."""
    t = t.detach()
    return t.view(torch.uint8) if t.dtype is torch.bool else t


def _around(me: int, size: int) -> list[int]:
    """Return all ranks, from me on: so ranks that go through them read and write in different places at a time."""
    return [*range(me, size), *range(me)]


def _workers(places: Places) -> list[int]:
    """Return the first rank of each device."""
    return [places.index(place) for place in dict.fromkeys(places)]


def _share(me: int, places: Places, numel: int, itemsize: int) -> slice:
    """Return which of so many elements are mine to reduce, the first rank of my device."""
    workers = _workers(places)
    mine = workers.index(me)
    unit = max(_ALIGNED_BYTES // itemsize, 1)
    units = -(-numel // unit)
    start, stop = (min(units * i // len(workers) * unit, numel) for i in (mine, mine + 1))
    return slice(start, stop)


def _is_widened(kind: dtype, op: ReduceOp, terms: int) -> bool:
    """Return True where what is reduced is kept in float32: 16-bit floats that would be rounded more than once."""
    rounds = op is ReduceOp.MEAN or (terms > 2 and op in (ReduceOp.SUM, ReduceOp.PROD))
    return rounds and kind.is_floating_point and kind.itemsize == 2


def _reduce(into: Tensor, ts: Sequence[Tensor], op: ReduceOp) -> None:
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
