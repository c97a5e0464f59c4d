"""The memory of simulated devices: poisoned when it is new and again when it is free; and pinned host memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch import _conj as conjugated
from torch import _neg_view as negated

from tests.support.simulated_cuda.lanes import Lane, World


def _poison_byte(dtype: torch.dtype) -> int:
    """NaN for floats, the greatest number for bytes, far below zero for other integers, True for bool."""
    if dtype is torch.bool:
        return 1
    return 0xFF if dtype.is_floating_point or dtype.is_complex or dtype is torch.uint8 else 0x80


def poison(t: torch.Tensor) -> None:
    """Fill a plain CPU tensor with values that tests see as wrong."""
    t.copy_(torch.full((t.itemsize,), _poison_byte(t.dtype), dtype=torch.uint8, device="cpu").view(t.dtype)[0])


def _poisoned(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.UntypedStorage, object]:
    """Return a tensor in new memory, the storage of that, and an object that lives as long as tensors over it do."""
    span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    nbytes = span * dtype.itemsize
    base = torch.full((nbytes,), _poison_byte(dtype), dtype=torch.uint8, device="cpu").untyped_storage()
    lease = (ctypes.c_char * nbytes).from_address(base.data_ptr())
    lease.base = base  # type: ignore[attr-defined]
    lent = torch.frombuffer(lease, dtype=torch.uint8).untyped_storage()
    return _over(lent, dtype, 0, size, stride), base, lease


class Allocation:
    """One allocation; its memory outlives its tensors as long as queued jobs use the memory."""

    __slots__ = ("base", "byte", "freed", "index", "lane", "lease", "users")

    def __init__(self, base: torch.UntypedStorage, lane: Lane, byte: int) -> None:
        self.base: Final = base
        self.lane: Final = lane
        self.byte: Final = byte
        self.users: Final[set[Lane]] = set()  # streams named to record_stream
        self.freed = False  # and poisoned: another tensor may have the memory
        self.lease: weakref.ref[object] | None = None

    def free(self) -> None:
        """Poison, once the stream that it was allocated on gets there, and those named to record_stream."""
        lanes = {self.lane, *self.users}
        left = [len(lanes)]
        lock = threading.Lock()

        def reached() -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            self.freed = True
            torch.empty(0, dtype=torch.uint8, device="cpu").set_(self.base).fill_(self.byte)

        for lane in lanes:
            lane.put(reached, works=False)


class Memory:
    """All blocks of one simulation, and the pinned storages."""

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self._blocks: Final[dict[int, Allocation]] = {}  # by address
        self._pinned: Final[dict[int, weakref.ref[object]]] = {}

    def index(self, storage: torch.UntypedStorage) -> int:
        """Return the device of a storage; RuntimeError where it is on none."""
        if (block := self._blocks.get(storage.data_ptr())) is None:
            raise RuntimeError("the storage is on no simulated CUDA device, or is empty")
        return block.lane.index

    def block(self, t: torch.Tensor) -> Allocation | None:
        """Return the allocation of a tensor's storage."""
        return self._blocks.get(t.untyped_storage().data_ptr())

    def allocated(self, index: int) -> int:
        """Return the bytes of a device that tensors hold."""
        return sum(block.base.nbytes() for block in tuple(self._blocks.values()) if block.lane.index == index)

    def lent(self, index: int) -> int:
        """Return the bytes of a device that torch cannot free if the device is lost: other streams may use them."""
        blocks = [block for block in tuple(self._blocks.values()) if block.lane.index == index]
        return sum(block.base.nbytes() for block in blocks if block.users - {block.lane})

    def allocate(self, lane: Lane, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a plain CPU tensor over a new block, poisoned."""
        if 0 in size:
            return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        made, base, lease = _poisoned(size, stride, dtype)
        block = Allocation(base, lane, _poison_byte(dtype))
        address = base.data_ptr()

        def dead(_: object) -> None:
            del self._blocks[address]
            if block.users - {block.lane}:
                self._freed(lane.index, "memory that was lent to another stream (record_stream)")
            with contextlib.suppress(RuntimeError):  # the simulation has ended, perhaps in another thread
                block.free()

        block.lease = weakref.ref(lease, dead)
        self._blocks[address] = block
        return made

    def record(self, t: torch.Tensor, lane: Lane) -> None:
        """Keep the block from being poisoned before what the stream has queued when it is freed."""
        if (block := self.block(t)) is not None:
            block.users.add(lane)

    def alias(self, t: torch.Tensor) -> tuple[torch.Tensor, Allocation | None]:
        """Return a plain CPU tensor over the same memory, which does not keep it from being freed, and its block."""
        block = self.block(t)
        if block is None and t.untyped_storage().nbytes() == 0:
            return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu"), None
        plain = _over(
            t.untyped_storage() if block is None else block.base, t.dtype, t.storage_offset(), t.size(), t.stride()
        )
        return seen_as(t, plain), block

    def pin(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a plain CPU tensor in pinned memory, poisoned."""
        if self._world.pinning_fails:
            raise torch.AcceleratorError("CUDA error: out of memory: page-locked memory cannot be allocated")
        if 0 in size:
            return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
        made, base, lease = _poisoned(size, stride, dtype)
        address = base.data_ptr()

        def dead(_: object) -> None:
            del self._pinned[address]

        self._pinned[address] = weakref.ref(lease, dead)
        return made

    def _freed(self, index: int, what: str) -> None:
        """Note what ends the process with torch, whose destructors record an event then, and raise."""
        if index in self._world.errors and not self._world.closed:
            self._world.hazards.append(f"{what} was freed when cuda:{index} was lost: torch aborts there")

    def is_pinned(self, t: torch.Tensor) -> bool:
        """Whether a host tensor is in pinned memory."""
        return t.untyped_storage().data_ptr() in self._pinned


def seen_as(t: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Return `plain` conjugated and negated as `t` is, where that is a mark on the tensor and not in its memory."""
    conjugate = conjugated(plain) if t.is_conj() else plain
    return negated(conjugate) if t.is_neg() else conjugate


def _over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int | torch.SymInt,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, stride)
