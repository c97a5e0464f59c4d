"""What stands in for CUDA's mappings between processes where the ranks of a simulated device are in one process."""

from __future__ import annotations

import pickle

import torch
from torch import Tensor

from aiodist.backends.cuda_ipc.mapping import Mapped, Own

__all__ = ["SimulatedMapper"]


class SimulatedMapper:
    """A `Mapper` among ranks of one process, for CPU tensors too; give it to `Mappings`.

    A description is opened or discarded once, as the real ones: `open` and `discard` raise AssertionError otherwise.
    Unlike CUDA's, its memory goes back when the tensor dies, so that whoever uses it later reads poison.
    """

    def __init__(self) -> None:
        self.exported = 0
        self.opened: set[bytes] = set()
        """Descriptions that are opened now."""
        self._used: set[bytes] = set()

    def export(self, t: Tensor) -> bytes:
        """See `Mapper`."""
        self.exported += 1
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


class _Opened(Own):
    def __init__(self, mapper: SimulatedMapper, description: bytes, device: torch.device) -> None:
        super().__init__(pickle.loads(description)[0], device)
        self._mapper = mapper
        self._description = description

    def close(self) -> None:
        self._mapper.opened.remove(self._description)
