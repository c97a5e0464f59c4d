"""Moves existing tensors with all views into an arena, whose memory the storages get.

torch can swap the memory of two storages (`UntypedStorage._swap_data_ptr_`, since 2.13). Tensors, tensors saved by
autograd and tied parameters refer to the storage, not to the memory. So all these tensors use the new memory. No
version counter changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.nn.parameter import is_lazy

from aiodist.backends.shm.memory import Arena
from aiodist.errors import BackendUnavailable
from aiodist.handles import in_flight

_MOST_SPARE = 2  # largest ratio of a storage to the tensors in it: a larger one has other users


class _Moved(NamedTuple):
    """A storage to move, claimed like the output of an operation."""

    start: int
    nbytes: int
    writes: bool
    storage: UntypedStorage
    name: str


def move(arena: Arena, named: Mapping[str, Tensor]) -> None:
    """Move the storages of `named` tensors into `arena`, unless already there.

    Raises BufferInFlight, BackendUnavailable, or ValueError with the name of a tensor that cannot move and the reason.
    No storage has moved then. The text of a MemoryError has the number of moved storages.
    """
    waiting = _found(arena, named)
    if not waiting:
        return
    if not hasattr(UntypedStorage, "_swap_data_ptr_"):
        raise BackendUnavailable(
            f"torch {torch.__version__} cannot move tensors (it has no UntypedStorage._swap_data_ptr_): "
            "expected torch 2.13 or later, or tensors made by arena_empty()"
        )
    claims, moved = [one[:4] for one in waiting], 0
    in_flight.acquire_all(claims, "to_arena_()")
    try:
        for one in waiting:
            old = _exchanged(arena, one.storage)
            in_flight.release_all(claims[moved : moved + 1])  # before the allocator reuses that memory
            moved += 1
            del old
    except MemoryError as error:
        said = f"{one.name} cannot move into the arena: {error}"
        if len(waiting) > 1:
            said += f"; {moved} of {len(waiting)} storages have moved, {one.name} and later ones have not"
        raise MemoryError(said) from error
    finally:
        in_flight.release_all(claims[moved:])


def _exchanged(arena: Arena, storage: UntypedStorage) -> Tensor:
    """Give `storage` memory of the arena with the same bytes. Return a tensor of the old memory."""
    block = arena.empty((storage.nbytes(),), torch.uint8)
    other = block.untyped_storage()
    other.copy_(storage)
    storage._swap_data_ptr_(other)  # type: ignore[attr-defined]
    return block


def _found(arena: Arena, named: Mapping[str, Tensor]) -> list[_Moved]:
    """Return the storages outside the arena, each once, in order, or raise ValueError for one that cannot move."""
    found: dict[int, _Moved] = {}
    seen: dict[int, set[tuple[int, int]]] = {}
    for name, t in named.items():
        storage = _storage_of(name, t)
        start, nbytes = storage.data_ptr(), storage.nbytes()
        if not nbytes or arena.locate(start, nbytes) is not None:
            continue
        _check_own(name, t, storage)
        found.setdefault(start, _Moved(start, nbytes, True, storage, name))
        seen.setdefault(start, set()).add((t.data_ptr(), t.nbytes))
    for one in found.values():
        used = sum(nbytes for _, nbytes in seen[one.start])
        if one.nbytes > _MOST_SPARE * used:
            raise ValueError(
                f"{one.name} has {used} bytes of a storage of {one.nbytes}, which would move as a whole: "
                f"expected at least {-(-one.nbytes // _MOST_SPARE)}, see clone()"
            )
    return list(found.values())


def _storage_of(name: str, t: Tensor) -> UntypedStorage:
    """Return the storage of `t`, or raise ValueError if `t` has none in host memory."""
    if is_lazy(t):
        raise ValueError(f"{name} is uninitialized: expected a module that was called once, or one with known sizes")
    if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ValueError(f"{name} is a {type(t).__name__}, which wraps other tensors: expected a plain tensor")
    if t.layout is not torch.strided:
        raise ValueError(f"{name} has layout {t.layout}: expected a dense tensor (torch.strided)")
    if not t.is_cpu:
        raise ValueError(f"{name} is on {t.device}: expected the CPU, since the arena is host memory")
    try:
        t.data_ptr()  # makes the copy of a lazily copied tensor
        storage = t.untyped_storage()
        storage.data_ptr()
        return storage
    except RuntimeError as error:  # within torch.vmap and similar functions
        raise ValueError(f"{name} has no memory of its own: expected a plain tensor") from error


def _check_own(name: str, t: Tensor, storage: UntypedStorage) -> None:
    """Raise ValueError if other objects have the address of the storage's memory."""
    if t.is_shared():
        raise ValueError(f"{name} is shared with other processes already (share_memory_): expected memory of its own")
    if t.is_pinned():
        raise ValueError(f"{name} is pinned for a CUDA device: expected memory that is not pinned")
    if not storage.resizable():
        raise ValueError(
            f"{name} has memory that torch does not own (of numpy, a file, torch.load): "
            "expected memory that torch allocated for this tensor, see clone()"
        )
