"""Where on a CUDA device an operation ends: what `handle.wait_stream` orders streams behind."""

from __future__ import annotations

import threading
from typing import Any

import torch

from aiodist.handles import Handle, Progress
from aiodist.streams.current import check_not_capturing
from aiodist.streams.host import HostStream

_LOOK_SECONDS = 0.05


class Fence:
    """Made when an operation is issued; `reached` when all of it is queued on the device."""

    __slots__ = ("_device", "_event", "_progress", "_queued")

    def __init__(self, progress: Progress, device: torch.device) -> None:
        self._progress = progress
        self._device = device
        self._event: torch.cuda.Event | None = None
        self._queued = threading.Event()

    def reached(self, event: torch.cuda.Event | None) -> None:
        """All of the operation is queued, and over with `event`; None: it is over, or failed."""
        self._event = event
        self._queued.set()

    def order(self, stream: Any, handle: Handle[Any], /) -> None:  # noqa: ANN401
        """See `aiodist.handles.Fence`."""
        check_not_capturing(self._device.index)
        if isinstance(stream, HostStream):  # the host waits there
            stream.wait_handle(handle)
            return
        if not self._queued.is_set():
            self._await_queued(handle)
        event = self._event  # it may be over just now
        if event is not None:
            ordered = torch.cuda.current_stream(self._device) if stream is None else getattr(stream, "stream", stream)
            ordered.wait_event(event)

    def _await_queued(self, handle: Handle[Any]) -> None:
        if not self._progress.owns_thread():
            # An operation that was given up is never queued, nor one whose loop is gone.
            while not self._queued.wait(_LOOK_SECONDS) and not handle.done() and not self._progress.loop.is_closed():
                pass
            return
        # It may only be waiting for the holder of the lock to come round to it.
        self._progress.exclusively(self._progress.called)
        if not self._queued.is_set():
            raise RuntimeError(
                f"{handle} goes by way of the host, which still has to begin a part of it, once the ranks "
                "agree: await it, or call wait_stream() in another thread, which then waits for that part"
            )
