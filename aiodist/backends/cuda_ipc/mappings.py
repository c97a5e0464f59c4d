"""What one rank lends the others of its host, and what it has of theirs.

A rank *lends* a storage under a number of its own, which it never uses again. It sends the other ranks a description of
the storage until each of them has said that the description arrived; from then on it sends the number alone. The rank
knows a storage by torch's own object, to which it keeps a weak reference, and not by its address, which another storage
may have later. When a storage dies, or is resized, the next announcement names its number to the ranks that had it.
They then close their mapping, and until then torch keeps the memory: see [Note: kept memory].

[Note: loans] One operation is one *loan*: it announces a tensor to some ranks and hears of theirs. It ends when all of
these ranks have said that they have finished with it, so each of them has heard of the number by then. A rank declares
a number dead only when no loan uses it. So messages of several operations may arrive in any order, and no rank hears of
a number after it was declared dead. A loan that failed never ends: what it used stays mapped when all is closed, since
kernels that use it may still be queued.

Everything here runs with the transport lock held.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from aiodist.backends.base import dtype_name
from aiodist.backends.cuda_ipc.mapping import Mapped, Mapper, address_of, living
from aiodist.errors import BackendError, MismatchError
from aiodist.handles import Progress
from aiodist.handles.progress import transport_lock
from aiodist.handles.timers import Quiet

if TYPE_CHECKING:
    from aiodist.control import Channel

_TOPIC = "cuda_ipc"
_LOOK_SECONDS = 1.0


class _Announcement(NamedTuple):
    """What a rank says of its tensor in an operation."""

    number: int
    offset: int
    """Of the tensor in its storage, in bytes."""
    kind: str
    numel: int
    dead: Sequence[int]
    """Numbers of storages to let go of."""
    description: bytes | None
    place: str = ""
    """The physical device that it lies on."""
    refusal: str | None = None
    """Why the tensor cannot be mapped; None where it can."""


class _Lent:
    """A storage of this rank."""

    def __init__(self, number: int, t: Tensor) -> None:
        storage = t.untyped_storage()
        self.number = number
        self.start = storage.data_ptr()
        self._nbytes = storage.nbytes()
        self._storage = StorageWeakRef(storage)
        self.descriptions: dict[int, bytes] = {}
        """Of each rank that it was announced to."""
        self.known: set[int] = set()
        """The ranks that are known to have heard of it."""
        self.users = 0
        """How many loans use it."""
        self.forgotten = False

    @property
    def dead(self) -> bool:
        """Whether its memory is given up: the storage died, or was resized."""
        storage = living(self._storage.cdata)
        return storage is None or (storage.data_ptr(), storage.nbytes()) != (self.start, self._nbytes)


@dataclass(eq=False)
class _Borrowed:
    """A storage of another rank, mapped by the first loan that looks into it."""

    _mapper: Mapper
    _description: bytes
    _mapped: Mapped | None = None
    _device: torch.device = torch.device("cpu")  # noqa: RUF009  - it never changes
    users: int = 0
    dead: bool = False

    def memory(self, device: torch.device) -> Tensor:
        if self._mapped is None:
            self._mapped = self._mapper.open(self._description, device)
            self._device = device
        if self._device != device:  # a description is opened once
            raise BackendError(f"memory of another rank is mapped on {self._device}: it cannot be on {device} too")
        return self._mapped.memory()

    def close(self) -> None:
        if self._mapped is None:
            self._mapper.discard(self._description)
        else:
            self._mapped.close()


class Mappings:
    """See the module; one for each rank of a world, which all its communicators share.

    Other ranks are named by numbers that are the same in all communicators: those of the world. Close it before the
    ranks part for good: torch warns of processes that end while others have their memory mapped.
    """

    def __init__(self, mapper: Mapper | None = None) -> None:
        self._mapper = mapper or Mapper()
        self._numbers = itertools.count(1)
        self._lent: dict[int, _Lent] = {}  # by torch's object
        self._dead: dict[int, list[int]] = {}  # what each rank is still to hear of
        self._borrowed: dict[tuple[int, int], _Borrowed] = {}  # by rank and its number
        self._closed = False

    async def aclose(self) -> None:
        """Let go of everything but what a loan still uses; all operations are over, or given up."""
        with transport_lock:
            self._closed = True
            for key, borrowed in list(self._borrowed.items()):
                if not borrowed.users:
                    borrowed.close()
                    del self._borrowed[key]
            self._lent = {key: lent for key, lent in self._lent.items() if lent.users}
            self._dead.clear()

    # --- lending ----------------------------------------------------------------------------------------------

    def lend(self, t: Tensor) -> _Lent:
        """Return what the storage of `t` is lent as, in use until `release_loan`."""
        if self._closed:
            raise BackendError("memory is shared with ranks whose communicator is closed")
        key = address_of(t.untyped_storage())
        self._forget_dead()
        lent = self._lent.get(key)
        if lent is not None and lent.dead:  # it was resized while another loan uses what it was
            self._forget(key)
            lent = None
        if lent is None:
            # Once it is described to others torch's allocator takes no more notes of who reads it.
            if t.is_cuda:
                t.record_stream(torch.cuda.default_stream(t.device))
            lent = self._lent[key] = _Lent(next(self._numbers), t)
        lent.users += 1
        return lent

    def release_loan(self, lent: _Lent) -> None:
        """Say that a loan of it is over."""
        lent.users -= 1
        if lent.forgotten and not lent.users:
            self._declare_dead(lent)

    def announce(self, lent: _Lent, t: Tensor, rank: int) -> bytes:
        if rank not in lent.descriptions:
            lent.descriptions[rank] = self._mapper.export(t)
        return pickle.dumps(
            _Announcement(
                lent.number,
                t.data_ptr() - lent.start,
                dtype_name(t.dtype),
                t.numel(),
                self._dead.pop(rank, ()),
                None if rank in lent.known else lent.descriptions[rank],
                self.place(t.device),
            )
        )

    def place(self, device: torch.device) -> str:
        """Return a name of the physical device, the same on all ranks."""
        return self._mapper.place(device)

    def collect_dead(self) -> Mapping[int, Sequence[int]]:
        """Forget all that died, and return what each rank is to `release`, unless it has heard of it already."""
        self._forget_dead()
        told, self._dead = self._dead, {}
        return told

    def _forget_dead(self) -> None:
        for key, lent in list(self._lent.items()):
            if lent.dead and not lent.users:
                self._forget(key)

    def _forget(self, key: int) -> None:
        lent = self._lent.pop(key)
        lent.forgotten = True
        if not lent.users:
            self._declare_dead(lent)

    def _declare_dead(self, lent: _Lent) -> None:
        for rank in lent.descriptions:
            self._dead.setdefault(rank, []).append(lent.number)

    # --- borrowing --------------------------------------------------------------------------------------------

    def borrow(self, rank: int, number: int, description: bytes | None) -> _Borrowed:
        """Return a storage of `rank`, in use until `return_to`."""
        borrowed = self._borrowed.get((rank, number))
        if borrowed is None:
            if description is None or self._closed:
                raise BackendError(f"rank {rank} has announced storage {number} as known, which is not mapped here")
            borrowed = self._borrowed[rank, number] = _Borrowed(self._mapper, description)
        borrowed.users += 1
        return borrowed

    def return_to(self, rank: int, number: int) -> None:
        """Say that a loan of what `rank` lends is over."""
        borrowed = self._borrowed.get((rank, number))
        if borrowed is not None:
            borrowed.users -= 1
            self._release(rank, number, borrowed)

    def release(self, rank: int, numbers: Sequence[int]) -> None:
        """Let go of what `rank` has declared dead, as soon as no loan uses it."""
        for number in numbers:
            borrowed = self._borrowed.get((rank, number))
            if borrowed is not None:
                borrowed.dead = True
                self._release(rank, number, borrowed)

    def _release(self, rank: int, number: int, borrowed: _Borrowed) -> None:
        if borrowed.dead and not borrowed.users:
            del self._borrowed[rank, number]
            borrowed.close()


@dataclass(eq=False)
class Loan:
    """What one operation lends and borrows; see [Note: loans]."""

    _mappings: Mappings
    _t: Tensor
    """What it lends, or a tensor of the kind and on the device that it borrows for."""
    _lent: _Lent | None = None
    _told: list[int] = field(default_factory=list)
    _heard: dict[int, tuple[_Announcement, _Borrowed]] = field(default_factory=dict)

    def announce(self, rank: int, failure: Exception | None = None) -> bytes:
        """Return what to tell `rank` of my tensor; where it cannot be mapped, or I failed, that says why."""
        if failure is None:
            try:
                if self._lent is None:
                    self._lent = self._mappings.lend(self._t)
                said = self._mappings.announce(self._lent, self._t, rank)
            except BackendError as error:
                failure = error
            else:
                self._told.append(rank)
                return said
        return pickle.dumps(
            _Announcement(0, 0, dtype_name(self._t.dtype), self._t.numel(), (), None, refusal=str(failure))
        )

    def hear(self, rank: int, said: bytes, numel: int) -> None:
        """Take what `rank` announces, which is to be `numel` elements.

        Raises BackendError where it has nothing that can be mapped, MismatchError where it brings something else.
        """
        announced = _Announcement(*pickle.loads(said))
        if announced.refusal is not None:
            raise BackendError(f"rank {rank}: {announced.refusal}")
        borrowed = self._mappings.borrow(rank, announced.number, announced.description)
        self._heard[rank] = announced, borrowed
        if (announced.kind, announced.numel) != (dtype_name(self._t.dtype), numel):
            raise MismatchError(
                f"ranks disagree on an operation by CUDA IPC: rank {rank} brings {announced.numel} {announced.kind}, "
                f"expected were {numel} {dtype_name(self._t.dtype)}"
            )

    def tensor(self, rank: int) -> Tensor:
        """Return what `rank` announced, flat; raise BackendError where it cannot be mapped."""
        announced, borrowed = self._heard[rank]
        memory = borrowed.memory(self._t.device)
        size = announced.numel * self._t.dtype.itemsize
        return memory[announced.offset : announced.offset + size].view(self._t.dtype)

    def place(self, rank: int) -> str:
        """Return a name of the physical device that what `rank` announced lies on."""
        return self._heard[rank][0].place

    def release(self) -> None:
        """Drop what was declared dead to me, which waits for the device.

        So it is done when nothing is queued, and once what is new is mapped: an allocation stays mapped as long as
        some storage in it is.
        """
        for rank, (announced, _) in self._heard.items():
            self._mappings.release(rank, announced.dead)

    def end(self) -> None:
        """Say that it is over for all: nobody uses what was lent, and nothing that is queued what was borrowed."""
        for rank, (announced, _) in self._heard.items():
            self._mappings.return_to(rank, announced.number)
        if self._lent is not None:
            self._lent.known.update(self._told)
            self._mappings.release_loan(self._lent)


class ReleaseNotices(Quiet):
    """Looks once a second for what died of what one rank lends, and tells those who have heard of it.

    So memory goes back also where no operation follows that would tell. It goes by the control channel: a number is
    declared dead when all to whom it was announced have heard of it, so this comes behind all that was said of it.
    """

    def __init__(self, mappings: Mappings, progress: Progress, channel: Channel) -> None:
        self._mappings = mappings
        self._progress = progress
        self._channel = channel
        channel.subscribe(_TOPIC, self._told)
        self._next = progress.loop.call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._next = self._progress.loop.call_later(_LOOK_SECONDS, self._look)
        self._progress.start(self._tell)

    def _tell(self) -> None:
        for rank, numbers in self._mappings.collect_dead().items():
            self._channel.send(rank, _TOPIC, numbers)

    def _told(self, rank: int, numbers: Sequence[int]) -> None:
        """Let go of what `rank` has declared dead; called on the channel's thread."""
        self._progress.post(partial(self._progress.start, partial(self._mappings.release, rank, numbers)))

    def close(self) -> None:
        """Look no more; on the loop."""
        self._next.cancel()
        with suppress(RuntimeError):  # it is closed already, where all was given up
            self._channel.unsubscribe(_TOPIC)
