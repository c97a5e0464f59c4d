"""Copies between host and device, through pinned memory if the host tensor is not pinned.

[Note: streams for copies alone] A loop has two streams on each device, one for each direction, on which nothing is
queued but copies that can begin at once: all that they depend on is known to be over. So no copy there waits for
another operation, whose turn may come only when this one is over on some other rank.
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
"""How much of a host's memory is pinned for a loop's buffers at a time."""

_as_it_is = nullcontext()


class _Pinned:
    """How many bytes are pinned for a loop's buffers: all that these keep of the loop."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.RLock()  # a collection of garbage may come in between

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


class Staging:
    """What one loop copies between host and devices; get it with `Staging.of(progress)`.

    Methods that copy raise nothing: errors reach `finish`, which is called once, when nothing touches the tensors any
    more. The caller keeps the tensors until then. A host's tensor that is not pinned, or not dense, goes through a
    pinned copy: on its way to the device at the call, on its way to the host at the end.
    """

    piece_bytes = 2 << 20
    """How much of a message passes through pinned memory at a time; the same on all ranks."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.events = Events.of(progress)
        self._streams: dict[tuple[bool, int], torch.cuda.Stream] = {}
        self._pins = True
        self._pinned = _Pinned()

    @classmethod
    def of(cls, progress: Progress) -> Staging:
        """Return that of a loop, made at first use; from any thread."""
        return progress.own(cls, lambda: cls(progress))

    def buffer(self, nbytes: int) -> Tensor:
        """Return new flat bytes of pinned memory, beyond `PINNED_BYTES` or where none can be pinned of ordinary memory.

        From any thread. Torch keeps what was pinned for what is pinned next, and gives it anew only when no copy uses
        it any more.
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
                    told = f"host memory cannot be pinned, so copies to and from CUDA devices are slower: {text}"
                    # On the loop: where warnings are errors, they must not end a transfer.
                    self.progress.post(partial(warnings.warn, told, RuntimeWarning))
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

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

        As `copies`, but on the loop's thread and without the lock. Tensors may have any strides.
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
        """Queue these copies between the host and the device of `stream` there.

        With the transport lock held, from any thread, as is `finish`. `reached(event)` is called when all is queued,
        and `event` is what ends it; what `stream` queues from then on finds it done, on the device.
        """
        finish = _recorded(pairs, finish)
        try:
            event = self.events.watch(stream, self._queue(pairs, stream, finish))
        except Exception as error:  # noqa: BLE001  - see the class
            finish(self.told(error, stream))
        else:
            reached(event)

    def _queue(self, pairs: Copies, stream: torch.cuda.Stream, finish: Done) -> Done:
        """Queue copies; return what is to be called when the device has made them."""
        after: list[tuple[Tensor, Tensor]] = []
        """What the host copies then."""
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
            finish = self.progress.counted(finish)  # the host copies for long: not on the loop
        return partial(_over, (pairs, kept), after, finish)

    def _dense(self, like: Tensor) -> Tensor:
        return self.buffer(like.nbytes).view(like.dtype).view(like.shape)

    def told(self, error: Exception, stream: torch.cuda.Stream) -> Exception:
        """Return `error` of a copy on `stream` as one of ours."""
        if isinstance(error, AiodistError) or not isinstance(error, RuntimeError):
            return error
        told = BackendError(f"a copy on {stream.device} failed: {error}")
        told.__cause__ = error
        return told


def _is_direct(t: Tensor) -> bool:
    """Return True where the device copies from or to a host's tensor by itself."""
    return not t.numel() or (t.is_pinned() and t.is_contiguous() and not t.is_conj() and not t.is_neg())


def _writable(t: Tensor) -> AbstractContextManager[object]:
    return torch.inference_mode() if t.is_inference() else _as_it_is


def _copy(into: Tensor, t: Tensor) -> None:
    if t.numel():  # else there is nothing to queue
        with _writable(into):
            into.detach().copy_(t.detach(), non_blocking=True)


def _over(keep: object, after: Copies, finish: Done, error: BaseException | None) -> None:
    """Finish, with `keep` alive until then, once the host has made its copies."""
    if error is None:
        try:
            for into, t in after:
                _copy(into, t)
        except Exception as raised:  # noqa: BLE001  - it belongs to the task that awaits the copy
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
