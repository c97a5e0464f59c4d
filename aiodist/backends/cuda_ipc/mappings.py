"""What one rank lends the others of its host, and what it has of theirs.

A rank *lends* a storage under a number of its own, which it never uses again. It sends the ranks that work in it a
description of the storage until each of them has said that the description arrived; from then on it sends the number
alone. Beside other processes the driver takes up to a tenth of a second for a description (an H100 in a virtual
machine), so a rank that only hears of the storage gets none. The rank knows a storage by torch's own object, to which
it keeps a weak reference, and not by its address, which another storage may have later. When a storage dies, or is
resized, the next announcement names its number to the ranks that had it. They then close their mapping, and until then
torch keeps the memory: see [Note: kept memory].

[Note: loans] One operation is one *loan*: it announces a tensor to some ranks, describes it to those who work in it,
and hears of theirs. It ends when those have said that they have finished with it, so each of them knows the number by
then. A rank declares a number dead only when no loan uses it. So messages of several operations may arrive in any
order, and no rank hears of a number after it was declared dead. A loan that failed never ends: what it used stays
mapped when all is closed, since kernels that use it may still be queued.

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
    known: bool
    """The rank that hears of it has its description already."""
    place: str
    """The physical device that it lies on."""
    refusal: str | None = None
    """What failed before it came to that."""


class _Lent:
    """A storage of this rank."""

    def __init__(self, number: int, t: Tensor) -> None:
        storage = t.untyped_storage()
        self.number = number
        self.start = storage.data_ptr()
        self._nbytes = storage.nbytes()
        self._storage = StorageWeakRef(storage)
        self.descriptions: dict[int, bytes] = {}
        """Of each rank that works in it."""
        self.known: set[int] = set()
        """The ranks that are known to have their description."""
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

    def describe(self, lent: _Lent, t: Tensor, rank: int) -> bytes:
        """Return what `rank` maps the storage of `t` by, made at first use; BackendError where it cannot be mapped."""
        if rank not in lent.descriptions:
            lent.descriptions[rank] = self._mapper.export(t)
        return lent.descriptions[rank]

    def take_dead(self, rank: int) -> Sequence[int]:
        """Return what `rank` is to hear of, once."""
        return self._dead.pop(rank, ())

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
                raise BackendError(f"rank {rank} has lent storage {number} as known, which is not mapped here")
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
    _failure: Exception | None = None
    """Why it cannot be lent."""
    _known: set[int] = field(default_factory=set)
    """The ranks that were told that they have the description."""
    _told: list[int] = field(default_factory=list)
    """Those that it was described to."""
    _heard: dict[int, _Announcement] = field(default_factory=dict)
    _borrowed: dict[int, _Borrowed] = field(default_factory=dict)

    def announce(self, rank: int, failure: Exception | None = None) -> bytes:
        """Return what to tell `rank` of my tensor, or that I failed."""
        failure = failure or self._lend()
        number = offset = 0
        dead: Sequence[int] = ()
        if failure is None and self._lent is not None:
            number, offset = self._lent.number, self._t.data_ptr() - self._lent.start
            dead = self._mappings.take_dead(rank)
            if rank in self._lent.known:
                self._known.add(rank)
        kind, place = dtype_name(self._t.dtype), self._mappings.place(self._t.device)
        refusal = None if failure is None else str(failure)
        return pickle.dumps(
            _Announcement(number, offset, kind, self._t.numel(), dead, rank in self._known, place, refusal)
        )

    def _lend(self) -> Exception | None:
        if self._lent is None and self._failure is None:
            try:
                self._lent = self._mappings.lend(self._t)
            except BackendError as error:
                self._failure = error
        return self._failure

    def describe(self, rank: int, failure: Exception | None = None) -> bytes | None:
        """Return what `rank` is to map my tensor by, or why it cannot; None where I said that it has that already."""
        if rank in self._known:
            return None
        failure = failure or self._lend()
        if failure is None and self._lent is not None:
            try:
                described = self._mappings.describe(self._lent, self._t, rank)
            except BackendError as error:
                failure = error
            else:
                self._told.append(rank)
                return pickle.dumps(described)
        return pickle.dumps(str(failure))

    def hear(self, rank: int, said: bytes, numel: int) -> None:
        """Take what `rank` announces, which is to be `numel` elements.

        Raises BackendError where it failed, MismatchError where it brings something else.
        """
        self._heard[rank] = announced = _Announcement(*pickle.loads(said))
        if announced.refusal is not None:
            raise BackendError(f"rank {rank}: {announced.refusal}")
        if (announced.kind, announced.numel) != (dtype_name(self._t.dtype), numel):
            raise MismatchError(
                f"ranks disagree on an operation by CUDA IPC: rank {rank} brings {announced.numel} {announced.kind}, "
                f"expected were {numel} {dtype_name(self._t.dtype)}"
            )

    def knows(self, rank: int) -> bool:
        """Return whether what `rank` announced was described before."""
        return self._heard[rank].known

    def borrow(self, rank: int, described: bytes | None) -> None:
        """Take what `rank` describes, None where it was before; raise BackendError where it cannot be mapped."""
        description = None if described is None else pickle.loads(described)
        if isinstance(description, str):
            raise BackendError(f"rank {rank}: {description}")
        self._borrowed[rank] = self._mappings.borrow(rank, self._heard[rank].number, description)

    def tensor(self, rank: int) -> Tensor:
        """Return what `rank` has lent, flat; raise BackendError where it cannot be mapped."""
        announced = self._heard[rank]
        memory = self._borrowed[rank].memory(self._t.device)
        size = announced.numel * self._t.dtype.itemsize
        return memory[announced.offset : announced.offset + size].view(self._t.dtype)

    def place(self, rank: int) -> str:
        """Return a name of the physical device that what `rank` announced lies on."""
        return self._heard[rank].place

    def release(self) -> None:
        """Drop what was declared dead to me, which waits for the device.

        So it is done when nothing is queued, and once what is new is mapped: an allocation stays mapped as long as
        some storage in it is.
        """
        for rank, announced in self._heard.items():
            self._mappings.release(rank, announced.dead)

    def end(self) -> None:
        """Say that it is over for all: nobody uses what was lent, and nothing that is queued what was borrowed."""
        for rank in self._borrowed:
            self._mappings.return_to(rank, self._heard[rank].number)
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
