"""Host memory that a CUDA device copies from and to at full speed: a bounded pool of it.

Only from pinned memory does a copy go on while the host does something else, and only so much of it is good for a
host. Two kinds of user share the pool, so that neither can make the other wait for ever:

- *buffers* are held until another rank has done its part. Nobody waits for one: beyond the bound there is pageable
  memory instead, which is right and slower;
- *pieces* are what pageable memory passes through. They come back by the device's own doing alone, so they are
  waited for. A quarter of the pool is theirs.

A staged collective wants 4 to 8 buffers of 2 MiB, a staged message 3, a copy of pageable memory 3 pieces: in 64 MiB
four collectives and two copies are in flight at full speed.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from aiodist.streams.capture import Uncaptured
from aiodist.streams.leak import leak

_LEAST_BYTES = 4 << 10  # a page: nothing smaller is pinned


def pageable(nbytes: int) -> Tensor:
    """Return ordinary host memory, in any torch mode."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _pinned(nbytes: int) -> Tensor:
    with torch.inference_mode(False), Uncaptured():
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


class PinnedPool:
    """Flat bytes of pinned memory, taken and given back; from any thread.

    Nothing is pinned before it is needed: pinning 2 MiB takes a millisecond, once. Buffers are powers of two of
    bytes. Where pinning fails there is one RuntimeWarning, and what was pinned by then is all that ever is.
    """

    def __init__(
        self,
        limit_bytes: int = 64 << 20,
        piece_bytes: int = 2 << 20,
        *,
        allocate: Callable[[int], Tensor] = _pinned,
        warn: Callable[[str], None] = _warn,
    ) -> None:
        """Pin `limit_bytes` at most, a quarter of them as pieces of `piece_bytes`.

        `allocate` pins and raises `RuntimeError` where it cannot; `warn` is told once. Raises ValueError where not even
        one piece is within the limit.
        """
        if not 0 < piece_bytes <= limit_bytes:
            raise ValueError(f"pieces of {piece_bytes} bytes in a pool of {limit_bytes}: expected 1 to the pool's")
        self.limit_bytes = limit_bytes
        self.piece_bytes = piece_bytes
        self.most_pieces = max(1, limit_bytes // 4 // piece_bytes)
        self._buffer_bytes = limit_bytes - self.most_pieces * piece_bytes
        self._allocate = allocate
        self._warn = warn
        self._lock = threading.Lock()
        self._failed = False
        self._free: dict[int, list[Tensor]] = {}
        """By size, of which there are few."""
        self._lent: dict[int, Tensor] = {}
        """By address, where the part of it that is given back begins."""
        self._pinned_bytes = 0
        self._pieces = 0
        self._all_pieces: list[Tensor] = []
        self._free_pieces: list[Tensor] = []
        self._waiting: deque[Callable[[Tensor], None]] = deque()

    @property
    def pinned_bytes(self) -> int:
        """Return how much is pinned, lent or not; torch keeps a block that was let go of, for what is pinned next."""
        return self._pinned_bytes + self._pieces * self.piece_bytes

    @property
    def lent(self) -> int:
        """Return how many buffers and pieces are out."""
        return len(self._lent) + self._pieces - len(self._free_pieces)

    def leak(self) -> None:
        """Have all that is pinned kept for ever: copies have used it, on a device that is lost; see `leak`."""
        with self._lock:
            for t in [*self._lent.values(), *self._all_pieces, *(t for free in self._free.values() for t in free)]:
                leak(t)

    # --- buffers --------------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> Tensor:
        """Return a buffer to hold for as long as it takes: pinned, or pageable where the bound is reached."""
        size = max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length()) if nbytes else 0
        buffer = self._reused(size) if size else None
        if buffer is None and size:
            buffer = self._pin(size)
        return pageable(nbytes) if buffer is None else buffer[:nbytes]

    def release(self, t: Tensor) -> None:
        """Let a buffer be taken again, or a part of it that begins where it does; pageable ones are let go of."""
        with self._lock:
            buffer = self._lent.pop(t.data_ptr(), None)
            if buffer is not None:
                self._free.setdefault(buffer.numel(), []).append(buffer)

    def _reused(self, size: int) -> Tensor | None:
        with self._lock:
            free = self._free.get(size)
            if not free:
                return None
            buffer = free.pop()
            self._lent[buffer.data_ptr()] = buffer
            return buffer

    def _pin(self, size: int) -> Tensor | None:
        """Return a new buffer, unless that is too much; those of other sizes that are free make room for it."""
        dropped: list[Tensor] = []  # let go of without the lock
        with self._lock:
            idle = sum(held * len(free) for held, free in self._free.items())
            if self._failed or self._pinned_bytes - idle + size > self._buffer_bytes:
                return None
            while self._pinned_bytes + size > self._buffer_bytes:
                dropped.append(next(free for free in self._free.values() if free).pop())
                self._pinned_bytes -= dropped[-1].numel()
            self._pinned_bytes += size
        dropped.clear()
        buffer = self._allocated(size)
        with self._lock:
            if buffer is None:
                self._pinned_bytes -= size
            else:
                self._lent[buffer.data_ptr()] = buffer
        return buffer

    def _allocated(self, size: int) -> Tensor | None:
        try:
            return self._allocate(size)
        except RuntimeError as error:
            with self._lock:
                first = not self._failed
                self._failed = True
            if first:
                text = str(error).strip().partition("\n")[0]
                self._warn(f"host memory cannot be pinned, so copies to and from CUDA devices are slower: {text}")
            return None

    # --- pieces ---------------------------------------------------------------------------------------------

    def has_pieces(self) -> bool:
        """Return True where pieces can be had, which is known once the first is pinned."""
        if not self._pieces and not self._failed and (first := self._new_piece()) is not None:
            self.release_piece(first)
        return self._pieces > 0

    def piece(self, then: Callable[[Tensor], None]) -> Tensor | None:
        """Return a piece; None where all are out, and `then(piece)` is called by the thread that gives one back.

        In the order of asking. Only where `has_pieces`.
        """
        with self._lock:
            if self._free_pieces:
                return self._free_pieces.pop()
        if not self._failed and (piece := self._new_piece()) is not None:
            return piece
        with self._lock:
            if self._free_pieces:  # given back meanwhile
                return self._free_pieces.pop()
            self._waiting.append(then)
            return None

    def release_piece(self, piece: Tensor) -> None:
        """Let a piece be used again."""
        with self._lock:
            then = self._waiting.popleft() if self._waiting else None
            if then is None:
                self._free_pieces.append(piece)
        if then is not None:
            then(piece)

    def _new_piece(self) -> Tensor | None:
        with self._lock:
            if self._pieces == self.most_pieces:
                return None
            self._pieces += 1
        piece = self._allocated(self.piece_bytes)
        with self._lock:
            if piece is None:
                self._pieces -= 1
            else:
                self._all_pieces.append(piece)
        return piece
