"""Tensors in memory that the ranks of a host map, in an arena per rank or in common tables."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from math import prod
from mmap import mmap
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from aiodist.backends.base import dtype_name
from aiodist.backends.shm.moving import move
from aiodist.backends.shm.tables import HostTable, TableAddress, mapped
from aiodist.collectives import operations
from aiodist.collectives.implementations import Primitives
from aiodist.communicator import pickling
from aiodist.communicator.arguments import CallTerms
from aiodist.communicator.base import Base
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.errors import BackendError, BackendUnavailable
from aiodist.handles import Handle

_CPU = torch.device("cpu")
Shared = TypeVar("Shared", bound=Tensor | nn.Module)


class SharedMemoryCalls(Base):
    """Calls for tensors in shared memory."""

    def arena_empty(
        self,
        shape: int | Sequence[int],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = _CPU,
    ) -> Tensor:
        """Return an uninitialised tensor in memory that the other ranks of this host can map: this rank's *arena*.

        The tensor belongs to this rank. Other ranks access its elements only in collectives, which work in place. Use
        `shared_table` for a tensor that all ranks see.

        Local, from any thread. The calls of the ranks may differ. The result is a plain tensor. Views of the tensor
        have the same properties. Collectives of `impl="shm"` copy none of its bytes, since from issue to end the ranks
        work in one another's tensors. The pages are reserved until the last tensor in them is deleted. The tensor
        remains valid after the communicator was closed or aborted. Without other ranks that share memory, the result is
        that of `torch.empty`. The same holds for a CUDA `device`, whose memory ranks of a host can map anyway
        (`impl="cuda_ipc"`). Raises MemoryError, with the bytes requested, if there are not enough pages.
        """
        size = (shape,) if isinstance(shape, int) else tuple(shape)
        near = self._resources.near
        if near is None or torch.device(device).type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        return near.arena.empty(size, dtype)

    def shared_table(
        self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32, *, timeout: float | None = None
    ) -> Handle[Tensor]:
        """Return a tensor of zeros that all ranks of this host share, so each rank reads the writes of the others.

        Every rank makes this call with the same shape and dtype. Each host has one table, of `shape` elements. The
        ranks of one process (`local`) share a table too. One rank of a host writes, then all read after a barrier:

            table = await coll.shared_table((1_000_000, 64))
            if coll.local_rank == 0:
                table.copy_(torch.load("embedding.pt"))
            await coll.barrier()

        The table is a plain tensor on the CPU. Only the barriers of the program order accesses to the table. In a
        collective that writes to the table, several ranks would write to the same memory. The pages are reserved. These
        pages are freed when the last tensor of the table is deleted on every rank of the host, or the processes are
        killed, since the table has no file name.

        Raises TypeError or ValueError for an impossible shape or dtype. On await, on every rank: MismatchError if ranks
        ask for different tables, MemoryError if a host lacks the pages, BackendUnavailable if ranks of a host share no
        memory (AIODIST_SHM=0), BackendError if a rank cannot map the table, for example without a free descriptor.
        Cost: two `allgather_object`, then a mapping and a descriptor on each rank while tensors of the table live.
        """
        size = _checked_shape(shape, dtype)
        topology = self.topology
        here = topology.ranks_on(topology.host_of[self.rank])
        offer = self._offer(here, prod(size) * dtype.itemsize)
        what = Fingerprint("shared_table", dtype_name(dtype), str(list(size)))
        work = partial(self._shared, here=here, offer=offer)
        return self._issue(what, work, [], [], CallTerms(timeout), partial(_table, size, dtype))

    def _offer(self, here: Sequence[int], nbytes: int) -> HostTable | str | MemoryError | None:
        """Return the table if this rank creates one, None if another rank does, or the reason of a failure."""
        near = self._resources.near
        if len(here) == 1 or not nbytes:
            return None
        if self.backend != "local" and near is None:
            return self._resources.alone
        if self.rank != here[0]:
            return None
        number = 0 if near is None else next(near.table_numbers)
        try:
            return HostTable(self._dispatcher.ranks[self.rank], number, nbytes)
        except MemoryError as error:
            return error

    async def _shared(
        self, p: Primitives, here: Sequence[int], offer: HostTable | str | MemoryError | None
    ) -> tuple[mmap | None, list[tuple[Any, str]]]:
        """Map the table that the first of the ranks `here` offers.

        Return the bytes of the table, and the offer and the failure of each rank. All ranks gather the offers, then the
        failures to map. No rank needs the table's descriptor any more at the end of this program. The program has the
        only reference to the offer, so its end closes the descriptor.
        """
        said: HostTable | TableAddress | str | MemoryError | None = offer
        if isinstance(offer, HostTable):
            said = offer.address
            if self._resources.near is not None:
                for rank in here[1:]:
                    self._resources.near.neighbours[self._dispatcher.ranks[rank]].offer(offer)
        offers = await _of_all(p, said)
        memory, lack = None, ""
        if isinstance(address := offers[here[0]], TableAddress):
            try:
                memory = self._mapped(address, here)
            except (OSError, ValueError) as error:
                lack = f"cannot map rank {here[0]}'s table of {address.nbytes} bytes: {error}"
        lacks = await _of_all(p.afterwards(), lack)
        return memory, list(zip(offers, lacks, strict=True))

    def _mapped(self, address: TableAddress, here: Sequence[int]) -> mmap:
        """Return the bytes of the table, or raise OSError or ValueError if the mapping fails."""
        near = self._resources.near
        if near is None or self.rank == here[0]:  # a descriptor of this process
            return mapped(address.fd, address.nbytes)
        return near.neighbours[address.rank].table(address)

    def arena(self, nbytes: int) -> None:
        """Reserve `nbytes` for later `arena_empty` calls on this rank, until the world is closed.

        Tensors that fit into reserved memory cost no system call. Local. Raises MemoryError as `arena_empty`, and
        ValueError unless `nbytes` is positive.
        """
        self._dispatcher.check_usable()
        if nbytes <= 0:
            raise ValueError(f"nbytes={nbytes}: expected a positive number of bytes")
        if self._resources.near is not None:
            self._resources.near.arena.reserve(nbytes)

    def to_arena_(self, t: Shared) -> Shared:
        """Move a tensor or a module into this rank's arena, in place, as if `arena_empty` had made it. Return `t`.

        All tensors with the same storage move too. A module moves with all parameters and buffers, tied ones once.
        Gradients in buckets of `aiodist.nn` are there already. Parameters stay the same objects, for optimizers, hooks,
        graphs, `state_dict`, `deepcopy` and `torch.save`. Three things differ: the tensors cannot grow (`resize_`), a
        forked child has the same memory instead of a copy, and an address taken before (`data_ptr()`, DLPack) is
        invalid.

        The call is local and works from any thread, while no other code uses the tensors. The calls of the ranks may
        differ. Tensors in the arena stay. If no other rank shares memory with this one, nothing moves.

        Raises:
            TypeError: for an argument that is neither tensor nor module.
            ValueError: with nothing moved, for a tensor that is not on the CPU, not dense, or a wrapper of other
                tensors, or whose storage is more than twice as large. The same for memory that torch does not own:
                `.numpy()` was called, numpy or a file has the memory, or other processes share the memory.
            BufferInFlight: if an operation uses a tensor.
            BackendUnavailable: if torch is older than 2.13.
            MemoryError: as `arena_empty`, with the number of moved storages.

        Cost: each storage is copied once, exists twice during the copy, and then takes whole pages.
        """
        if not isinstance(t, Tensor | nn.Module):
            raise TypeError(f"t is {type(t).__name__}: expected a tensor or a module")
        if self._resources.near is not None:
            named = {"t": t} if isinstance(t, Tensor) else dict([*t.named_parameters(), *t.named_buffers()])
            move(self._resources.near.arena, named)
        return t


async def _of_all(p: Primitives, mine: object) -> list[Any]:
    """Return each rank's object."""
    (parts,) = await operations.allgather(p, [pickling.pack(mine)])
    return pickling.unpack_each(list(parts))


def _table(size: Sequence[int], dtype: torch.dtype, found: tuple[mmap | None, list[tuple[Any, str]]]) -> Tensor:
    """Return the table, from its bytes and the offer and failure of each rank, or raise if a rank has failed."""
    memory, said = found
    for rank, (offer, lack) in enumerate(said):
        if isinstance(offer, MemoryError):
            raise MemoryError(f"shared_table on rank {rank}: {offer}")
        if isinstance(offer, str):
            raise BackendUnavailable(
                f"shared_table: rank {rank} shares no memory with the ranks of its host: {offer}; expected shared "
                "memory, or one rank per host"
            )
        if lack:
            raise BackendError(f"shared_table: rank {rank} {lack}")
    if memory is None:
        return torch.zeros(tuple(size), dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=prod(size)).view(tuple(size))


def _checked_shape(shape: int | Sequence[int], dtype: object) -> tuple[int, ...]:
    """Return `shape` as a tuple, or raise TypeError or ValueError if no tensor of `dtype` can have this shape."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {type(dtype).__name__}: expected a torch.dtype")
    try:
        sides = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
    except TypeError:
        raise TypeError(f"shape is {shape!r}: expected an int, or a list of ints") from None
    if min(sides, default=0) < 0:
        raise ValueError(f"shape is {list(sides)}: expected sides of 0 or more")
    return sides
