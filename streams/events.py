"""CUDA events, reused and polled, and fences."""

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
_PAUSE_SECONDS = 5e-6  # between two calls of the driver, which takes a lock that threads need to launch kernels
_COMPUTING_PAUSE_SECONDS = 50e-6  # the same while a compute thread launches kernels


class _Watched(NamedTuple):
    event: torch.cuda.Event
    then: Then
    device: int | None
    """Device that takes a complete event back, or None for an event of other code."""


class Events:
    """All CUDA events that one loop waits for, and a pool of free events. `Events.of(progress)` returns the object.

    Events of one queue complete in order, so each pass queries the oldest event of each queue. A complete event returns
    to the pool. No event is destroyed while the loop runs, since this may wait for the device. No callback of CUDA runs
    Python, which would need the GIL while CUDA holds its own lock.
    """

    rings = False

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.free: dict[int, list[torch.cuda.Event]] = {}
        self._streams: dict[object, torch.cuda.Stream] = {}
        """Streams by torch's number, device and kind, which are unique together."""
        self._queues: dict[object, deque[_Watched]] = {}
        """Events to poll, by device and stream, with "late" for events that were recorded before they were queued."""
        self._count = 0
        self.looked = 0.0
        progress.add_poller(self)

    @classmethod
    def of(cls, progress: Progress) -> Events:
        """Return the object of a loop, made at first use."""
        return progress.own(cls, partial(cls, progress))

    def __len__(self) -> int:
        return self._count

    def issuing_stream(self, device: int) -> torch.cuda.Stream:
        """Return the calling thread's current stream of an open `device`.

        Raises RuntimeError if the stream captures a CUDA graph.
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
        """Return an event that completes after all work queued on `stream` (any thread)."""
        free = self.free.setdefault(stream.device_index, [])
        try:
            event = free.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(stream)
        return event

    def release(self, device: int, event: torch.cuda.Event) -> None:
        """Return `event`, which no code queries any more, to the pool (any thread)."""
        self.free.setdefault(device, []).append(event)

    def add(self, stream: torch.cuda.Stream, event: torch.cuda.Event, then: Then) -> None:
        """Call `then(None)` when `event` of `record(stream)` is complete, or `then(error)` (transport lock held).

        A caller without the lock records the event, and lets `Progress.start` make this call. Events of one stream
        come in the order of recording. The event is reused after the call of `then`.
        """
        key = stream.device_index, stream.cuda_stream, "late"
        self._queue(key, _Watched(event, then, stream.device_index))

    def add_other(self, event: torch.cuda.Event, then: Then) -> None:
        """Call `then(None)` when `event` of other code is complete, or `then(error)` (transport lock held)."""
        self._queue(object(), _Watched(event, then, None))

    def watch(self, stream: torch.cuda.Stream, then: Then) -> torch.cuda.Event:
        """Call `then(None)` after all work queued on `stream`, or `then(error)` if the device fails.

        Both calls have the transport lock. Returns the event, which is reused after the call of `then`.
        """
        event = self.record(stream)
        self._queue((stream.device_index, stream.cuda_stream), _Watched(event, then, stream.device_index))
        return event

    def _queue(self, key: object, watched: _Watched) -> None:
        self._queues.setdefault(key, deque()).append(watched)
        self._count += 1
        self._progress.offloaded += 1

    def poll(self, until: float = 0.0) -> bool:
        """Make one pass, but not too soon after the last one: see `Poller`."""
        now = perf_counter()
        if now - self.looked < (_COMPUTING_PAUSE_SECONDS if self._progress.computing else _PAUSE_SECONDS):
            return False
        self.looked = now
        return self.look()

    def look(self) -> bool:
        """Make one pass now (transport lock held)."""
        ended = self._ended() if self._count else []
        self._count -= len(ended)
        self._progress.offloaded -= len(ended)
        for (event, then, device), error in ended:
            try:
                then(error)
            except Exception as raised:  # noqa: BLE001  - the next ones must be called
                self._progress.report(f"{then!r} failed: the operations that wait for it never end", raised)
            if error is None and device is not None:
                self.release(device, event)
        return bool(ended)

    def _ended(self) -> list[tuple[_Watched, BackendError | None]]:
        """Return the complete events, each with the error of its device or None."""
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
    """The point on a device after which `handle.wait_stream` orders streams.

    The issue makes the fence, and `reached` sets the event when all work of the operation is queued.
    """

    __slots__ = ("_device", "_event", "_progress", "_queued", "_waiter")

    def __init__(self, progress: Progress, device: torch.device) -> None:
        self._progress = progress
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._queued = False
        self._waiter: threading.Event | None = None
        """Event of the thread that waits for `_queued`. The thread writes this attribute before it reads `_queued`.

        `reached` writes `_queued` before it reads this attribute.
        """

    def reached(self, event: torch.cuda.Event | None) -> None:
        """Note that all work of the operation is queued, and ends with `event`, or has ended or failed for None."""
        self._event = event
        self._queued = True
        if self._waiter is not None:
            self._waiter.set()

    def look(self) -> bool:
        """See `aiodist.handles.HandleFence`."""
        event = self._event
        try:
            return event is not None and event.query() and Events.of(self._progress).look()
        except RuntimeError:  # the device failed, which each pass reports
            return False

    def order(self, stream: Any, handle: Handle[Any], /) -> None:  # noqa: ANN401
        """See `aiodist.handles.HandleFence`."""
        check_not_capturing(self._device.index)
        if isinstance(stream, HostStream):  # the host waits there
            stream.wait_handle(handle)
            return
        if not self._queued:
            self._await_queued(handle)
        event = self._event  # another thread may set it to None
        if event is not None:
            ordered = torch.cuda.current_stream(self._device) if stream is None else getattr(stream, "stream", stream)
            ordered.wait_event(event)

    def _await_queued(self, handle: Handle[Any]) -> None:
        if not self._progress.owns_thread():
            self._waiter = waiter = threading.Event()  # another waiting thread continues after its next timeout
            # The operation is never queued after an abort, or if its loop was closed.
            while not (self._queued or handle.done() or self._progress.loop.is_closed()):
                waiter.wait(_LOOK_SECONDS)
            return
        # The operation may only wait for the holder of the lock.
        self._progress.with_lock(self._progress.make_calls)
        if not self._queued:
            raise RuntimeError(
                f"the host begins a part of {handle} after the ranks agree: await it, or call wait_stream() in another "
                "thread, which then waits for that part"
            )


def device_error(raised: RuntimeError) -> BackendError:
    """Return a `BackendError` of an error that CUDA raised, as each event of the lost device does."""
    error = BackendError(f"the CUDA device failed: {raised}")
    error.__cause__ = raised
    return error


def idle(stream: torch.cuda.Stream) -> bool:
    """Return True if all work queued on `stream` is finished, so that no event is needed.

    The driver answers without the device. An event completes only when this process has its turn on a shared device,
    also on an empty stream. False if the device failed: an event then raises the error.
    """
    try:
        return stream.query()
    except RuntimeError:
        return False
