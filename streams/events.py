"""CUDA events: reused, and asked whether they are over (S2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from aiodist.errors import BackendError
from aiodist.handles import Progress
from aiodist.streams.capture import Uncaptured, spoiled

__all__ = ["PENDING", "Events", "Pending", "asked"]

Then = Callable[[BaseException | None], None]

_PAUSE_SECONDS = 5e-6  # between two looks at the driver: each takes its lock, which whoever launches kernels needs
_COMPUTING_PAUSE_SECONDS = 50e-6  # the same while a compute thread launches kernels


class Events:
    """All CUDA events that one loop waits for, and those that are free to record; get it with `Events.of(progress)`.

    Events of one queue end in order, so each pass asks about the oldest of each queue alone. An event goes back to
    the pool when it is over, and is never destroyed while the loop runs: that may wait for the device. No Python runs
    in a callback of CUDA: it would want the GIL while CUDA holds its own lock.
    """

    rings = False

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._free: dict[int, list[torch.cuda.Event]] = {}
        self._queues: dict[tuple[int, int], deque[tuple[torch.cuda.Event, Then]]] = {}
        self._count = 0
        self._looked = 0.0
        progress.add_poller(self)

    @classmethod
    def of(cls, progress: Progress) -> Events:
        """Return those of a loop, made at first use."""
        found: Any = progress.belongings.get(cls)
        if found is None:
            found = progress.belongings[cls] = cls(progress)
        return found  # type: ignore[no-any-return]

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

    def give_back(self, device: int, event: torch.cuda.Event) -> None:
        """Let `event`, of `record`, be used again: nobody looks at it any more; from any thread."""
        self._free.setdefault(device, []).append(event)

    def watch(self, stream: torch.cuda.Stream, then: Then) -> torch.cuda.Event:
        """Call `then(None)` when all that was queued on `stream` is over, or `then(error)` where the device failed.

        With the transport lock held, now and then. Returns the event, which is reused once `then` was called.
        """
        event = self.record(stream)
        queue = self._queues.setdefault((stream.device_index, stream.cuda_stream), deque())
        queue.append((event, then))
        self._count += 1
        self._progress.working += 1
        return event

    def poll(self, until: float = 0.0) -> bool:
        """See `Poller`; one pass, and not too soon after the last one."""
        now = perf_counter()
        if now - self._looked < (_COMPUTING_PAUSE_SECONDS if self._progress.computing else _PAUSE_SECONDS):
            return False
        self._looked = now
        ended: list[tuple[int, torch.cuda.Event, Then, BackendError | None]] = []
        if not self._count:
            return False
        with Uncaptured():
            for key in list(self._queues):
                queue = self._queues[key]
                while queue and not isinstance(outcome := asked(queue[0][0]), Pending):
                    ended.append((key[0], *queue.popleft(), outcome))
                if not queue:
                    del self._queues[key]
        self._count -= len(ended)
        self._progress.working -= len(ended)
        for device, event, then, error in ended:
            then(error)
            if error is None:
                self.give_back(device, event)
        return bool(ended)


class Pending:
    """An event that is not over."""


PENDING = Pending()


def asked(event: torch.cuda.Event) -> BackendError | Pending | None:
    """Return None where `event` is over, and what its device failed with."""
    try:
        return None if event.query() else PENDING
    except RuntimeError as raised:
        if spoiled(raised):
            return PENDING
        error = BackendError(f"the CUDA device failed: {raised}")  # it is lost: every event of it says so
        error.__cause__ = raised
        return error
