"""Reductions that only queue: one call for the device, without a program and without a stream of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import Done, Operation, guarded
from aiodist.backends.nccl import NcclGroup, NcclNative
from aiodist.handles import Progress
from aiodist.streams import Events, Fence
from aiodist.streams.events import device_error
from aiodist.types import ReduceOp

Queue = Callable[[Tensor, Done], tuple[Fence, Callable[[], None]]]
"""(t, done): what is to be called with the transport lock held, and where it will end on the device.

Made on the thread that issues, on which it takes note of what the current stream has queued. `done` is called when the
device is done, or with what it failed with.
"""


def alone(progress: Progress, device: torch.device) -> Queue:
    """Return how the only rank of a communicator reduces: it waits for what the current stream has queued."""
    events = Events.of(progress)

    def queue(t: Tensor, done: Done) -> tuple[Fence, Callable[[], None]]:
        fence = Fence(progress, device)

        def over(error: BaseException | None) -> None:
            fence.reached(None)  # its event is somebody else's from now on
            done(error)

        stream = torch.cuda.current_stream(device.index)
        event = events.record(stream)
        fence.reached(event)
        return fence, partial(guarded, partial(events.add, stream, event), over)

    return queue


def by_nccl(progress: Progress, group: NcclGroup, op: ReduceOp) -> Queue:
    """Return how tensors are reduced in place by one call of `group`, which is open, in launch order."""
    events = Events.of(progress)
    index: int = group.device.index

    def queue(t: Tensor, done: Done) -> tuple[Fence, Callable[[], None]]:
        fence = Fence(progress, group.device)
        behind = events.record(torch.cuda.current_stream(index))  # a number is looked up sooner than a device
        slot = group.launch_order.take()

        def over(failed: BaseException | None, error: BaseException | None) -> None:
            fence.reached(None)
            done(failed or error)

        def queued(failed: BaseException | None) -> None:
            events.release(index, behind)
            slot.release()
            # Where the call failed too: what it has launched uses the tensor until it is over.
            stream = group.stream
            if stream is None:
                over(failed, None)
                return
            try:
                event = events.record(stream)
            except RuntimeError as raised:
                over(failed, device_error(raised))
                return
            fence.reached(event)
            events.add(stream, event, partial(over, failed))

        start = partial(NcclNative(group, slot, behind).start, Operation("allreduce", t, op=op))
        return fence, partial(guarded, start, queued)

    return queue
