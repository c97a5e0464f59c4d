"""What one rank lends the others of its host, and what it has of theirs.

A rank *lends* a storage under a number of its own, which it never uses again. It announces it to the ranks that work in
it, with a description until each of them has said that it has that; from then on with the number alone. The driver may
take up to a tenth of a second for a description (an H100 in a virtual machine), so no other rank gets one. The rank
knows a storage by torch's own object, to which it keeps a weak reference, and not by its address, which another storage
may have later. When a storage dies, or is resized, an announcement soon names its number to the ranks that had it. They
then close their mapping, and until then torch keeps the memory: see [Note: kept memory].

[Note: loans] One operation is one *loan*: it announces a tensor to the ranks that work in it, and hears of theirs. It
ends when those have said that they have finished with it, so each of them knows the number by
then. A rank declares a number dead only when no loan uses it. So messages of several operations may arrive in any
order, and no rank hears of a number after it was declared dead. A loan that failed never ends: what it used stays
mapped when all is closed, since kernels that use it may still be queued.

Everything here runs with the transport lock held.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from aiodist.backends.base import DTYPES, dtype_code, dtype_name
from aiodist.backends.cuda_ipc.mapping import REMEDY, Mapped, Mapper, address_of, living
from aiodist.errors import BackendError, MismatchError
from aiodist.handles import Progress
from aiodist.handles.progress import transport_lock
from aiodist.handles.timers import Quiet

if TYPE_CHECKING:
    from aiodist.control import Channel

_HEAD = struct.Struct("<BBHIqqq")
"""What a frame is, the dtype, the bytes of text, how many numbers are dead; then number, offset, elements."""

_KNOWN, _DESCRIBED, _REFUSED = range(3)
_MOST_DEAD = 8  # that one frame tells of; the rest goes with the next one
_DESCRIPTION_BYTES = 400  # torch's have 300
FRAME_BYTES = 512
"""Of an announcement: numbers of storages that died, and a description or why there is none."""

_TOPIC = "cuda_ipc"
LOOK_SECONDS = 1.0
_PART_SECONDS, _PART_LOOK_SECONDS = 2.0, 1e-3


class _Announcement(NamedTuple):
    """What a rank says of its tensor in an operation."""

    number: int
    offset: int
    """Of the tensor in its storage, in bytes."""
    numel: int
    dead: Sequence[int]
    """Numbers of storages to let go of."""


class _Lent:
    """A storage of this rank."""

    def __init__(self, number: int, t: Tensor) -> None:
        storage = t.untyped_storage()
        self.number = number
        self.start = storage.data_ptr()
        self.nbytes = storage.nbytes()
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
        return storage is None or not self.is_all_of(storage)

    def is_all_of(self, storage: torch.UntypedStorage) -> bool:
        """Return whether `storage`, which this is, has the size that it had."""
        return (storage.data_ptr(), storage.nbytes()) == (self.start, self.nbytes)


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
        self.lent: dict[int, _Lent] = {}  # by torch's object
        self._dead: dict[int, list[int]] = {}  # what each rank is still to hear of
        self.borrowed: dict[tuple[int, int], _Borrowed] = {}  # by rank and its number
        self._closed = False
        self.borrowers: set[int] = set()
        """The ranks that anything was ever described to."""
        self.lenders: set[int] = set()
        """Those that have described anything to this one."""

    async def aclose(self) -> None:
        """Let go of everything but what a loan still uses; all operations are over, or given up."""
        with transport_lock:
            self._closed = True
            for key, borrowed in list(self.borrowed.items()):
                if not borrowed.users:
                    borrowed.close()
                    del self.borrowed[key]
            self.lent = {key: lent for key, lent in self.lent.items() if lent.users}
            self._dead.clear()

    def collect(self) -> None:
        """Give back the memory that died and that all others have let go of."""
        if self.borrowers:
            self._mapper.collect()

    # --- lending ----------------------------------------------------------------------------------------------

    def lend(self, t: Tensor) -> _Lent:
        """Return what the storage of `t` is lent as, in use until `release_loan`."""
        if self._closed:
            raise BackendError("memory is shared with ranks whose communicator is closed")
        storage = t.untyped_storage()
        key = address_of(storage)
        lent = self.lent.get(key)  # living: a weak reference keeps another storage from having the key
        if lent is None or not lent.is_all_of(storage):
            self._forget_dead()
            if key in self.lent:  # it was resized while another loan uses what it was
                self._forget(key)
            # Once it is described to others torch's allocator takes no more notes of who reads it.
            if t.is_cuda:
                t.record_stream(torch.cuda.default_stream(t.device))
            lent = self.lent[key] = _Lent(next(self._numbers), t)
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
            self.borrowers.add(rank)
        return lent.descriptions[rank]

    def take_dead(self, rank: int) -> Sequence[int]:
        """Return what `rank` is to hear of, once; of much, a part."""
        dead = self._dead.pop(rank, ())
        if len(dead) > _MOST_DEAD:
            self._dead[rank] = list(dead[_MOST_DEAD:])
        return dead[:_MOST_DEAD]

    def collect_dead(self) -> Mapping[int, Sequence[int]]:
        """Forget all that died, and return what each rank is to `release`, unless it has heard of it already."""
        self._forget_dead()
        told, self._dead = self._dead, {}
        return told

    def _forget_dead(self) -> None:
        for key, lent in list(self.lent.items()):
            if lent.dead and not lent.users:
                self._forget(key)

    def _forget(self, key: int) -> None:
        lent = self.lent.pop(key)
        lent.forgotten = True
        if not lent.users:
            self._declare_dead(lent)

    def _declare_dead(self, lent: _Lent) -> None:
        for rank in lent.descriptions:
            self._dead.setdefault(rank, []).append(lent.number)

    # --- borrowing --------------------------------------------------------------------------------------------

    def borrow(self, rank: int, number: int, description: bytes | None) -> _Borrowed:
        """Return a storage of `rank`, in use until `return_to`."""
        borrowed = self.borrowed.get((rank, number))
        if borrowed is None:
            if description is None or self._closed:
                raise BackendError(f"rank {rank} has lent storage {number} as known, which is not mapped here")
            borrowed = self.borrowed[rank, number] = _Borrowed(self._mapper, description)
            self.lenders.add(rank)
        borrowed.users += 1
        return borrowed

    def return_to(self, rank: int, number: int) -> None:
        """Say that a loan of what `rank` lends is over."""
        borrowed = self.borrowed.get((rank, number))
        if borrowed is not None:
            borrowed.users -= 1
            self._release(rank, number, borrowed)

    def release(self, rank: int, numbers: Sequence[int]) -> None:
        """Let go of what `rank` has declared dead, as soon as no loan uses it."""
        for number in numbers:
            borrowed = self.borrowed.get((rank, number))
            if borrowed is not None:
                borrowed.dead = True
                self._release(rank, number, borrowed)

    def _release(self, rank: int, number: int, borrowed: _Borrowed) -> None:
        if borrowed.dead and not borrowed.users:
            del self.borrowed[rank, number]
            borrowed.close()


class Loan:
    """What one operation lends and borrows; see [Note: loans]."""

    def __init__(self, mappings: Mappings, t: Tensor) -> None:
        """`t` is what it lends, or a tensor of the kind and on the device that it borrows for."""
        self._mappings = mappings
        self._t = t
        self._lent: _Lent | None = None
        self._told: list[int] = []
        """The ranks that it was described to."""
        self._heard: dict[int, _Announcement] = {}
        self._borrowed: dict[int, _Borrowed] = {}

    def announce(self, rank: int, failure: Exception | None = None) -> bytearray:
        """Return the frame that tells `rank` of my tensor, or that I failed."""
        t = self._t
        if failure is None:
            try:
                lent, description = self._describe(rank)
            except BackendError as error:
                failure = error
            else:
                state = _KNOWN if description is None else _DESCRIBED
                offset, dead = t.data_ptr() - lent.start, self._mappings.take_dead(rank)
                return _frame(state, t.dtype, (lent.number, offset, t.numel()), dead, description or b"")
        return _frame(_REFUSED, t.dtype, (0, 0, 0), (), str(failure).encode()[: FRAME_BYTES - _HEAD.size])

    def _describe(self, rank: int) -> tuple[_Lent, bytes | None]:
        """Return what I lend, and what `rank` maps it by unless it is known to have that."""
        if self._lent is None:
            self._lent = self._mappings.lend(self._t)
        if rank in self._lent.known:
            return self._lent, None
        description = self._mappings.describe(self._lent, self._t, rank)
        if len(description) > _DESCRIPTION_BYTES:
            raise BackendError(f"memory of {self._t.device} has a description of {len(description)} bytes: {REMEDY}")
        self._told.append(rank)
        return self._lent, description

    def hear(self, rank: int, frame: bytearray, numel: int) -> None:
        """Take what `rank` announces, which is to be `numel` elements, and borrow it.

        Raises BackendError where it failed, MismatchError where it brings something else.
        """
        state, kind, length, dead, number, offset, brought = _HEAD.unpack_from(frame)
        start = _HEAD.size + 8 * dead
        text = bytes(frame[start : start + length])
        if state == _REFUSED:
            raise BackendError(f"rank {rank}: {text.decode(errors='replace')}")
        numbers = struct.unpack_from(f"<{dead}q", frame, _HEAD.size) if dead else ()
        self._heard[rank] = _Announcement(number, offset, brought, numbers)
        self._borrowed[rank] = self._mappings.borrow(rank, number, text if state == _DESCRIBED else None)
        if (kind, brought) != (dtype_code(self._t.dtype), numel):
            raise MismatchError(
                f"ranks disagree on an operation by CUDA IPC: rank {rank} brings {brought} {dtype_name(DTYPES[kind])}, "
                f"expected were {numel} {dtype_name(self._t.dtype)}"
            )

    def tensor(self, rank: int) -> Tensor:
        """Return what `rank` has lent, flat; raise BackendError where it cannot be mapped."""
        announced = self._heard[rank]
        memory = self._borrowed[rank].memory(self._t.device)
        size = announced.numel * self._t.dtype.itemsize
        return memory[announced.offset : announced.offset + size].view(self._t.dtype)

    def release(self) -> None:
        """Drop what was declared dead to me, which waits for the device.

        So it is done when nothing is queued, and once what is new is mapped: an allocation stays mapped as long as
        some storage in it is.
        """
        for rank, announced in self._heard.items():
            if announced.dead:
                self._mappings.release(rank, announced.dead)

    def end(self) -> None:
        """Say that it is over for all: nobody uses what was lent, and nothing that is queued what was borrowed."""
        for rank in self._borrowed:
            self._mappings.return_to(rank, self._heard[rank].number)
        if self._lent is not None:
            self._lent.known.update(self._told)
            self._mappings.release_loan(self._lent)


def _frame(state: int, kind: torch.dtype, where: tuple[int, int, int], dead: Sequence[int], text: bytes) -> bytearray:
    frame = bytearray(FRAME_BYTES)
    _HEAD.pack_into(frame, 0, state, dtype_code(kind), len(text), len(dead), *where)
    start = _HEAD.size
    if dead:
        struct.pack_into(f"<{len(dead)}q", frame, start, *dead)
        start += 8 * len(dead)
    if text:
        frame[start : start + len(text)] = text
    return frame


class ReleaseNotices(Quiet):
    """Looks once a second for what died of what one rank lends, and tells those who have heard of it.

    So memory goes back also where no operation follows that would tell. It goes by the control channel: a number is
    declared dead when all to whom it was announced have heard of it, so this comes behind all that was said of it.
    """

    def __init__(self, mappings: Mappings, progress: Progress, channel: Channel) -> None:
        self._mappings = mappings
        self._progress = progress
        self._channel = channel
        self._parted: set[int] = set()
        channel.subscribe(_TOPIC, self._told)
        self._next = progress.loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._next = self._progress.loop.call_later(LOOK_SECONDS, self._look)
        self._progress.start(self._tell)

    def _tell(self) -> None:
        for rank, numbers in self._mappings.collect_dead().items():
            self._channel.send(rank, _TOPIC, numbers)

    def _told(self, rank: int, numbers: Sequence[int] | None) -> None:
        """Let go of what `rank` has declared dead; None says that it has let go of all; on the channel's thread."""
        if numbers is None:
            self._parted.add(rank)
        else:
            self._progress.post(partial(self._progress.start, partial(self._mappings.release, rank, numbers)))

    async def aclose(self) -> None:
        """Look no more, and let go of everything, the borrowers first.

        What dies while others have it mapped torch gives back at the end of the process if need be. Then it is too late
        for CUDA, which ends the process with SIGABRT where several streams have used that memory.
        """
        self._next.cancel()
        await self._mappings.aclose()
        with suppress(RuntimeError):  # the channel is closed already, where all was given up
            for rank in self._mappings.lenders:
                self._channel.send(rank, _TOPIC, None)
            until = self._progress.loop.time() + _PART_SECONDS
            while self._mappings.borrowers - self._parted - set(self._channel.exits()):
                if self._progress.loop.time() > until:
                    break
                await asyncio.sleep(_PART_LOOK_SECONDS)
            self._channel.unsubscribe(_TOPIC)
        self._mappings.collect()
