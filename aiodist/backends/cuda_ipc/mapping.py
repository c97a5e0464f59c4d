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
from abc import ABC, abstractmethod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from aiodist.errors import BackendError
from aiodist.streams import OnStream
from aiodist.streams.capture import Uncaptured
from aiodist.streams.leak import leak

_REMEDY = 'take impl="staged" for it, or memory of torch\'s native allocator'


class Mapped(ABC):
    """The memory of somebody else's storage."""

    @abstractmethod
    def memory(self) -> Tensor:
        """Return all of it, flat, as bytes; raise BackendError where it is gone."""

    def lost(self) -> bool:
        """Return True where its device failed: it can only be leaked."""
        return False

    def close(self) -> None:  # noqa: B027  - there may be nothing to do
        """Let go of it, when nothing that was queued uses it any more."""

    def leak(self) -> None:  # noqa: B027
        """Keep it mapped for as long as the process lives."""


class Mapper:
    """What describes and opens memory, by torch's sharing of storages: see the module."""

    def __init__(self) -> None:
        self._idle: dict[torch.device, torch.cuda.Stream] = {}
        self._places: dict[torch.device, str] = {}
        self._allocations: WeakValueDictionary[bytes, _Allocation] = WeakValueDictionary()
        """Those of others in which something is mapped, by handle."""

    def export(self, t: Tensor) -> bytes:
        """Return a description of the storage of `t`, for one rank, which opens it once; BackendError where none is.

        Costs an event and 20 us.
        """
        storage = t.untyped_storage()
        try:
            device, *shared, _waits = storage._share_cuda_()
            uuid = self.place(torch.device("cuda", device))
        except RuntimeError as error:
            raise BackendError(f"memory of {t.device} cannot be lent to other processes: {error}; {_REMEDY}") from error
        return pickle.dumps((_process(), address_of(storage), uuid, *shared))

    def open(self, description: bytes, device: torch.device) -> Mapped:
        """Return what another rank's `export` describes, as memory of `device`; BackendError where that fails.

        Costs up to a millisecond where it is the first in its allocation.
        """
        process, cdata, uuid, handle, nbytes, offset, counter, slot, event = pickle.loads(description)
        if process == _process():  # CUDA does not open what this process has already
            self.discard(description)
            return Own(cdata, device)
        _check_reachable(uuid, device)
        # Torch knows by its handle alone which allocation is open.
        allocation = self._allocations.setdefault(handle, _Allocation(device))
        if allocation.device != device:
            raise BackendError(f"memory of another rank is mapped on {allocation.device}: it cannot be on {device} too")
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                device.index, handle, nbytes, offset, counter, slot, event, False
            )
        except RuntimeError as error:
            raise BackendError(f"memory of the GPU {uuid} cannot be mapped on {device}: {error}; {_REMEDY}") from error
        if device not in self._idle:
            self._idle[device] = torch.cuda.Stream(device=device)
        return _Foreign(flat(storage, device), self._idle[device], allocation)

    def discard(self, description: bytes) -> None:
        """Say that what another rank's `export` describes is never opened."""
        *_, counter, slot, _event = pickle.loads(description)
        torch.UntypedStorage._release_ipc_counter(counter, slot)

    def place(self, device: torch.device) -> str:
        """Return a name of the physical device that no other one of the host has, the same in all processes."""
        if device not in self._places:
            self._places[device] = str(torch.cuda.get_device_properties(device.index).uuid)
        return self._places[device]


class Own(Mapped):
    """A storage of this process, which another of its ranks lends: looked at, not kept alive."""

    def __init__(self, cdata: int, device: torch.device) -> None:
        """`cdata` is the storage's, to which the rank that lends it has a weak reference as long as it does."""
        self._storage = StorageWeakRef(_lent(cdata))
        self._device = device

    def memory(self) -> Tensor:
        return flat(_lent(self._storage.cdata), self._device)


class _Allocation:
    """What storages of other processes lie in."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


class _Foreign(Mapped):
    """Memory of another process.

    Torch checks what it calls when it ends, in a destructor: on a device that is lost that is the end of the process.
    """

    def __init__(self, memory: Tensor, idle: torch.cuda.Stream, allocation: _Allocation) -> None:
        self._memory: Tensor | None = memory
        self._idle = idle
        self._allocation: _Allocation | None = allocation

    def memory(self) -> Tensor:
        if self._memory is None:
            raise BackendError("memory of another rank is used after it was let go of")
        return self._memory

    def lost(self) -> bool:
        with Uncaptured():
            try:
                self._idle.query()
            except RuntimeError:
                return True
        return False

    def close(self) -> None:
        # Its end waits for the current stream, which has things to do: let it be one that has none.
        with Uncaptured(), OnStream(self._idle):
            self._memory = self._allocation = None

    def leak(self) -> None:
        leak(self._memory)


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


def _process() -> tuple[int, int]:
    """Return what no other process of this host has, in any container."""
    return os.stat("/proc/self/ns/pid").st_ino, os.getpid()


def _check_reachable(uuid: str, device: torch.device) -> None:
    """Raise BackendError where it is known that `device` cannot reach the memory of the GPU `uuid`."""
    for index in range(torch.cuda.device_count()):
        if index != device.index and str(torch.cuda.get_device_properties(index).uuid) == uuid:
            if not torch.cuda.can_device_access_peer(device, index):
                raise BackendError(f"{device} has no access to the memory of cuda:{index}, GPU {uuid}; {_REMEDY}")
            return
