"""Tensors in memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from aiodist.backends.shm.moving import move
from aiodist.communicator.base import Base

_CPU = torch.device("cpu")
Shared = TypeVar("Shared", bound=Tensor | nn.Module)


class SharedMemory(Base):
    """The calls that put tensors into the arena."""

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = _CPU,
    ) -> Tensor:
        """Return an uninitialised tensor in memory that the other ranks of this host can map: its *arena*.

        Local and at once, from any thread; ranks may call it differently. It is a plain tensor, and views of it count.
        Collectives of `impl="shm"` copy nothing of it: the ranks work in one another's tensors, between issue and
        done. Its pages are reserved, and go back when the last tensor in them dies. Raises MemoryError, with how many
        bytes were asked for, where there are none. Where no other rank shares memory with this one it is
        `torch.empty`. It goes on working where the communicator was closed or given up. On a CUDA `device` it is
        `torch.empty` too: ranks of a host can map any memory of a device (`impl="cuda_ipc"`).
        """
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        near = self._registry.near
        if near is None or torch.device(device).type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        return near.arena.empty(size, dtype)

    def arena(self, nbytes: int) -> None:
        """Reserve room for `nbytes` of later `empty` calls on this rank, until the world is closed.

        Tensors that fit in it cost no system call. Local and at once; raises MemoryError as `empty` does, and
        ValueError unless `nbytes` is positive.
        """
        self._dispatcher.check_usable()
        if nbytes <= 0:
            raise ValueError(f"nbytes={nbytes}: expected a positive number of bytes")
        if self._registry.near is not None:
            self._registry.near.arena.reserve(nbytes)

    def share_(self, t: Shared) -> Shared:
        """Return `t`, a tensor or a module, moved into the arena in place: as if `empty` had made it.

        Its views move with it, and all else that has the same storage. Of a module these are the parameters and
        buffers, of which those that are tied move once; gradients in buckets of `aiodist.nn` lie there already.
        Parameters stay the objects that they are: optimizers, hooks, graphs, `state_dict`, `deepcopy` and `torch.save`
        see no difference. Three things are not as before: the tensors cannot grow (`resize_`), a forked child has
        the same memory and no copy of it, and an address that was taken before (`data_ptr()`, DLPack) is void.

        Local and at once, from any thread, while nobody else uses the tensors; ranks may call it differently. What is
        in the arena already stays, and all do where no other rank shares memory with this one. Raises TypeError for
        anything else than a tensor or a module. Then ValueError, with nothing moved, for a tensor that is not on the
        CPU, not dense or made of others, whose memory is not torch's alone (`.numpy()` was called, numpy or a file
        has it, other processes share it), or whose storage is more than twice as large; BufferInFlight; and
        BackendUnavailable where torch is too old. MemoryError as `empty`: it says how many storages have moved.
        Cost: each storage is copied once, is there twice for the time of the copy, and then takes whole pages.
        """
        if not isinstance(t, Tensor | nn.Module):
            raise TypeError(f"t is {type(t).__name__}: expected a tensor or a module")
        if self._registry.near is not None:
            named = {"t": t} if isinstance(t, Tensor) else dict([*t.named_parameters(), *t.named_buffers()])
            move(self._registry.near.arena, named)
        return t
