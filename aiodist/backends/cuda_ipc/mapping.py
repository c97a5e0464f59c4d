"""Export and mapping of CUDA memory between processes of one host, by torch's sharing of storages.

[Note: kept memory] Each description has a counter in shared memory, which is 1 until the opening process has closed the
mapping. If a storage dies before, torch neither reuses nor frees the memory until all counters of the storage are 0. So
a mapping never shows other data. For this reason only one process opens a description, and only once. As long as the
storage lives, its description costs an event, an entry in a file, and a wrapper of the memory. The allocator ignores
`record_stream` for a storage with a description.

A process maps the memory on its own device, also if the memory is on another GPU. Kernels then access the memory across
the link between the GPUs. torch's event is not used, and ranks synchronise on the host, since the event of a killed
process would never be recorded.
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
    """Exports and opens memory by torch's sharing of storages."""

    def __init__(self) -> None:
        self._idle: dict[torch.device, torch.cuda.Stream] = {}
        self._allocations: WeakValueDictionary[bytes, _Allocation] = WeakValueDictionary()
        """Mapped allocations of other processes, by CUDA's handle of the allocation."""

    def export(self, t: Tensor) -> bytes:
        """Return a description of the storage of `t`, which one rank opens once, or raise BackendError on failure.

        Costs an event shared by processes, which takes up to 0.1 s in the driver (an H100 in a virtual machine).
        """
        storage = t.untyped_storage()
        try:
            device, *shared, _waits = storage._share_cuda_()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
        except RuntimeError as error:
            raise BackendError(f"memory of {t.device} cannot be exported: {error}; {REMEDY}") from error
        return pickle.dumps((this_process(), address_of(storage), uuid, *shared))

    def open(self, description: bytes, device: torch.device) -> Mapped:
        """Map the memory of another rank's `export` on `device`. Raise BackendError if that fails.

        Costs up to a millisecond for the first storage of an allocation.
        """
        process, cdata, uuid, handle, nbytes, offset, counter, slot, event = pickle.loads(description)
        if process == this_process():  # CUDA cannot open memory of the same process
            self.discard(description)
            return Own(cdata, device)
        # torch finds open allocations by the handle alone, and so would return the mapping of the first device.
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
        """Release the description of another rank's `export` without an opening."""
        *_, counter, slot, _event = pickle.loads(description)
        torch.UntypedStorage._release_ipc_counter(counter, slot)

    def collect(self) -> None:
        """Free the memory of dead storages whose mappings are all closed."""
        torch.cuda.ipc_collect()


class _Allocation:
    """An allocation of another process, mapped on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Mapped:
    """The mapped storage of another process."""

    def __init__(self, memory: Tensor, idle: torch.cuda.Stream, allocation: _Allocation) -> None:
        """`idle` is a stream without work."""
        self._memory: Tensor | None = memory
        self._allocation: _Allocation | None = allocation
        self._idle = idle

    def memory(self) -> Tensor:
        """Return all bytes, flat, or raise BackendError after the close."""
        if self._memory is None:
            raise BackendError("memory of another rank is used after its mapping was closed")
        return self._memory

    def close(self) -> None:
        """Close the mapping. No queued work may use the storage."""
        with OnStream(self._idle):  # the destructor waits for the current stream
            self._memory = self._allocation = None


class Own(Mapped):
    """A storage of another rank in this process, by a weak reference."""

    def __init__(self, cdata: int, device: torch.device) -> None:
        """`cdata` is torch's identifier of the storage. The lending rank holds a weak reference to the storage."""
        self._storage = StorageWeakRef(_lent(cdata))
        self._device = device

    def memory(self) -> Tensor:
        return flat(_lent(self._storage.cdata), self._device)

    def close(self) -> None:
        """Do nothing, since there is only a weak reference."""


def flat(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """Return all of a storage as a tensor of bytes, in any torch mode."""
    with torch.inference_mode(False), torch.no_grad():
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def address_of(storage: torch.UntypedStorage) -> int:
    """Return torch's identifier of a storage in this process."""
    return int(storage._cdata)


def living(cdata: int) -> torch.UntypedStorage | None:
    """Return the storage at this address, to which a weak reference exists, or None for a dead storage."""
    storage: Any = torch.UntypedStorage._new_with_weak_ptr(cdata)
    return storage  # type: ignore[no-any-return]


def _lent(cdata: int) -> torch.UntypedStorage:
    storage = living(cdata)
    if storage is None:
        raise BackendError("the tensor that another rank of this process lent was freed")
    return storage


def this_process() -> tuple[int, int]:
    """Return an identifier of this process that is unique on this host, across containers."""
    return os.stat("/proc/self/ns/pid").st_ino, os.getpid()
