"""Used buffers, which the next request for their size gets."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import torch
from torch import Tensor


class Pool:
    """Free buffers, flat uint8, by size (any thread)."""

    def __init__(self, make: Callable[[int], Tensor], most_bytes: int = 512 << 20) -> None:
        """`make(nbytes)` returns a new buffer. At most `most_bytes` of free buffers are kept."""
        self._make = make
        self._most_bytes = most_bytes
        self._free: dict[int, list[Tensor]] = {}
        self._kept_bytes = 0
        self._lock = Lock()

    def take(self, nbytes: int) -> Tensor:
        with self._lock:
            if nbytes in self._free:
                return self._taken(nbytes)
        return self._make(nbytes) if nbytes else torch.empty(0, dtype=torch.uint8, device="cpu")

    def take_room(self, nbytes: int) -> Tensor:
        """Return a buffer of at least `nbytes`, at most an eighth more, for data of varying size."""
        step = max(1, 1 << max(0, nbytes - 1).bit_length() >> 4)
        return self.take(-(-nbytes // step) * step)

    def _taken(self, nbytes: int) -> Tensor:
        free = self._free.pop(nbytes)
        self._kept_bytes -= nbytes
        found = free.pop()
        if free:
            self._free[nbytes] = free
        return found

    def release(self, t: Tensor) -> None:
        """Keep `t`, which has no user any more, for the next `take` of its size."""
        if not 0 < t.nbytes <= self._most_bytes:
            return
        with self._lock:
            while self._kept_bytes + t.nbytes > self._most_bytes:
                self._taken(next(iter(self._free)))  # the size with the oldest use, since codes have all sizes
            self._kept_bytes += t.nbytes
            self._free.setdefault(t.nbytes, []).append(t)
