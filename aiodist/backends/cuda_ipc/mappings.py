"""CUDA storages that this rank lends to the others of its host, and mappings of the others' storages.

A rank *lends* a storage under a unique number. The rank announces the storage to the ranks that use the storage. An
announcement has a description until the other rank has acknowledged the description. Later announcements have only the
number. A description may take up to a tenth of a second in the driver (an H100 in a virtual machine), so a rank makes
descriptions only for ranks that use the storage. The rank identifies a storage by a weak reference to torch's object,
not by the address, which another storage may have later. When a storage dies or is resized, the next announcement to
each mapping rank also has the dead number. That rank then closes the mapping. Until then torch keeps the memory (see
[Note: kept memory]).

[Note: loans] An operation has one *loan*, which announces a tensor to the other ranks and receives their announcements.
A loan ends when these ranks have finished with the tensor. So each of these ranks knows the number by then. A rank
declares a number dead only when no loan uses that number. Messages of several operations may therefore arrive in any
order. No rank receives a number after its declaration as dead. A failed loan never ends. The memory stays mapped after
the close, since queued kernels may still use the memory.

Everything here runs with the transport lock held.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from aiodist.backends.base import DTYPES, dtype_code, dtype_name
from aiodist.backends.cuda_ipc.mapping import REMEDY, Mapped, Mapper, address_of, living
from aiodist.control import disagreement
from aiodist.errors import BackendError, MismatchError
from aiodist.handles import Progress
from aiodist.handles.polling import transport_lock
from aiodist.handles.timers import Quiet

if TYPE_CHECKING:
    from aiodist.control import Channel

_HEAD = struct.Struct("<BBHIqqq")
"""Kind of the frame, dtype, bytes of text, count of dead numbers, then number, offset, elements."""

_KNOWN, _DESCRIBED, _FAILED = range(3)
_MOST_DEAD = 8  # dead numbers in one frame; the next frame has the rest
_DESCRIPTION_BYTES = 400  # torch's have 300
FRAME_BYTES = 512
"""Bytes of an announcement: numbers of dead storages, then a description or the reason for a missing one."""

_TOPIC = "cuda_ipc"
LOOK_SECONDS = 1.0
_PART_SECONDS, _PART_LOOK_SECONDS = 2.0, 1e-3


class _Announcement(NamedTuple):
    """A rank's tensor in an operation."""

    number: int
    offset: int
    """Offset of the tensor in its storage, in bytes."""
    numel: int
    dead: Sequence[int]
    """Numbers of storages whose mappings to close."""


class _Lent:
    """A storage of this rank."""

    def __init__(self, number: int, t: Tensor) -> None:
        storage = t.untyped_storage()
        self.number = number
        self.start = storage.data_ptr()
        self.nbytes = storage.nbytes()
        self._storage = StorageWeakRef(storage)
        self.descriptions: dict[int, bytes] = {}
        """Descriptions, by mapping rank."""
        self.known: set[int] = set()
        """Ranks that have acknowledged a description."""
        self.users = 0
        """Number of loans of the storage."""
        self.forgotten = False

    @property
    def dead(self) -> bool:
        """True if the storage died or was resized."""
        storage = living(self._storage.cdata)
        return storage is None or not self.is_all_of(storage)

    def is_all_of(self, storage: torch.UntypedStorage) -> bool:
        """Return True if `storage` still has the memory and size of the loan."""
        return (storage.data_ptr(), storage.nbytes()) == (self.start, self.nbytes)


@dataclass(eq=False)
class _Borrowed:
    """A storage of another rank, mapped by the first loan of that storage."""

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
    """Lent and borrowed storages of one rank, shared by all communicators of the world.

    Ranks are world ranks. Close this object before the connection to the ranks, since torch warns if a process ends
    while others map its memory.
    """

    def __init__(self, mapper: Mapper | None = None) -> None:
        self._mapper = mapper or Mapper()
        self._numbers = itertools.count(1)
        self.lent: dict[int, _Lent] = {}  # by torch's identifier of the storage
        self._dead: dict[int, list[int]] = {}  # dead numbers to announce, by rank
        self.borrowed: dict[tuple[int, int], _Borrowed] = {}  # by rank and number
        self._closed = False
        self.borrowers: set[int] = set()
        """Ranks that have got a description from this one."""
        self.lenders: set[int] = set()
        """Ranks whose descriptions have arrived here."""

    async def aclose(self) -> None:
        """Close all mappings that no loan uses. All operations have ended or were aborted."""
        with transport_lock:
            self._closed = True
            for key, borrowed in list(self.borrowed.items()):
                if not borrowed.users:
                    borrowed.close()
                    del self.borrowed[key]
            self.lent = {key: lent for key, lent in self.lent.items() if lent.users}
            self._dead.clear()

    def collect(self) -> None:
        """Free the memory of dead storages that no other rank has mapped."""
        if self.borrowers:
            self._mapper.collect()

    # --- lending ----------------------------------------------------------------------------------------------

    def lend(self, t: Tensor) -> _Lent:
        """Lend the storage of `t`, until `release_loan`."""
        if self._closed:
            raise BackendError("memory is shared with ranks whose communicator is closed")
        storage = t.untyped_storage()
        key = address_of(storage)
        lent = self.lent.get(key)  # alive: the weak reference reserves the key
        if lent is None or not lent.is_all_of(storage):
            self._forget_dead()
            if key in self.lent:  # resized while another loan uses the old memory
                self._forget(key)
            # The allocator ignores `record_stream` once a storage has a description.
            if t.is_cuda:
                t.record_stream(torch.cuda.default_stream(t.device))
            lent = self.lent[key] = _Lent(next(self._numbers), t)
        lent.users += 1
        return lent

    def release_loan(self, lent: _Lent) -> None:
        """End a loan of a storage of this rank."""
        lent.users -= 1
        if lent.forgotten and not lent.users:
            self._declare_dead(lent)

    def describe(self, lent: _Lent, t: Tensor, rank: int) -> bytes:
        """Return the description of the storage of `t` for `rank`, made at first use, or raise BackendError."""
        if rank not in lent.descriptions:
            lent.descriptions[rank] = self._mapper.export(t)
            self.borrowers.add(rank)
        return lent.descriptions[rank]

    def take_dead(self, rank: int) -> Sequence[int]:
        """Return dead numbers to announce to `rank`, each once, at most `_MOST_DEAD`."""
        dead = self._dead.pop(rank, ())
        if len(dead) > _MOST_DEAD:
            self._dead[rank] = list(dead[_MOST_DEAD:])
        return dead[:_MOST_DEAD]

    def collect_dead(self) -> Mapping[int, Sequence[int]]:
        """Forget all dead storages. Return the numbers to announce to each rank for `release`."""
        self._forget_dead()
        dead, self._dead = self._dead, {}
        return dead

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
        """Borrow a storage of `rank`, until `return_to`."""
        borrowed = self.borrowed.get((rank, number))
        if borrowed is None:
            if description is None or self._closed:
                raise BackendError(f"rank {rank} has lent storage {number} without a description: it is not mapped")
            borrowed = self.borrowed[rank, number] = _Borrowed(self._mapper, description)
            self.lenders.add(rank)
        borrowed.users += 1
        return borrowed

    def return_to(self, rank: int, number: int) -> None:
        """End a loan of a storage of `rank`."""
        borrowed = self.borrowed.get((rank, number))
        if borrowed is not None:
            borrowed.users -= 1
            self._release(rank, number, borrowed)

    def release(self, rank: int, numbers: Sequence[int]) -> None:
        """Close the mappings of dead storages of `rank` as soon as no loan uses these mappings."""
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
    """Storages that one operation lends and borrows (see [Note: loans])."""

    def __init__(self, mappings: Mappings, t: Tensor) -> None:
        """`t` is the tensor to lend, or has the dtype and the device of a borrowed one."""
        self._mappings = mappings
        self._t = t
        self._lent: _Lent | None = None
        self._described: list[int] = []
        """Ranks that have got a description."""
        self._announced: dict[int, _Announcement] = {}
        self._borrowed: dict[int, _Borrowed] = {}

    def announce(self, rank: int, failure: Exception | None = None) -> bytearray:
        """Return the frame that announces this rank's tensor or failure to `rank`."""
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
        return _frame(_FAILED, t.dtype, (0, 0, 0), (), str(failure).encode()[: FRAME_BYTES - _HEAD.size])

    def _describe(self, rank: int) -> tuple[_Lent, bytes | None]:
        """Return this rank's lent storage, with a description for `rank` unless `rank` knows it."""
        if self._lent is None:
            self._lent = self._mappings.lend(self._t)
        if rank in self._lent.known:
            return self._lent, None
        description = self._mappings.describe(self._lent, self._t, rank)
        if len(description) > _DESCRIPTION_BYTES:
            raise BackendError(f"memory of {self._t.device} has a description of {len(description)} bytes: {REMEDY}")
        self._described.append(rank)
        return self._lent, description

    def receive(self, rank: int, frame: bytearray, numel: int) -> None:
        """Borrow the tensor that `rank` announces, which must have `numel` elements.

        Raises BackendError if `rank` failed, MismatchError for a different tensor.
        """
        state, kind, length, dead, number, offset, announced = _HEAD.unpack_from(frame)
        start = _HEAD.size + 8 * dead
        text = bytes(frame[start : start + length])
        if state == _FAILED:
            raise BackendError(f"rank {rank}: {text.decode(errors='replace')}")
        numbers = struct.unpack_from(f"<{dead}q", frame, _HEAD.size) if dead else ()
        self._announced[rank] = _Announcement(number, offset, announced, numbers)
        self._borrowed[rank] = self._mappings.borrow(rank, number, text if state == _DESCRIBED else None)
        if (kind, announced) != (dtype_code(self._t.dtype), numel):
            theirs, mine = f"{announced} {dtype_name(DTYPES[kind])}", f"{numel} {dtype_name(self._t.dtype)}"
            raise MismatchError(f"{disagreement('an operation by CUDA IPC', {rank: theirs})}; expected {mine}")

    def tensor(self, rank: int) -> Tensor:
        """Return the tensor that `rank` has lent, flat, or raise BackendError if the mapping fails."""
        announced = self._announced[rank]
        memory = self._borrowed[rank].memory(self._t.device)
        size = announced.numel * self._t.dtype.itemsize
        return memory[announced.offset : announced.offset + size].view(self._t.dtype)

    def release(self) -> None:
        """Close the mappings of storages that were declared dead, which waits for the device.

        Call this when no work is queued, and after the mapping of new storages. An allocation stays mapped as long as
        one of its storages is mapped.
        """
        for rank, announced in self._announced.items():
            if announced.dead:
                self._mappings.release(rank, announced.dead)

    def end(self) -> None:
        """End the loan. No rank uses the lent storage any more, and no queued work uses the borrowed storages."""
        for rank in self._borrowed:
            self._mappings.return_to(rank, self._announced[rank].number)
        if self._lent is not None:
            self._lent.known.update(self._described)
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
    """Sends the numbers of dead storages to the mapping ranks, once a second.

    So memory is freed also if no operation follows. The notices use the control channel. A number is declared dead only
    after the arrival of all its announcements. So a notice never arrives before an announcement.
    """

    def __init__(self, mappings: Mappings, progress: Progress, channel: Channel) -> None:
        self._mappings = mappings
        self._progress = progress
        self._channel = channel
        self._parted: set[int] = set()
        channel.subscribe(_TOPIC, self._received)
        self._next = progress.loop.call_later(LOOK_SECONDS, self._notify)

    def _notify(self) -> None:
        self._next = self._progress.loop.call_later(LOOK_SECONDS, self._notify)
        self._progress.start(self._send)

    def _send(self) -> None:
        for rank, numbers in self._mappings.collect_dead().items():
            self._channel.send(rank, _TOPIC, numbers)

    def _received(self, rank: int, numbers: Sequence[int] | None) -> None:
        """Close the mappings of dead storages, or of all storages of `rank` for None (channel's thread)."""
        if numbers is None:
            self._parted.add(rank)
        else:
            self._progress.post(self._progress.start, self._mappings.release, rank, numbers)

    async def aclose(self) -> None:
        """Stop the notices, then close everything, the mappings of the borrowers first.

        torch frees memory that is still mapped elsewhere at the end of the process. This is too late for CUDA, which
        ends the process with SIGABRT if several streams have used that memory.
        """
        self._next.cancel()
        await self._mappings.aclose()
        with suppress(RuntimeError):  # the channel is closed already after an abort
            for rank in self._mappings.lenders:
                self._channel.send(rank, _TOPIC, None)
            until = self._progress.loop.time() + _PART_SECONDS
            while self._mappings.borrowers - self._parted - set(self._channel.exits()):
                if self._progress.loop.time() > until:
                    break
                await asyncio.sleep(_PART_LOOK_SECONDS)
            self._channel.unsubscribe(_TOPIC)
        self._mappings.collect()
