"""How a process describes memory of a CUDA device so that another one of its host can map it, and how that maps it.

By torch's own storage sharing: it knows where in which allocation a storage lies, and it counts for us.

[Note: kept memory] Each description carries a counter in shared memory that is 1 until the process that opened it lets
go of the memory. Where a storage dies before, torch keeps its memory, neither reused nor given back, until all its
counters are 0, so nobody ever sees something else where a tensor was. So a description is for one process, which opens
it once. It stays with its storage for as long as that lives: an event, a place in a file, and a layer around its
memory, through which the allocator hears of no `record_stream` any more.

The process that opens a description makes its memory memory of the device that it works on itself, also when it lies on
another GPU: kernels read and write it across the link between them. Torch's event is left alone: ranks tell one another
on the host when memory is ready, and an event of a process that was killed would never come.
"""

from __future__ import annotations

import os
import pickle
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from aiodist.errors import BackendError
from aiodist.streams import OnStream

REMEDY = 'take impl="staged" for it, or memory of torch\'s native allocator'


class Mapper:
    """What describes and opens memory, by torch's sharing of storages: see the module."""

    def __init__(self) -> None:
        self._idle: dict[torch.device, torch.cuda.Stream] = {}
        self._allocations: WeakValueDictionary[bytes, _Allocation] = WeakValueDictionary()
        """Those of others in which something is mapped, by handle."""

    def export(self, t: Tensor) -> bytes:
        """Return a description of the storage of `t`, for one rank, which opens it once; BackendError where none is.

        Costs an event that processes share, and with it up to 0.1 s in the driver (an H100 in a virtual machine).
        """
        storage = t.untyped_storage()
        try:
            device, *shared, _waits = storage._share_cuda_()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
        except RuntimeError as error:
            raise BackendError(f"memory of {t.device} cannot be lent to other processes: {error}; {REMEDY}") from error
        return pickle.dumps((this_process(), address_of(storage), uuid, *shared))

    def open(self, description: bytes, device: torch.device) -> Mapped:
        """Return what another rank's `export` describes, as memory of `device`; BackendError where that fails.

        Costs up to a millisecond where it is the first in its allocation.
        """
        process, cdata, uuid, handle, nbytes, offset, counter, slot, event = pickle.loads(description)
        if process == this_process():  # CUDA does not open what this process has already
            self.discard(description)
            return Own(cdata, device)
        # Torch knows by its handle alone which allocation is open, and would give the first device's mapping again.
        allocation = self._allocations.setdefault(handle, _Allocation(device))
        if allocation.device != device:
            raise BackendError(f"memory of another rank is mapped on {allocation.device}: it cannot be on {device} too")
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                device.index, handle, nbytes, offset, counter, slot, event, False
            )
        except RuntimeError as error:
            raise BackendError(f"memory of the GPU {uuid} cannot be mapped on {device}: {error}; {REMEDY}") from error
        if device not in self._idle:
            self._idle[device] = torch.cuda.Stream(device=device)
        return Mapped(flat(storage, device), self._idle[device], allocation)

    def discard(self, description: bytes) -> None:
        """Say that what another rank's `export` describes is never opened."""
        *_, counter, slot, _event = pickle.loads(description)
        torch.UntypedStorage._release_ipc_counter(counter, slot)

    def collect(self) -> None:
        """Give back the memory of storages that died since, where all that was described has been let go of."""
        torch.cuda.ipc_collect()


class _Allocation:
    """What storages of other processes lie in."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Mapped:
    """The memory of somebody else's storage."""

    def __init__(self, memory: Tensor, idle: torch.cuda.Stream, allocation: _Allocation) -> None:
        """`idle` is a stream on which there is nothing."""
        self._memory: Tensor | None = memory
        self._allocation: _Allocation | None = allocation
        self._idle = idle

    def memory(self) -> Tensor:
        """Return all of it, flat, as bytes; raise BackendError where it is gone."""
        if self._memory is None:
            raise BackendError("memory of another rank is used after it was let go of")
        return self._memory

    def close(self) -> None:
        """Let go of it, when nothing that was queued uses it any more."""
        with OnStream(self._idle):  # its end waits for the current stream
            self._memory = self._allocation = None


class Own(Mapped):
    """A storage of this process, which another of its ranks lends: looked at, not kept alive."""

    def __init__(self, cdata: int, device: torch.device) -> None:
        """`cdata` is the storage's, to which the rank that lends it has a weak reference as long as it does."""
        self._storage = StorageWeakRef(_lent(cdata))
        self._device = device

    def memory(self) -> Tensor:
        return flat(_lent(self._storage.cdata), self._device)

    def close(self) -> None:
        """Nothing is held."""


def flat(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """Return all of a storage as a tensor of bytes, in any torch mode."""
    with torch.inference_mode(False), torch.no_grad():
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def address_of(storage: torch.UntypedStorage) -> int:
    """Return the number that torch knows a storage by, in this process."""
    return int(storage._cdata)


def living(cdata: int) -> torch.UntypedStorage | None:
    """Return the storage at this address, to which there is a weak reference; None when it has died."""
    storage: Any = torch.UntypedStorage._new_with_weak_ptr(cdata)
    return storage  # type: ignore[no-any-return]


def _lent(cdata: int) -> torch.UntypedStorage:
    storage = living(cdata)
    if storage is None:
        raise BackendError("the tensor that another rank of this process lent is gone")
    return storage


def this_process() -> tuple[int, int]:
    """Return what no other process of this host has, in any container."""
    return os.stat("/proc/self/ns/pid").st_ino, os.getpid()
