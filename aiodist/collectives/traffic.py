"""Messages that one operation sent and asked for, recorded so that they can be drained if ranks differ.

Messages of one tag between two ranks keep their order: the k-th that one sends meets the k-th that the other asks for.
So what is left over when two ranks stop is the end of the longer list. Each tells the other its lists, then sends
zeros for what is asked and will not come, and receives, to throw it away, what was sent and nobody asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import Done, Transport, ignore, keeping
from aiodist.backends.inplace import bytes_of, copy

ROOM_BYTES = 256 << 10
"""Longer messages are sent only when all ranks are known to agree."""

_MOST_ROOMS = 32  # kept, of each communicator

Lists = dict[int, list[int]]  # tag -> the sizes of messages, in bytes


class Differ(Exception):
    """Ranks issued different operations as number `seq`: the ranks find out together what they were."""

    def __init__(self, seq: int) -> None:
        super().__init__(f"ranks differ on operation #{seq}")
        self.seq = seq


class Traffic:
    """The messages of one operation on this rank."""

    __slots__ = ("_asked", "_refusal", "_rooms", "_sent", "agreed", "native", "way")

    def __init__(self, rooms: list[Tensor] | None = None) -> None:
        """`rooms`, which are used again, are for receives that may meet a longer message: None where ranks agree."""
        self._rooms = rooms
        self.agreed: Callable[[Done], None] = partial(_at_once, None)
        """Calls back when all ranks are known to have issued this operation, or with an error."""
        self.native = 0
        """How many parts of it are where nobody can be called back from: in a library, in memory of several ranks."""
        self.way = ""
        """The name of the implementation that ran, the last one where there were several."""
        self._sent: dict[int, Lists] = {}
        self._asked: dict[int, Lists] = {}
        self._refusal: BaseException | None = None

    def check(self) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)

    def send(self, transport: Transport, t: Tensor, dst: int, tag: int, done: Done) -> None:
        """Send `t`, and take note of it unless that fails at once."""
        sizes = _noted(self._sent, dst, tag, t.nbytes)
        try:
            transport.isend(t, dst, tag, done)
        except BaseException:
            sizes.pop()
            raise

    def decided(self, error: BaseException | None) -> None:
        """It is known whether all ranks agree: from now on messages have the sizes that they should."""
        self.agreed = partial(_at_once, error)
        self._rooms = None

    def recv(self, transport: Transport, t: Tensor, src: int, tag: int, done: Done) -> None:
        """Receive into `t` what may be of another operation, and longer: until all agree, up to `ROOM_BYTES`."""
        sizes, rooms = _noted(self._asked, src, tag, t.nbytes), self._rooms
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

        def over(error: BaseException | None) -> None:
            if error is None:
                copy(bytes_of(t), room[: t.nbytes])
                if len(rooms) < _MOST_ROOMS:
                    rooms.append(room)
            done(error)

        transport.irecv(room, src, tag, over)

    def refuse(self, error: BaseException) -> None:
        """Have the operation send and ask for nothing any more: each try raises `error`."""
        self._refusal = error

    @property
    def begun(self) -> bool:
        """True if a transfer has started, so that the output of the operation is unspecified if it fails."""
        return bool(self._sent or self._asked or self.native)

    def with_rank(self, rank: int) -> tuple[Lists, Lists]:
        """Return the sizes of what was sent to `rank` and of what was asked of it, in order, by tag."""
        return self._sent.get(rank, {}), self._asked.get(rank, {})

    def clear(self, transport: Transport, rank: int, sent: Lists, asked: Lists) -> None:
        """Meet what `rank` says that it has sent to this one and asked of it; with the transport lock held."""
        mine, wanted = self.with_rank(rank)
        for tag, sizes in asked.items():
            for nbytes in sizes[len(mine.get(tag, ())) :]:
                zeros = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
                transport.isend(zeros, rank, tag, keeping(zeros, ignore))
        for tag, sizes in sent.items():
            for nbytes in sizes[len(wanted.get(tag, ())) :]:
                room = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                transport.irecv(room, rank, tag, keeping(room, ignore))


def _at_once(error: BaseException | None, done: Done) -> None:
    done(error)


def _noted(lists: dict[int, Lists], rank: int, tag: int, nbytes: int) -> list[int]:
    """Take note of a message; return the sizes of which its own is the last, to be taken off where making it fails."""
    sizes = lists.setdefault(rank, {}).setdefault(tag, [])
    sizes.append(nbytes)
    return sizes
