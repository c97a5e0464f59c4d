"""Copies between host and device, through pinned memory.

[Note: streams for copies alone] A loop has two streams on each device, one for each direction. Only copies that can
begin immediately are queued there, since all work that they need is finished. So no copy there waits for another
operation, which may wait for this one on another rank.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from weakref import finalize

import torch
from torch import Tensor

from aiodist.errors import AiodistError, BackendError
from aiodist.handles import LARGE_BYTES, Done, Progress
from aiodist.handles.tracing import rank_of_task, tracing
from aiodist.streams.current import OnStream
from aiodist.streams.events import Events

Reached = Callable[[torch.cuda.Event], None]
Copies = Sequence[tuple[Tensor, Tensor]]
"""(into, from) each, of equal dtype and number of elements."""

PINNED_BYTES = 64 << 20
"""Most pinned memory of a loop's buffers, in bytes."""

_as_it_is = nullcontext()


class _Pinned:
    """Count of pinned bytes of a loop's buffers. The buffers keep only this object of the loop."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.RLock()  # the garbage collector may call `add` inside

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


class Staging:
    """Copies of one loop between host and devices. `Staging.of(progress)` returns the object.

    Methods that copy raise nothing. They call `finish` once, with the error or None, after the last use of the tensors.
    The caller keeps the tensors until then. A host's tensor that is not pinned, or not dense, is copied through pinned
    memory: at the call if the device is the target, otherwise at the end.
    """

    piece_bytes = 2 << 20
    """Bytes of a message that pass through pinned memory at a time, the same on all ranks."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.events = Events.of(progress)
        self._streams: dict[tuple[bool, int], torch.cuda.Stream] = {}
        self._pins = True
        self._pinned = _Pinned()

    @classmethod
    def of(cls, progress: Progress) -> Staging:
        """Return the object of a loop, made at first use (any thread)."""
        return progress.own(cls, lambda: cls(progress))

    def buffer(self, nbytes: int) -> Tensor:
        """Return new flat bytes of pinned memory (any thread).

        The memory is ordinary memory beyond `PINNED_BYTES`, or if the host cannot pin memory. Torch reuses a freed
        pinned buffer once no copy uses the buffer.
        """
        with torch.inference_mode(False):
            if self._pins and 0 < nbytes <= PINNED_BYTES - self._pinned.nbytes:
                try:
                    buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                    self._pinned.add(nbytes)
                    finalize(buffer.untyped_storage(), self._pinned.add, -nbytes).atexit = False
                    return buffer
                except RuntimeError as error:
                    self._pins = False
                    text = str(error).strip().partition("\n")[0]
                    warning = f"host memory cannot be pinned, so copies to and from CUDA devices are slower: {text}"
                    # The loop warns, since a warning that is an error must not end a transfer.
                    self.progress.post(partial(warnings.warn, warning, RuntimeWarning))
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def to_host(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream for copies to the host: see the note."""
        return self._stream(device.index, upwards=False)

    def to_device(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream for copies to the device: see the note."""
        return self._stream(device.index, upwards=True)

    def _stream(self, index: int, *, upwards: bool) -> torch.cuda.Stream:
        found = self._streams.get((upwards, index))
        if found is None:
            # Torch has 32 streams of each priority, which all code shares. Little code uses the high priority.
            found = self._streams[upwards, index] = torch.cuda.Stream(device=index, priority=-1)
        return found

    def order(self, stream: torch.cuda.Stream, behind: torch.cuda.Stream) -> None:
        """Order later work of `stream` after the work queued on `behind`. May raise RuntimeError."""
        if stream != behind:
            event = self.events.record(behind)
            stream.wait_event(event)
            # The wait is for this record of the event, which may be recorded again.
            self.events.release(behind.device_index, event)

    def copy(self, into: Tensor, t: Tensor, stream: torch.cuda.Stream, reached: Reached, finish: Done) -> None:
        """Copy `t` into `into`, of equal shape and dtype. At least one is on the device of `stream`.

        As `copies`, but on the loop's thread without the lock. The tensors may have any strides.
        """
        finish = _recorded([(into, t)], finish)
        try:
            over = self._queue([(into, t)], stream, finish)
            event = self.events.record(stream)
        except Exception as error:  # noqa: BLE001  - see the class
            finish(self.told(error, stream))
        else:
            reached(event)
            self.progress.start(partial(self.events.add, stream, event, over))

    def copies(self, pairs: Copies, stream: torch.cuda.Stream, reached: Reached, finish: Done) -> None:
        """Queue copies between the host and the device of `stream` (any thread, transport lock held).

        Call `reached(event)` when all copies are queued. Later work of `stream` finds them finished, as does code on
        the device that waits for `event`. `finish` is called with the lock held too.
        """
        finish = _recorded(pairs, finish)
        try:
            event = self.events.watch(stream, self._queue(pairs, stream, finish))
        except Exception as error:  # noqa: BLE001  - see the class
            finish(self.told(error, stream))
        else:
            reached(event)

    def _queue(self, pairs: Copies, stream: torch.cuda.Stream, finish: Done) -> Done:
        """Queue copies, and return a function to be called when the device has made them."""
        after: list[tuple[Tensor, Tensor]] = []
        """Copies for the host to make then."""
        kept: list[Tensor] = []
        with OnStream(stream):
            for into, t in pairs:
                if into.is_cpu and not _is_direct(into):
                    after.append((into, self._dense(into)))
                    _copy(after[-1][1], t.resolve_conj().resolve_neg())
                    continue
                if t.is_cpu and not _is_direct(t):
                    dense = self._dense(t)
                    _copy(dense, t)
                    t = dense
                kept.append(t)
                _copy(into, t if t.is_cpu else t.resolve_conj().resolve_neg())
        if sum(into.nbytes for into, _ in after) >= LARGE_BYTES:
            finish = self.progress.counted(finish)  # the host's copies take long, so the loop must not make them
        return partial(_over, (pairs, kept), after, finish)

    def _dense(self, like: Tensor) -> Tensor:
        return self.buffer(like.nbytes).view(like.dtype).view(like.shape)

    def told(self, error: Exception, stream: torch.cuda.Stream) -> Exception:
        """Return the error of a copy on `stream` as an `AiodistError`, if torch raised it."""
        if isinstance(error, AiodistError) or not isinstance(error, RuntimeError):
            return error
        failure = BackendError(f"a copy on {stream.device} failed: {error}")
        failure.__cause__ = error
        return failure


def _is_direct(t: Tensor) -> bool:
    """Return True if the device can copy from or to a host's tensor without a pinned copy."""
    return not t.numel() or (t.is_pinned() and t.is_contiguous() and not t.is_conj() and not t.is_neg())


def _writable(t: Tensor) -> AbstractContextManager[object]:
    return torch.inference_mode() if t.is_inference() else _as_it_is


def _copy(into: Tensor, t: Tensor) -> None:
    if t.numel():
        with _writable(into):
            into.detach().copy_(t.detach(), non_blocking=True)


def _over(keep: object, after: Copies, finish: Done, error: BaseException | None) -> None:
    """Make the host's copies, then call `finish`. `keep` stays alive until then."""
    if error is None:
        try:
            for into, t in after:
                _copy(into, t)
        except Exception as raised:  # noqa: BLE001  - the error belongs to the task that awaits the copy
            error = raised
    finish(error)


def _recorded(pairs: Copies, finish: Done) -> Done:
    """Return `finish`, which also adds the copies to a trace if one is recorded."""
    if tracing.to is None:
        return finish
    into, t = pairs[0]
    name = "copy to host" if into.is_cpu else "copy to device" if t.is_cpu else "copy on device"
    return partial(_copied, name, perf_counter(), sum(t.nbytes for _, t in pairs), rank_of_task.get(), finish)


def _copied(name: str, began: float, nbytes: int, rank: int | None, finish: Done, error: BaseException | None) -> None:
    if (trace := tracing.to) is not None:
        trace.span(name, began, track="copies", of_rank=rank, bytes=nbytes)
    finish(error)
