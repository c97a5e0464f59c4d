"""Buckets on CUDA devices that the host works on: copied there, and back."""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from aiodist.handles import Done, Progress
from aiodist.nn.buckets import Bucket
from aiodist.streams import Staging


class HostCopies:
    """What the host has of buckets: their own data where they lie on the CPU; on the loop."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._memory: WeakKeyDictionary[Bucket, Tensor] = WeakKeyDictionary()

    def of(self, bucket: Bucket) -> Tensor:
        """Return a flat tensor as long as the bucket's `data`."""
        if not bucket.on_device:
            return bucket.data
        if bucket not in self._memory:
            with torch.inference_mode(False):  # another thread, in another mode, writes to it
                self._memory[bucket] = torch.empty(bucket.data.shape, dtype=bucket.dtype)
        return self._memory[bucket]

    def fetch(self, bucket: Bucket, then: Done) -> None:
        """Call `then` on the loop when the host has what the device will have behind the current stream."""
        if bucket.on_device:
            self._copy(self.of(bucket), bucket.data, torch.cuda.current_stream(bucket.device), then)
        else:
            then(None)

    def put_back(self, bucket: Bucket, then: Done) -> None:
        """Call `then` on the loop when the device has what the host has; from any thread."""
        if bucket.on_device:
            back = Staging.of(self._progress).to_device(bucket.device)
            self._progress.post(partial(self._copy, bucket.data, self.of(bucket), back, then))
        else:
            then(None)

    def _copy(self, into: Tensor, t: Tensor, stream: torch.cuda.Stream, then: Done) -> None:
        def over(error: BaseException | None) -> None:
            self._progress.post(partial(then, error))

        Staging.of(self._progress).copy(into, t, stream, lambda _: None, over)
