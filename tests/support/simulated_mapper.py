"""A stand-in for CUDA's mappings between processes, for ranks of a simulated device in one process."""

from __future__ import annotations

import pickle

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from aiodist.errors import BackendError
from aiodist.testing.seams.cuda import Mapped, Mapper
from tests.support.simulated_cuda.device import active
from tests.support.simulated_cuda.lanes import Lane

__all__ = ["SimulatedMapper"]


class SimulatedMapper(Mapper):
    """A `Mapper` among ranks of one process, for CPU tensors too; give it to `Mappings`.

    It demands what the real one does, and raises AssertionError otherwise: a description is opened or discarded once;
    memory is not closed while a stream that was current where it was asked for has work
    queued. As there, `record_stream` does nothing for memory that was described. Unlike CUDA's, memory goes back when
    the tensor dies, so that code that uses it later reads poison.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exported = 0
        self.opened: set[bytes] = set()
        """Descriptions that are opened now."""
        self._used: set[bytes] = set()

    def export(self, t: Tensor) -> bytes:
        """See `Mapper`."""
        self.exported += 1
        if t.is_cuda and (block := active().memory.block(t)) is not None:
            block.users = _Unheard(block.users)  # type: ignore[misc]
        return pickle.dumps((t.untyped_storage()._cdata, id(self), self.exported))

    def open(self, description: bytes, device: torch.device) -> Mapped:
        """See `Mapper`."""
        self._use(description)
        self.opened.add(description)
        return _Opened(self, description, device)

    def discard(self, description: bytes) -> None:
        """See `Mapper`."""
        self._use(description)

    def _use(self, description: bytes) -> None:
        assert description not in self._used, "a description is opened or discarded once"
        self._used.add(description)


class _Unheard(set[Lane]):
    """Streams that read a block, as reported to the allocator before the block was described."""

    def add(self, lane: Lane) -> None:
        pass


def _lent(cdata: int) -> torch.UntypedStorage:
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(cdata)
    if storage is None:
        raise BackendError("the tensor that another rank of this process lent is gone")
    return storage


class _Opened(Mapped):
    def __init__(self, mapper: SimulatedMapper, description: bytes, device: torch.device) -> None:
        self._storage = StorageWeakRef(_lent(pickle.loads(description)[0]))  # looked at, not kept alive
        self._device = device
        self._mapper = mapper
        self._description = description
        self._streams: set[torch.cuda.Stream] = set()

    def memory(self) -> Tensor:
        storage = _lent(self._storage.cdata)
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(0, dtype=torch.uint8, device=self._device)
            memory = empty.set_(storage, 0, (storage.nbytes(),), (1,))
        if memory.is_cuda:
            self._streams.add(torch.cuda.current_stream(memory.device))
        return memory

    def close(self) -> None:
        assert not self._busy(), "memory is closed that a stream may still use"
        self._mapper.opened.remove(self._description)

    def _busy(self) -> bool:
        try:
            return any(not stream.query() for stream in self._streams)
        except RuntimeError:  # the device failed
            return False
