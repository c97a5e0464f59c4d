"""The buckets of one pass that lie on CUDA devices: when each is full there, and where its reduction ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aiodist.handles import Handle
from aiodist.nn.buckets import Bucket
from aiodist.nn.devices import Devices
from aiodist.streams import Fence


class Queued:
    """Buckets are told by their index; those on the CPU are passed over.

    `gather` and `filled` belong to the thread that fills a bucket, `issue` and `abort` to the loop, `order` to the
    thread that uses the gradients.
    """

    def __init__(self, devices: Devices, buckets: Sequence[Bucket]) -> None:
        self._devices = devices
        self._buckets = buckets
        self._filled: dict[int, torch.cuda.Event] = {}
        self._reductions: dict[int, tuple[Handle[Any], Fence | None]] = {}

    def gather(self, index: int) -> None:
        """Let the current stream go on behind the gradients of a bucket, which is about to be filled there."""
        bucket = self._buckets[index]
        if bucket.on_device:
            self._devices.gather(bucket.device, bucket.gradients())

    def filled(self, index: int) -> None:
        """What fills it is queued on the current stream."""
        bucket = self._buckets[index]
        if bucket.on_device:
            self._filled[index] = self._devices.filled(bucket.device)

    def issue(self, index: int, reduce: Callable[[], Handle[Any]], begun: Callable[[float], None]) -> Handle[Any]:
        """Return what `reduce` does, which begins on the device when the bucket is full there; `begun` is told when."""
        with self._devices.behind(self._buckets[index].device, self._filled.pop(index)) as stream:
            handle = reduce()
        self._reductions[index] = handle, handle.fence if isinstance(handle.fence, Fence) else None
        self._devices.time(stream, begun)
        return handle

    @property
    def issued(self) -> list[int]:
        """Those whose reductions are issued."""
        return list(self._reductions)

    def order(self, index: int) -> bool:
        """Let the current stream of its device go on behind its reduction, which is issued; False on the CPU."""
        bucket = self._buckets[index]
        if not bucket.on_device:
            return False
        handle, fence = self._reductions[index]
        stream = torch.cuda.current_stream(bucket.device)
        if fence is not None:  # the handle has none any more when it is over
            fence.order(stream, handle)
        bucket.data.record_stream(stream)  # code that forgets a gradient need not know where it came from
        return True

    def abort(self, index: int) -> None:
        """Its reduction has failed, and will not be queued: a thread that would wait for that goes on."""
        _, fence = self._reductions.get(index, (None, None))
        if fence is not None:
            fence.reached(None)
