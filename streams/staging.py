"""Copies between host and device, in pinned pieces where the host's memory is not pinned.

[Note: streams for copies alone] A loop has two streams on each device, one for each direction, on which nothing is
queued but copies that can begin at once: all that they depend on is known to be over. So no copy there waits for
another operation, whose turn may come only when this one is over on some other rank, and a piece of pinned memory that
is out comes back soon.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from aiodist.errors import AiodistError, BackendError
from aiodist.handles import LARGE_BYTES, Done, Progress, join
from aiodist.handles.tracing import rank_of_task, tracing
from aiodist.streams.capture import Uncaptured, spoiled
from aiodist.streams.current import OnStream
from aiodist.streams.events import Events
from aiodist.streams.memory import bytes_of
from aiodist.streams.pinned import PinnedPool

Reached = Callable[[torch.cuda.Event], None]
Copies = Sequence[tuple[Tensor, Tensor]]
"""(into, from) each, of equal dtype and number of elements."""

_ON_THEIR_WAY = 3  # pieces of one copy: while the device copies one, the host fills or empties another
_as_it_is = nullcontext()


class Staging:
    """What one loop copies between host and devices; get it with `Staging.of(progress)`.

    Methods that copy raise nothing: errors reach `finish`, which is called once, when nothing touches the tensors any
    more. The caller keeps the tensors until then.
    """

    def __init__(self, progress: Progress, pool: PinnedPool | None = None) -> None:
        self.progress = progress
        self.events = Events.of(progress)
        self.pool = PinnedPool(warn=self._warn) if pool is None else pool
        self._streams: dict[tuple[bool, int], torch.cuda.Stream] = {}
        self._passing: dict[tuple[int, int], set[object]] = {}
        """Of each stream, by device and number, the copies that are still to be queued."""
        self.events.when_lost.append(self.pool.leak)

    @classmethod
    def of(cls, progress: Progress) -> Staging:
        """Return that of a loop, made at first use; from any thread."""
        return progress.own(cls, lambda: cls(progress))

    @property
    def piece_bytes(self) -> int:
        """How much passes through pinned memory at a time; the same on all ranks."""
        return self.pool.piece_bytes

    def _warn(self, message: str) -> None:
        # On the loop: where warnings are errors, they must not end a transfer.
        self.progress.post(partial(warnings.warn, message, RuntimeWarning))

    def to_host(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream for copies to the host that can begin at once, and nothing else: see the note."""
        return self._stream(device.index, upwards=False)

    def to_device(self, device: torch.device) -> torch.cuda.Stream:
        """Return the same for copies to the device."""
        return self._stream(device.index, upwards=True)

    def _stream(self, index: int, *, upwards: bool) -> torch.cuda.Stream:
        found = self._streams.get((upwards, index))
        if found is None:
            # Of the pool of high priority, which few use: in the other one torch deals 32 streams in turn to everybody.
            found = self._streams[upwards, index] = torch.cuda.Stream(device=index, priority=-1)
        return found

    def order(self, stream: torch.cuda.Stream, behind: torch.cuda.Stream) -> None:
        """Let what is queued on `stream` from now on begin after what `behind` has queued; may raise RuntimeError."""
        if stream != behind:
            event = self.events.record(behind)
            stream.wait_event(event)
            # What is waited for is what was recorded by now: the event may be recorded anew.
            self.events.release(behind.device_index, event)

    def copy(self, into: Tensor, t: Tensor, stream: torch.cuda.Stream, reached: Reached, finish: Done) -> None:
        """Copy `t` into `into`, of equal shape and dtype, of which at least one lies on the device of `stream`.

        As `copies`, but on the loop's thread and without the lock: what the device copies by itself is queued when
        this returns. Tensors may have any strides: what goes from one memory to another goes through a dense copy.
        """
        after: list[tuple[Tensor, Tensor]] = []
        finish = _recorded([(into, t)], finish)
        try:
            into, t = into.detach(), t.detach()
            with Uncaptured(), OnStream(stream):
                if into.is_cpu is not t.is_cpu:
                    t = t.resolve_conj().resolve_neg().contiguous()
                    if not into.is_contiguous() or into.is_conj() or into.is_neg():
                        dense = torch.empty(into.shape, dtype=into.dtype, device=into.device)
                        if into.is_cpu:
                            finish = partial(_spread, into, dense, finish)
                        else:
                            after.append((into, dense))
                        into = dense
                if direct := _is_direct(into, t):
                    for pair in (into, t), *after:
                        _copy(*pair)
            event = self.events.record(stream) if direct else None
        except Exception as error:  # noqa: BLE001  - see the class
            finish(self.told(error, stream))
            return
        if event is None:
            self._pass(_Transfer(self, [(into, t)], after, stream, reached, finish))
        else:
            reached(event)
            over = partial(_over, (into, t, after), finish)
            self.progress.start(partial(self.events.add, stream, event, over))

    def _pass(self, transfer: _Transfer) -> None:
        """Start a copy that is queued later."""
        passing = self._passing.setdefault(_key(transfer.stream), set())
        passing.add(transfer)
        transfer.on_queued = partial(passing.discard, transfer)
        self.progress.start(transfer.start)

    def passing(self, stream: torch.cuda.Stream) -> bool:
        """Return True while a `copy` on `stream` is still to be queued: what is queued now would come before it."""
        return bool(self._passing.get(_key(stream)))

    def copies(self, pairs: Copies, stream: torch.cuda.Stream, reached: Reached, finish: Done) -> None:
        """Make these copies between the host and the device of `stream`, behind what that has queued.

        With the transport lock held, from any thread, as is `finish`. All go one way, between contiguous tensors. From
        and to pinned memory they are queued on `stream`; else they begin when it comes there, in pieces.
        `reached(event)` is called when all is queued, and `event` is what ends it; what `stream` queues from then on
        finds it done.
        """
        _Transfer(self, pairs, (), stream, reached, _recorded(pairs, finish)).start()

    def told(self, error: Exception, stream: torch.cuda.Stream) -> Exception:
        """Return `error` of a copy on `stream` as one of ours."""
        if isinstance(error, AiodistError) or not isinstance(error, RuntimeError):
            return error
        if isinstance(error, torch.AcceleratorError) and not spoiled(error):
            self.events.lost(error)
        told = BackendError(f"a copy on {stream.device} failed: {error}")
        told.__cause__ = error
        return told


class _Transfer:
    """The copies of one call."""

    def __init__(
        self,
        staging: Staging,
        pairs: Copies,
        after: Copies,
        stream: torch.cuda.Stream,
        reached: Reached,
        finish: Done,
    ) -> None:
        """`after` are copies within the device, when the others are over."""
        self.stream = self._via = stream
        self.on_queued: Callable[[], object] = lambda: None
        """Called when all is queued, or none will be."""
        self._staging = staging
        self._pairs = pairs
        self._after = after
        self._reached = reached
        self._finish = finish
        self._error: BaseException | None = None

    def start(self) -> None:
        try:
            with Uncaptured():
                if not all(_is_direct(into, t) for into, t in self._pairs):
                    self._staging.events.watch(self.stream, self._pass)
                    return
                with OnStream(self.stream):
                    for into, t in self._pairs:
                        _copy(into, t)
        except Exception as error:  # noqa: BLE001  - see `Staging`
            self._fail(error)
        else:
            self._all_queued()

    def _pass(self, error: BaseException | None) -> None:
        """All that was queued before is over: begin with the pieces."""
        if error is not None:
            self._end(error)
            return
        try:
            staging, pairs = self._staging, [(bytes_of(into), bytes_of(t)) for into, t in self._pairs]
            self._via = staging._stream(self.stream.device_index, upwards=pairs[0][1].is_cpu)
            pinned = staging.pool.has_pieces()
        except Exception as raised:  # noqa: BLE001
            self._fail(raised)
            return
        if sum(t.nbytes for _, t in pairs) >= LARGE_BYTES:
            self._finish = staging.progress.counted(self._finish)  # the host copies for long: not on the loop
        passed = join(len(pairs), self._all_passed)
        for into, t in pairs:
            _Passage(staging, into, t, self._via, passed, pinned=pinned).advance()

    def _all_passed(self, error: BaseException | None) -> None:
        self._error = error
        self._all_queued()

    def _all_queued(self) -> None:
        try:
            if self._error is None and self._after:
                with OnStream(self._via):
                    for into, t in self._after:
                        _copy(into, t)
            self._staging.order(self.stream, self._via)
            event = self._staging.events.watch(self._via, self._over)
        except Exception as error:  # noqa: BLE001
            self._fail(error)
        else:
            self.on_queued()
            self._reached(event)

    def _over(self, error: BaseException | None) -> None:
        self._pairs = self._after = ()
        self._finish(self._error or error)

    def _fail(self, error: Exception) -> None:
        self._end(self._staging.told(error, self.stream))

    def _end(self, error: BaseException) -> None:
        self.on_queued()
        self._finish(error)


class _Passage:
    """One copy between a device and pageable memory, through pinned pieces; `via` is a stream for copies alone.

    `done` when all is queued on the way to the device, when all is there on the way to the host. Where no memory can be
    `pinned` the host waits for each piece, which has nothing to wait for.
    """

    def __init__(
        self, staging: Staging, into: Tensor, t: Tensor, via: torch.cuda.Stream, done: Done, *, pinned: bool
    ) -> None:
        self._staging = staging
        self._pool = staging.pool
        self._into, self._t = into, t
        self._via = via
        self._done = done
        self._most = _ON_THEIR_WAY if pinned else 1
        self._pinned = pinned
        self._upwards = t.is_cpu
        self._next = 0
        self._out = 0
        self._asked = self._ended = False
        self._error: BaseException | None = None

    def advance(self) -> None:
        """Send pieces on their way, as many as there are and may be."""
        while self._error is None and self._next < self._t.nbytes and self._out < self._most and not self._asked:
            piece = self._pool.piece(self._given) if self._pinned else None
            self._asked = self._pinned and piece is None
            if not self._asked:
                self._send(piece)
        all_queued = self._error is None and self._next == self._t.nbytes
        if not self._ended and not self._asked and (self._out == 0 or (self._upwards and all_queued)):
            self._ended = True
            self._done(self._error)

    def _given(self, piece: Tensor) -> None:
        self._asked = False
        if self._error is None:
            self._send(piece)
        else:
            self._pool.release_piece(piece)
        self.advance()

    def _send(self, piece: Tensor | None) -> None:
        begin = self._next
        end = self._next = min(begin + self._staging.piece_bytes, self._t.nbytes)
        into, t = self._into[begin:end], self._t[begin:end]
        pinned = None if piece is None else piece[: end - begin]
        try:
            if pinned is not None and self._upwards:
                _copy(pinned, t)
            with OnStream(self._via):
                if pinned is None:
                    _copy(into, t, non_blocking=False)
                elif self._upwards:
                    _copy(into, pinned)
                else:
                    _copy(pinned, t)
            # Also where it is over: others shall have their turn.
            self._staging.events.watch(self._via, partial(self._passed, piece, begin, end))
        except Exception as error:  # noqa: BLE001
            self._error = self._error or self._staging.told(error, self._via)
            if piece is not None:
                self._pool.release_piece(piece)
        else:
            self._out += 1

    def _passed(self, piece: Tensor | None, begin: int, end: int, error: BaseException | None) -> None:
        self._out -= 1
        self._error = self._error or error
        if piece is not None:
            if not self._upwards and self._error is None:
                _copy(self._into[begin:end], piece[: end - begin])
            self._pool.release_piece(piece)
        self.advance()


def _is_direct(into: Tensor, t: Tensor) -> bool:
    """Return True where the device copies by itself."""
    if into.is_cpu:
        return not into.nbytes or into.is_pinned()
    return not t.is_cpu or not t.nbytes or t.is_pinned()


def _writable(t: Tensor) -> AbstractContextManager[object]:
    return torch.inference_mode() if t.is_inference() else _as_it_is


def _copy(into: Tensor, t: Tensor, *, non_blocking: bool = True) -> None:
    if t.numel():  # else there is nothing to queue
        with _writable(into):
            into.detach().copy_(t.detach(), non_blocking=non_blocking)


def _spread(into: Tensor, dense: Tensor, finish: Done, error: BaseException | None) -> None:
    """Give the elements of a dense copy their places."""
    if error is None:
        try:
            _copy(into, dense)
        except Exception as raised:  # noqa: BLE001
            error = raised
    finish(error)


def _recorded(pairs: Copies, finish: Done) -> Done:
    """Return `finish`, which also tells a trace of the copies that begin now."""
    if tracing.to is None:
        return finish
    into, t = pairs[0]
    name = "copy to host" if into.is_cpu else "copy to device" if t.is_cpu else "copy on device"
    return partial(_copied, name, perf_counter(), sum(t.nbytes for _, t in pairs), rank_of_task.get(), finish)


def _copied(name: str, began: float, nbytes: int, rank: int | None, finish: Done, error: BaseException | None) -> None:
    if (trace := tracing.to) is not None:
        trace.span(name, began, track="copies", of_rank=rank, bytes=nbytes)
    finish(error)


def _over(keep: object, finish: Done, error: BaseException | None) -> None:
    """Finish, with `keep` alive until then."""
    finish(error)


def _key(stream: torch.cuda.Stream) -> tuple[int, int]:
    return stream.device_index, stream.cuda_stream
