"""CUDA events: reused, and asked whether they are over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch

from aiodist.errors import BackendError
from aiodist.handles import Progress
from aiodist.streams.capture import Uncaptured, spoiled

Then = Callable[[BaseException | None], None]

_PAUSE_SECONDS = 5e-6  # between two looks at the driver: each takes its lock, which threads that launch kernels need
_COMPUTING_PAUSE_SECONDS = 50e-6  # the same while a compute thread launches kernels
_OTHERS_AT_ONCE = 16  # of others' events, of which nobody knows the order


class _Watched(NamedTuple):
    event: torch.cuda.Event
    then: Then
    device: int | None
    """Where it goes back to when it is over; None for one that is not ours."""


_Ended = tuple[_Watched, BackendError | None]
"""An event that is over, and what its device failed with."""


class Events:
    """All CUDA events that one loop waits for, and those that are free to record; get it with `Events.of(progress)`.

    Events of one queue end in order, so each pass asks about the oldest of each queue alone. An event goes back to
    the pool when it is over, and is never destroyed while the loop runs: that may wait for the device. No Python runs
    in a callback of CUDA: it would want the GIL while CUDA holds its own lock.
    """

    rings = False

    def __init__(self, progress: Progress) -> None:
        self.when_lost: list[Callable[[], None]] = []
        """Called once, when a device is found to be lost."""
        self._progress = progress
        self._free: dict[int, list[torch.cuda.Event]] = {}
        self._queues: dict[tuple[int, int, bool], deque[_Watched]] = {}
        """By device, stream, and whether it was recorded before it came here: others may have overtaken it."""
        self._others: deque[_Watched] = deque()
        self._count = 0
        self._looked = 0.0
        progress.add_poller(self)

    @classmethod
    def of(cls, progress: Progress) -> Events:
        """Return those of a loop, made at first use."""
        return progress.own(cls, partial(cls, progress))

    def __len__(self) -> int:
        return self._count

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Return an event that is over when all that was queued on `stream` is; from any thread."""
        free = self._free.setdefault(stream.device_index, [])
        try:
            event = free.pop()
        except IndexError:
            event = torch.cuda.Event()
        event.record(stream)
        return event

    def release(self, device: int, event: torch.cuda.Event) -> None:
        """Let `event`, of `record`, be used again: nobody looks at it any more; from any thread."""
        self._free.setdefault(device, []).append(event)

    def add(self, stream: torch.cuda.Stream, event: torch.cuda.Event, then: Then) -> None:
        """Call `then(None)` when `event`, which `record` returned for `stream`, is over, or `then(error)`.

        As `watch` for a caller without the lock: it records, and leaves this to `Progress.start`. Events of one stream
        come here in the order of recording. This one is reused once `then` was called.
        """
        self._queue(stream, _Watched(event, then, stream.device_index), late=True)

    def add_other(self, event: torch.cuda.Event, then: Then) -> None:
        """Call `then(None)` when `event`, which is somebody else's, is over, or `then(error)`; with the lock held."""
        self._others.append(_Watched(event, then, None))
        self._count += 1
        self._progress.offloaded += 1

    def watch(self, stream: torch.cuda.Stream, then: Then) -> torch.cuda.Event:
        """Call `then(None)` when all that was queued on `stream` is over, or `then(error)` where the device failed.

        With the transport lock held, now and then. Returns the event, which is reused once `then` was called.
        """
        event = self.record(stream)
        self._queue(stream, _Watched(event, then, stream.device_index), late=False)
        return event

    def _queue(self, stream: torch.cuda.Stream, watched: _Watched, *, late: bool) -> None:
        self._queues.setdefault((stream.device_index, stream.cuda_stream, late), deque()).append(watched)
        self._count += 1
        self._progress.offloaded += 1

    def poll(self, until: float = 0.0) -> bool:
        """See `Poller`; one pass, and not too soon after the last one."""
        now = perf_counter()
        if now - self._looked < (_COMPUTING_PAUSE_SECONDS if self._progress.computing else _PAUSE_SECONDS):
            return False
        self._looked = now
        if not self._count:
            return False
        with Uncaptured():  # what is called may make room, or pin it
            ended = self._ended()
            self._count -= len(ended)
            self._progress.offloaded -= len(ended)
            for (event, then, device), error in ended:
                if error is not None:
                    self._tell_lost()
                try:
                    then(error)
                except Exception as raised:  # noqa: BLE001  - those behind it must still be told
                    self._progress.report(f"{then!r} failed: what waits for it is never done", raised)
                if error is None and device is not None:
                    self.release(device, event)
        return bool(ended)

    def _ended(self) -> list[_Ended]:
        ended: list[_Ended] = []
        for key in list(self._queues):
            queue = self._queues[key]
            while queue and (outcome := _asked(queue[0])) is not None:
                ended.append(outcome)
                queue.popleft()
            if not queue:
                del self._queues[key]
        for _ in range(min(len(self._others), _OTHERS_AT_ONCE)):
            other = self._others.popleft()
            if (outcome := _asked(other)) is None:
                self._others.append(other)
            else:
                ended.append(outcome)
        return ended

    def lost(self, raised: RuntimeError) -> BackendError:
        """Return the error for those who wait for the device that raised this: it is lost."""
        self._tell_lost()
        return failed(raised)

    def _tell_lost(self) -> None:
        while self.when_lost:
            self.when_lost.pop()()


def _asked(watched: _Watched) -> _Ended | None:
    try:
        return (watched, None) if watched.event.query() else None
    except RuntimeError as raised:
        return None if spoiled(raised) else (watched, failed(raised))


def failed(raised: RuntimeError) -> BackendError:
    """Return what CUDA raised as one of ours."""
    error = BackendError(f"the CUDA device failed: {raised}")  # it is lost: every event of it says so
    error.__cause__ = raised
    return error


def idle(stream: torch.cuda.Stream) -> bool:
    """Return True where all that was queued on `stream` is over: there is nothing to record or to wait for.

    This asks the driver, not the device: an event, on a stream that is empty too, is over only when this process has
    its turn on a device that several share. False where the device failed: an event tells how.
    """
    with Uncaptured():
        try:
            return stream.query()
        except RuntimeError:
            return False
