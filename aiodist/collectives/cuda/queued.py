"""Reductions that one call queues on the device, without a separate stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, dtype

from aiodist.backends.base import Done, ours
from aiodist.backends.nccl import NcclCall, NcclGroup, as_numbers, reducer
from aiodist.handles import Progress
from aiodist.streams import Events, Fence
from aiodist.streams.events import device_error, idle
from aiodist.types import ReduceOp


class Queued(Fence):
    """A reduction on a device, and the fence at its end (created on the issuing thread)."""

    __slots__ = ("_done",)
    _done: Done

    def start(self, done: Done) -> None:
        """Queue the reduction, with the transport lock held.

        `done` is called when the device has finished, or with the error.
        """
        raise NotImplementedError

    def _finish(self, error: BaseException | None) -> None:
        self.reached(None)  # the event will be reused
        self._done(error)


Queue = Callable[[Tensor, torch.cuda.Stream], Queued]
"""Function of (t, stream) that returns a reduction of `t` after the queued work of the caller's `stream`.

May raise RuntimeError.
"""


class Alone(Queued):
    """A reduction of a communicator with one rank, which only waits for the queued work of the caller's stream."""

    __slots__ = ("_end", "_events", "_stream")

    def __init__(self, progress: Progress, _: Tensor, stream: torch.cuda.Stream) -> None:
        super().__init__(progress, stream.device)
        self._stream, self._events = stream, Events.of(progress)
        self._end = None if idle(stream) else self._events.record(stream)
        self.reached(self._end)

    def start(self, done: Done) -> None:
        """See `Queued`."""
        self._done = done
        if self._end is None:
            done(None)
        else:
            self._events.add(self._stream, self._end, self._finish)


class NcclReductions:
    """In-place reductions of tensors of `kind` by one call each of the open `group`, in launch order."""

    def __init__(
        self, progress: Progress, group: NcclGroup, kind: dtype, op: ReduceOp, start_checks: Callable[[], None]
    ) -> None:
        """`start_checks` starts the periodic checks for errors of NCCL, unless started already."""
        self._start_checks = start_checks
        self.progress = progress
        self.group = group
        self.events = Events.of(progress)
        self.reduce = reducer(group, kind, op)
        self.divides = op is ReduceOp.MEAN and group.size > 1

    def queue(self, t: Tensor, stream: torch.cuda.Stream) -> Queued:
        """See `Queue`."""
        self._start_checks()
        return ByNccl(self, t, stream)


class ByNccl(Queued):
    """One reduction of `NcclReductions`."""

    __slots__ = ("_awaited", "_failed", "_kind", "_numbers", "_slot", "_t")

    def __init__(self, kind: NcclReductions, t: Tensor, stream: torch.cuda.Stream) -> None:
        super().__init__(kind.progress, kind.group.device)
        self._kind, self._t = kind, t
        self._failed: BaseException | None = None
        self._awaited = None if idle(stream) else kind.events.record(stream)
        self._slot = kind.group.launch_order.take()

    def start(self, done: Done) -> None:
        """See `Queued`."""
        self._done = done
        group, t = self._kind.group, self._t
        try:
            self._numbers = as_numbers(t)
        except Exception as raised:  # noqa: BLE001  - the error belongs to the task that awaits the operation
            self._slot.release()
            self._launched(ours(raised))
        else:
            means = (t,) if self._kind.divides else ()
            call = NcclCall(self._launch, "allreduce", self._launched, means, None, self._awaited)
            group.launch_order.add(self._slot, group.submit, call, last=True)

    def _launch(self, comm: Any, stream: int) -> None:  # noqa: ANN401
        self._kind.reduce(comm, self._numbers, stream)

    def _launched(self, error: BaseException | None) -> None:
        """Wait for the device after the call. A failed call may also have launched a kernel that uses the tensor."""
        kind = self._kind
        stream = kind.group.stream
        if self._awaited is not None:
            kind.events.release(kind.group.device.index, self._awaited)
        if stream is None or (kind.group.size == 1 and error is None and idle(stream)):
            self._finish(error)
            return
        self._failed = error
        try:
            self.reached(kind.events.watch(stream, self._ended))
        except RuntimeError as raised:
            self._finish(error or device_error(raised))

    def _ended(self, error: BaseException | None) -> None:
        self._finish(self._failed or error)
