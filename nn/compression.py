"""Compressed gradients: the exchanges of the codecs of `aiodist.codecs`, on a net's communicators.

The codec works on its own thread, and the loop issues its collectives. They have names, so several parts of buckets
are in flight while the next ones are encoded.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp import GradScaler

from aiodist.backends.base import dtype_name
from aiodist.codecs import Codec, Gather, GradientCodec, Gradients, NarrowSum, RoundingLoss, Sum
from aiodist.codecs.base import FLOATS, STRETCH, wide
from aiodist.codecs.gradients import Exchange, Gathered
from aiodist.communicator import Communicator
from aiodist.errors import OperationTimeout
from aiodist.handles import Done, Handle, Operation, Progress, internals, join
from aiodist.nn.buckets import Bucket, CommHook
from aiodist.nn.layout import memory_shape
from aiodist.streams import HostStream


@dataclass(frozen=True)
class Compression:
    """How gradients are compressed; `DataParallel.create(..., compress=codec)` means `Compression(codec)`.

    Attributes:
        codec: A codec of `aiodist.codecs`, or your own.
        error_feedback: True keeps the error of each code and adds it to the next gradient. None: True unless the codec
            is unbiased.
        within_hosts: True also compresses between the ranks of a host; else only between hosts (the groups of
            `coll.levels`).

    """

    codec: Codec
    error_feedback: bool | None = None
    within_hosts: bool = False


def checked_compression(compress: object, named: Iterable[tuple[str, Tensor]]) -> Compression:
    """Return `compress` as a `Compression`; raise TypeError for another type, or parameters that it does not take."""
    compression = compress if isinstance(compress, Compression) else Compression(cast(Codec, compress))
    codec = compression.codec
    if isinstance(codec, type) or not all(hasattr(codec, name) for name in ("encode", "decode")):
        raise TypeError(f"compress={compress!r}: expected a codec of aiodist.codecs, or a Compression")
    for name, parameter in named:
        if parameter.dtype not in FLOATS or not parameter.is_cpu:
            seen = f"{dtype_name(parameter.dtype)} on {parameter.device}"
            raise TypeError(f"parameter {name!r} is {seen}: compress= takes floats on the CPU")
    return compression


class Swap(NamedTuple):
    """Send each rank one of the equal parts of `tensor`; the answer has this rank's part of all ranks' tensors."""

    tensor: Tensor


_NAMES = 1024
"""Largest number of parts of buckets in flight. Ranks match the collectives of a part by its name."""
_Request = Sum | Gather | Swap | partial[Handle[Any]]
"""A request of a program; a partial is a collective within this host."""
_Program = Generator[_Request, Any, None]


class Residuals:
    """The errors of this rank's codes, to add to the next gradients: one flat residual for each parameter.

    A residual changes if all ranks have made the pass, and with the scale of the net's `scaler`. A parameter that this
    rank did not use keeps its residual.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._parameters = dict(named)
        self.by_name: dict[str, Tensor] = {}
        """Residuals, by the name of the parameter."""
        self.scale = 1.0
        """Scale of the `GradScaler` in the residuals."""
        self._totals: WeakKeyDictionary[Bucket, tuple[Tensor, Tensor | None]] = WeakKeyDictionary()
        """Next residual of each bucket, if all ranks make the pass, and the memory of the residual of the last pass."""

    def load(self, residuals: dict[str, Tensor], scale: float) -> None:
        """Replace the residuals; raise ValueError, without a change, for residuals of other parameters."""
        for name, residual in residuals.items():
            if (parameter := self._parameters.get(name)) is None:
                raise ValueError(f"residual of {name!r}: expected those of {', '.join(self._parameters)}")
            dtype, shape = wide(parameter.dtype), (parameter.numel(),)
            if residual.dtype is not dtype or residual.shape != shape:
                seen = f"{dtype_name(residual.dtype)} of shape {tuple(residual.shape)}"
                raise ValueError(f"residual of {name!r} is {seen}: expected {dtype_name(dtype)} of shape {shape}")
        self.by_name, self.scale = residuals, scale

    def rescale(self, scaler: GradScaler | None) -> None:
        """Multiply the residuals by the change of the scale of `scaler`."""
        scale = 1.0 if scaler is None else scaler.get_scale()
        if scale != self.scale:
            for residual in self.by_name.values():
                residual.mul_(scale / self.scale)
            self.scale = scale

    def settle(self, bucket: Bucket) -> None:
        """Keep the residuals of this pass."""
        if bucket not in self._totals:
            return
        total, before = self._totals[bucket]
        for slot, piece in zip(bucket.slots, _pieces(bucket, total), strict=True):
            residual = self.by_name.get(slot.name)
            if slot.result is None:  # no rank has used it, so it has no residual
                piece.zero_()
            if residual is not None and slot in bucket.unused:
                piece.add_(residual)
            self.by_name[slot.name] = piece
        self._totals[bucket] = torch.empty_like(total) if before is None else before, total

    def added(self, bucket: Bucket, data: Tensor, part: slice) -> Tensor:
        """Return the gradients of this rank in `part` of `data`, plus the residuals of the parameters that it used."""
        if bucket not in self._totals:
            self._totals[bucket] = torch.empty(data.numel(), dtype=wide(data.dtype), device="cpu"), None
        total, _ = self._totals[bucket]
        begin = 0
        for slot in bucket.slots:
            end = begin + slot.parameter.numel()
            here = slice(max(begin, part.start), min(end, part.stop))
            residual = self.by_name.get(slot.name)
            if here.start >= here.stop:
                pass
            elif residual is None or slot in bucket.unused:
                total[here].copy_(data[here])
            else:
                torch.add(data[here], residual[here.start - begin : here.stop - begin], out=total[here])
            begin = end
        return total[part]


class Compressor(CommHook):
    """A `CommHook` that reduces buckets as codes. The `state_dict` has the residuals.

    Each parameter has a residual in its dtype, or in float32 for 16-bit floats, which takes that memory twice.
    """

    def __init__(
        self,
        compression: Compression,
        data: Communicator,
        op: Literal["mean", "sum"],
        named: Iterable[tuple[str, Tensor]],
    ) -> None:
        self._compression = compression
        codec = compression.codec
        self._codec = codec if isinstance(codec, GradientCodec) else Gathered(codec)
        feedback = compression.error_feedback
        self._feedback = not self._codec.unbiased if feedback is None else feedback
        self._data = data
        self._within: Communicator | None = None
        """Communicator of the ranks of this host, or None if it has one rank."""
        self._between: Communicator | None = None
        """Communicator of the first ranks of all hosts, or None on other ranks."""
        self._factor = 1 / data.size if op == "mean" else 1.0
        self._stream = HostStream(f"codecs {data.name}")
        self._residuals = Residuals(named)
        self.progress = Progress.current()
        self.part_numel = 1 << 20
        """Elements of a part of a large bucket, if the codec allows parts; the same on all ranks."""
        self._number = 0
        self._names: WeakKeyDictionary[Bucket, int] = WeakKeyDictionary()
        """Number in the first name of each bucket. It stays, since the first use of a name takes a round trip."""
        self._named = 0
        self._kept: dict[str, Tensor] = {}

    async def open(self) -> None:
        """Make the communicators within and between hosts, on all ranks, and start the thread."""
        levels = self._data.levels
        groups = levels.groups(levels.depth)
        if self._compression.within_hosts or len(groups) == 1 or max(map(len, groups)) == 1:
            self._between = self._data
        else:
            level = (await self._data.hierarchy(form="tree"))[-1]
            self._within = level.intra if level.intra.size > 1 else None
            self._between = level.inter if level.intra.rank == 0 else None
            self.comms = [comm for comm in (self._within, self._between) if comm is not None]
        await self._stream.__aenter__()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def abort(self) -> None:
        self._stream.abort()

    # --- state ------------------------------------------------------------------------------------------

    @property
    def checkpoint_kind(self) -> str:
        """Name of the codec's class: residuals of one codec do not go to another."""
        return type(self._compression.codec).__name__

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of this rank's state: `number`, `scale`, and `residuals` and `kept`, by parameter, flat.

        It differs between ranks. Call it, and `load_state_dict`, between steps.
        """
        copied = [{name: t.clone() for name, t in which.items()} for which in (self._residuals.by_name, self._kept)]
        return {"number": self._number, "scale": self._residuals.scale, "residuals": copied[0], "kept": copied[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the state by a copy of `state`, on all ranks, each with its own.

        Raises KeyError for another kind of state, and ValueError for a state of other parameters. The old state then
        stays.
        """
        copied = [{name: t.detach().clone() for name, t in state[key].items()} for key in ("residuals", "kept")]
        number, scale = int(state["number"]), float(state["scale"])
        self._residuals.load(copied[0], scale)
        self._number, self._kept = number, copied[1]

    # --- buckets --------------------------------------------------------------------------------------------------

    def reduce(self, bucket: Bucket) -> Handle[Any]:
        over: Operation[None] = Operation(self.progress, "compressed reduction", polled=False)
        data = bucket.data
        parts = self._parts(data.numel())
        ended = join(len(parts), partial(_end, over))
        if bucket not in self._names:
            self._names[bucket] = self._named
            self._named += len(parts)
        jobs = []
        for number, part in enumerate(parts):
            name = f"codes {(self._names[bucket] + number) % _NAMES}"
            jobs.append(_Job(self, self._program(bucket, data, part, self._number), name, over, ended))
            self._number += 1
        for job in jobs:
            job.advance(None)
        return over.handle

    def _parts(self, numel: int) -> list[slice]:
        """Return the parts of a bucket: while one part is in flight, the next is encoded."""
        most = self.part_numel if self._codec.elementwise else max(numel, 1)
        return [slice(start, min(start + most, numel)) for start in range(0, max(numel, 1), most)]

    def rescale(self, scaler: GradScaler | None) -> None:
        self._residuals.rescale(scaler)

    def settle(self, bucket: Bucket) -> None:
        self._residuals.settle(bucket)

    def _program(self, bucket: Bucket, flat: Tensor, part: slice, number: int) -> _Program:
        data, within, between = flat[part], self._within, self._between
        if within is not None:
            yield partial(within.reduce, data)
        if between is not None:
            total = self._residuals.added(bucket, flat, part) if self._feedback else data.to(wide(data.dtype))
            out = data if total.dtype is data.dtype else torch.empty_like(total)
            shapes: list[tuple[int, ...]] = [(total.numel(),)]
            names = [""]  # a codec that allows parts needs no name
            if total.numel() == flat.numel():
                shapes = [memory_shape(slot.parameter) for slot in bucket.slots]
                names = [slot.name for slot in bucket.slots]
            gradients = Gradients(total, out, shapes, names, between.size, self._factor, number, self._feedback)
            yield from self._exchanged(self._codec.exchange(gradients, self._kept), between)
            if out is not data:
                data.copy_(out)
                if self._feedback and between.rank == 0:  # the rounding error of gradients of 16 bits
                    total.add_(out.sub_(data), alpha=1 / self._factor)
            if self._feedback and not bool(total.sum().isfinite()):  # a bad gradient is sent once
                total.nan_to_num_(0.0, 0.0, 0.0)
        if within is not None:
            yield partial(within.broadcast, data)

    def _exchanged(self, exchange: Exchange, between: Communicator) -> _Program:
        """Count the sent bytes, and answer a `NarrowSum` by two collectives."""
        answer = None
        with suppress(StopIteration):
            while True:
                request = exchange.send(answer)
                self.nbytes += request[0].nbytes
                if isinstance(request, NarrowSum):
                    answer = yield from narrow_sum(request, between.rank, between.size)
                else:
                    answer = yield request

    # --- requests of jobs ----------------------------------------------------------------------------------------

    def issue(self, request: _Request, name: str) -> Handle[Any]:
        """Issue the collective of a request, on the loop, in any order."""
        if isinstance(request, partial):
            return request(name=name)
        assert self._between is not None
        if isinstance(request, Gather):
            return self._between.allgather(request.code, name=name)
        if isinstance(request, Swap):
            return self._between.alltoall_single(request.tensor, name=name)
        return self._between.allreduce(request.tensor, request.op, name=name)

    def compute(self, program: _Program, answer: Any) -> Handle[_Request | None]:
        """Return a handle of the next request of `program`, or of None at its end."""
        return self._stream.submit(_advanced, program, answer)

    def abort_links(self, error: BaseException) -> None:
        """Abort the communicators, since the other ranks would wait for this one."""
        for comm in {self._data, *filter(None, (self._within, self._between))}:
            comm.abort(f"rank {self._data.rank} cannot compress its gradients: {error}")


def _end(over: Operation[None], error: BaseException | None) -> None:
    if error is None:
        over.resolve(None)
    else:
        over.reject(error)


class _Job:
    """The reduction of a part of a bucket: computes on the codec's thread, communicates from the loop."""

    def __init__(
        self, compressor: Compressor, program: _Program, name: str, over: Operation[None], ended: Done
    ) -> None:
        self._compressor = compressor
        self._program = program
        self._name = name
        self._over = over
        self._ended = ended
        self._collective: Handle[Any] | None = None
        """The collective in flight, or None."""

    def advance(self, answer: Any) -> None:
        """Continue the program with `answer`."""
        try:
            internals.add_waiter(self._compressor.compute(self._program, answer), self)
        except RuntimeError as error:  # the stream was aborted
            self._fail(error)

    def _issue(self, request: _Request) -> None:
        try:
            self._collective = self._compressor.issue(request, self._name)
        except Exception as error:  # noqa: BLE001  - the pass raises it
            self._fail(error)
        else:
            self._over.set_parts((self._collective,))
            internals.add_waiter(self._collective, self)

    def _fail(self, error: BaseException) -> None:
        self._compressor.abort_links(error)
        self._ended(error)

    def wake(self, handle: Handle[Any], late: OperationTimeout | None, /) -> None:
        if late is not None and not handle.done():  # the work continues
            self._over.expire()
            internals.add_waiter(handle, self)
        elif (error := internals.error_of(handle)) is not None:
            self._fail(error)
        elif handle is self._collective:
            self._collective = None
            self.advance(handle.result())
        elif (request := handle.result()) is None:
            self._ended(None)
        else:
            self._issue(request)


def _advanced(program: _Program, answer: Any) -> _Request | None:
    with torch.inference_mode(False), torch.no_grad():
        try:
            return program.send(answer)
        except StopIteration:
            return None


def _pieces(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    return list(flat.split([slot.parameter.numel() for slot in bucket.slots]))


def narrow_sum(request: NarrowSum, rank: int, ranks: int) -> Generator[Gather | Swap, Any, RoundingLoss]:
    """Answer a `NarrowSum` by two collectives, since an allreduce would send 16-bit floats as float32.

    Each rank sums a part, and sends the sum rounded. Two ranks send each other everything, which is as many bytes, in
    one collective and without rounding.
    """
    t, out, factor = request
    if ranks <= 2:
        codes = (yield Gather(t)) if ranks == 2 else [t]
        room = torch.empty(min(STRETCH, out.numel()), dtype=out.dtype, device="cpu")
        for to, first, *others in zip(*(part.split(STRETCH) for part in (out, *codes)), strict=True):
            to.copy_(first)
            for other in others:
                to.add_(room[: to.numel()].copy_(other))  # half the time of a sum of two dtypes
            if factor != 1.0:
                to.mul_(factor)
        return RoundingLoss(0, out[:0])
    part = -(-t.numel() // ranks)
    padded = torch.zeros(ranks * part, dtype=t.dtype, device="cpu")
    padded[: t.numel()].copy_(t)
    theirs = yield Swap(padded)
    summed = theirs.view(ranks, part).sum(0, dtype=torch.float32)
    narrow = summed.to(t.dtype)
    for to, values in zip(out.split(part), (yield Gather(narrow)), strict=False):
        to.copy_(values[: to.numel()]).mul_(factor)
    start = min(rank * part, t.numel())
    return RoundingLoss(start, summed.sub_(narrow)[: t.numel() - start])
