"""Buffers for data that arrive: those that were used before, since the pages of new memory cost more than a copy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_KEPT_BYTES = 512 << 20


class Pool:
    """Flat uint8 tensors by size; with the transport lock held."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        """`make(nbytes)` returns a new one."""
        self._make = make
        self._free: dict[int, list[Tensor]] = {}
        self._kept_bytes = 0

    def take(self, nbytes: int) -> Tensor:
        """Return a buffer with anything in it."""
        free = self._free.pop(nbytes, None)
        if free is None:
            return self._make(nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
        self._kept_bytes -= nbytes
        found = free.pop()
        if free:
            self._free[nbytes] = free
        return found

    def release(self, t: Tensor) -> None:
        """Keep `t`, which its user has finished with, for the next `take` of its size; at most 512 MiB are kept."""
        if not 0 < t.nbytes <= _KEPT_BYTES:
            return
        while self._kept_bytes + t.nbytes > _KEPT_BYTES:
            self.take(next(iter(self._free)))  # of the size that was taken the longest ago: codes have all sizes
        self._kept_bytes += t.nbytes
        self._free.setdefault(t.nbytes, []).append(t)
