"""CUDA events, reused and polled; and fences, which mark where on a device an operation ends."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from aiodist.errors import BackendError
from aiodist.handles import Handle, Progress
from aiodist.streams.current import captures, check_not_capturing, stream_key
from aiodist.streams.host import HostStream

Then = Callable[[BaseException | None], None]

_MOST_STREAMS = 256
_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 5e-6  # between two looks at the driver: each takes its lock, which threads that launch kernels need
_COMPUTING_PAUSE_SECONDS = 50e-6  # the same while a compute thread launches kernels


class _Watched(NamedTuple):
    event: torch.cuda.Event
    then: Then
    device: int | None
    """Where it goes back to when it is over; None for one that is not ours."""


class Events:
    """All CUDA events that one loop waits for, and those that are free to record; get it with `Events.of(progress)`.

    Events of one queue end in order, so each pass asks about the oldest of each queue alone. An event goes back to
    the pool when it is over, and is never destroyed while the loop runs: that may wait for the device. No Python runs
    in a callback of CUDA: it would want the GIL while CUDA holds its own lock.
    """

    rings = False

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.free: dict[int, list[torch.cuda.Event]] = {}
        self._streams: dict[object, torch.cuda.Stream] = {}
        """By torch's number, device and kind of each, which are those of no other."""
        self._queues: dict[object, deque[_Watched]] = {}
        """By device, stream, and whether it was recorded before it came here: others may have overtaken it."""
        self._count = 0
        self.looked = 0.0
        progress.add_poller(self)

    @classmethod
    def of(cls, progress: Progress) -> Events:
        """Return those of a loop, made at first use."""
        return progress.own(cls, partial(cls, progress))

    def __len__(self) -> int:
        return self._count

    def issuing_stream(self, device: int) -> torch.cuda.Stream:
        """Return the calling thread's current stream of `device`, which torch has opened.

        Raises RuntimeError while it captures a CUDA graph.
        """
        if captures(device):
            check_not_capturing(device)
        key = stream_key(device)
        found = self._streams.get(key)  # torch makes an object each time
        if found is None:
            if len(self._streams) >= _MOST_STREAMS:
                self._streams.clear()
            found = self._streams[key] = torch.cuda.current_stream(device)
        return found

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event that is over when all that was queued on `stream` is; from any thread."""
        free = self.free.setdefault(stream.device_index, [])
        try:
            event = free.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(stream)
        return event

    def release(self, device: int, event: torch.cuda.Event) -> None:
        """Let `event`, of `record`, be used again: nobody looks at it any more; from any thread."""
        self.free.setdefault(device, []).append(event)

    def add(self, stream: torch.cuda.Stream, event: torch.cuda.Event, then: Then) -> None:
        """Call `then(None)` when `event`, which `record` returned for `stream`, is over, or `then(error)`.

        As `watch` for a caller without the lock: it records, and leaves this to `Progress.start`. Events of one stream
        come here in the order of recording. This one is reused once `then` was called.
        """
        key = stream.device_index, stream.cuda_stream, "late"
        self._queue(key, _Watched(event, then, stream.device_index))

    def add_other(self, event: torch.cuda.Event, then: Then) -> None:
        """Call `then(None)` when `event`, which is somebody else's, is over, or `then(error)`; with the lock held."""
        self._queue(object(), _Watched(event, then, None))

    def watch(self, stream: torch.cuda.Stream, then: Then) -> torch.cuda.Event:
        """Call `then(None)` when all that was queued on `stream` is over, or `then(error)` where the device failed.

        With the transport lock held, now and then. Returns the event, which is reused once `then` was called.
        """
        event = self.record(stream)
        self._queue((stream.device_index, stream.cuda_stream), _Watched(event, then, stream.device_index))
        return event

    def _queue(self, key: object, watched: _Watched) -> None:
        self._queues.setdefault(key, deque()).append(watched)
        self._count += 1
        self._progress.offloaded += 1

    def poll(self, until: float = 0.0) -> bool:
        """See `Poller`; one pass, and not too soon after the last one."""
        now = perf_counter()
        if now - self.looked < (_COMPUTING_PAUSE_SECONDS if self._progress.computing else _PAUSE_SECONDS):
            return False
        self.looked = now
        return self.look()

    def look(self) -> bool:
        """Make one pass now; with the transport lock held."""
        ended = self._ended() if self._count else []
        self._count -= len(ended)
        self._progress.offloaded -= len(ended)
        for (event, then, device), error in ended:
            try:
                then(error)
            except Exception as raised:  # noqa: BLE001  - those behind it must still be told
                self._progress.report(f"{then!r} failed: what waits for it is never done", raised)
            if error is None and device is not None:
                self.release(device, event)
        return bool(ended)

    def _ended(self) -> list[tuple[_Watched, BackendError | None]]:
        """Return the events that are over, each with what its device failed with."""
        ended: list[tuple[_Watched, BackendError | None]] = []
        for key, queue in list(self._queues.items()):
            while queue:
                try:
                    if not queue[0].event.query():
                        break
                    error = None
                except RuntimeError as raised:
                    error = device_error(raised)
                ended.append((queue.popleft(), error))
            if not queue:
                del self._queues[key]
        return ended


class Fence:
    """What `handle.wait_stream` orders streams behind: made at the issue, `reached` when all of it is queued."""

    __slots__ = ("_device", "_event", "_progress", "_queued", "_waiter")

    def __init__(self, progress: Progress, device: torch.device) -> None:
        self._progress = progress
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._queued = False
        self._waiter: threading.Event | None = None
        """Of the thread that waits for `_queued`: written before it looks there, read after that is written."""

    def reached(self, event: torch.cuda.Event | None) -> None:
        """All of the operation is queued, and over with `event`; None: it is over, or failed."""
        self._event = event
        self._queued = True
        if self._waiter is not None:
            self._waiter.set()

    def look(self) -> bool:
        """See `aiodist.handles.Fence`."""
        event = self._event
        try:
            return event is not None and event.query() and Events.of(self._progress).look()
        except RuntimeError:  # the device failed, and each pass tells of that
            return False

    def order(self, stream: Any, handle: Handle[Any], /) -> None:  # noqa: ANN401
        """See `aiodist.handles.Fence`."""
        check_not_capturing(self._device.index)
        if isinstance(stream, HostStream):  # the host waits there
            stream.wait_handle(handle)
            return
        if not self._queued:
            self._await_queued(handle)
        event = self._event  # it may be over just now
        if event is not None:
            ordered = torch.cuda.current_stream(self._device) if stream is None else getattr(stream, "stream", stream)
            ordered.wait_event(event)

    def _await_queued(self, handle: Handle[Any]) -> None:
        if not self._progress.owns_thread():
            self._waiter = waiter = threading.Event()  # another thread that waits sees it at its next look
            # An operation that was given up is never queued, nor one whose loop is gone.
            while not (self._queued or handle.done() or self._progress.loop.is_closed()):
                waiter.wait(_LOOK_SECONDS)
            return
        # It may only be waiting for the holder of the lock to come round to it.
        self._progress.with_lock(self._progress.make_calls)
        if not self._queued:
            raise RuntimeError(
                f"{handle} goes by way of the host, which still has to begin a part of it, once the ranks "
                "agree: await it, or call wait_stream() in another thread, which then waits for that part"
            )


def device_error(raised: RuntimeError) -> BackendError:
    """Return what CUDA raised as one of ours: the device is lost, and every event of it says so."""
    error = BackendError(f"the CUDA device failed: {raised}")
    error.__cause__ = raised
    return error


def idle(stream: torch.cuda.Stream) -> bool:
    """Return True where all that was queued on `stream` is over: there is nothing to record or to wait for.

    This asks the driver, not the device: an event, on a stream that is empty too, is over only when this process has
    its turn on a device that several share. False where the device failed: an event tells how.
    """
    try:
        return stream.query()
    except RuntimeError:
        return False
