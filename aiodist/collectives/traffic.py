"""A record of the sends and receives of one operation, so that they can be drained if ranks differ.

Messages of one tag between two ranks keep their order: the k-th send of one rank matches the k-th receive of the other.
So after two ranks have stopped, the unmatched messages are the end of the longer list. The ranks exchange their lists;
each one then sends zeros for the other's unmatched receives, and receives and discards its unmatched sends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import Done, Transport, ignore, keeping
from aiodist.backends.inplace import bytes_of, copy

ROOM_BYTES = 256 << 10
"""Longest message, in bytes, that may be sent before all ranks agree."""

_MOST_RECENT = 1024
_MOST_ROOMS = 32  # buffers kept for each communicator

Lists = dict[int, list[int]]  # tag -> sizes of messages, in bytes


class Differ(Exception):
    """Ranks issued different operations as number `seq`."""

    def __init__(self, seq: int) -> None:
        super().__init__(f"ranks differ on operation #{seq}")
        self.seq = seq


class Traffic:
    """The messages of one operation on this rank."""

    __slots__ = ("_asked", "_refusal", "_rooms", "_sent", "agreed", "native", "way")

    def __init__(self, rooms: list[Tensor] | None = None) -> None:
        """`rooms` are reused buffers for receives that may match a longer message; None if the ranks agree."""
        self._rooms = rooms
        self.agreed: Callable[[Done], None] = partial(_at_once, None)
        """Calls back when all ranks have issued this operation, or with an error."""
        self.native = 0
        """Number of running native parts, in a library or in shared memory, which cannot be stopped."""
        self.way = ""
        """Name of the implementation; the last one if several ran."""
        self._sent: dict[int, Lists] = {}
        self._asked: dict[int, Lists] = {}
        self._refusal: BaseException | None = None

    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)

    def send(self, transport: Transport, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send `t`, and record it unless the call fails."""
        sizes = _record(self._sent, dst, tag, t.nbytes)
        try:
            transport.isend(t, dst, tag, done)
        except BaseException:
            sizes.pop()
            raise

    def decided(self, error: BaseException | None) -> None:
        """Note that the comparison has ended: later messages of agreeing ranks have the expected sizes."""
        self.agreed = partial(_at_once, error)
        self._rooms = None

    def recv(self, transport: Transport, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Receive into `t`; until all ranks agree, the message may be of another operation, up to `ROOM_BYTES` long."""
        sizes, rooms = _record(self._asked, src, tag, t.nbytes), self._rooms
        try:
            if rooms is None or t.nbytes >= ROOM_BYTES:
                transport.irecv(t, src, tag, done)
            else:
                self._recv_in_room(transport, rooms, t, src, tag, done)
        except BaseException:
            sizes.pop()
            raise

    @staticmethod
    def _recv_in_room(transport: Transport, rooms: list[Tensor], t: Tensor, src: int, tag: int, done: Done) -> None:
        room = rooms.pop() if rooms else torch.empty(ROOM_BYTES, dtype=torch.uint8, device="cpu")

        def copy_out(error: BaseException | None) -> None:
            if error is None:
                copy(bytes_of(t), room[: t.nbytes])
                if len(rooms) < _MOST_ROOMS:
                    rooms.append(room)
            done(error)

        transport.irecv(room, src, tag, copy_out)

    def refuse(self, error: BaseException) -> None:
        """Let later sends and receives of the operation raise `error`."""
        self._refusal = error

    @property
    def begun(self) -> bool:
        """True if a transfer has started, so that the output of the operation is unspecified if it fails."""
        return bool(self._sent or self._asked or self.native)

    def with_rank(self, rank: int) -> tuple[Lists, Lists]:
        """Return the sizes of the sends to `rank` and of the receives from it, in order, by tag."""
        return self._sent.get(rank, {}), self._asked.get(rank, {})

    def clear(self, transport: Transport, rank: int, sent: Lists, asked: Lists) -> None:
        """Match the recorded sends and receives of `rank` with this one; with the transport lock held."""
        mine, wanted = self.with_rank(rank)
        for tag, sizes in asked.items():
            for nbytes in sizes[len(mine.get(tag, ())) :]:
                zeros = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
                transport.isend(zeros, rank, tag, keeping(zeros, ignore))
        for tag, sizes in sent.items():
            for nbytes in sizes[len(wanted.get(tag, ())) :]:
                room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                transport.irecv(room, rank, tag, keeping(room, ignore))


class RecentTraffic(dict[int, Traffic]):
    """The messages of the last operations of a communicator, by number."""

    def __init__(self, rooms: list[Tensor] | None) -> None:
        """`rooms` are for operations of several hosts: see `Traffic`."""
        super().__init__()
        self._rooms = rooms

    def enter(self, number: int, *, several: bool) -> Traffic:
        """Return the traffic of the next operation; `several` is True if there are several hosts."""
        traffic = self[number] = Traffic(self._rooms if several else None)
        while (oldest := next(iter(self))) <= number - _MOST_RECENT:
            del self[oldest]
        return traffic


def _at_once(error: BaseException | None, done: Done) -> None:
    done(error)


def _record(lists: dict[int, Lists], rank: int, tag: int, nbytes: int) -> list[int]:
    """Record a message; return the list of sizes, from which the caller removes the last one if the call fails."""
    sizes = lists.setdefault(rank, {}).setdefault(tag, [])
    sizes.append(nbytes)
    return sizes
