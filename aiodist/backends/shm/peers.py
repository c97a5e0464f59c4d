"""Messages to and from one neighbour.

A short message, as a part of its record, is sent immediately. The record of a long message has the place of the bytes,
which the receiver copies. For bytes in private memory, the receiver answers with the place of its own tensor, and the
sender copies. If both are private, the bytes go in chunks through a stage in the sender's arena, which one side fills
while the other drains. So a long message needs no memory before the receive. Short messages beyond `CREDIT_BYTES` are
sent as long ones.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiodist._core import NUMBERS_BYTES, Rings
from aiodist.backends.base import PeerGone, ours
from aiodist.backends.header import Header
from aiodist.backends.shm.memory import Place, move_bytes
from aiodist.backends.shm.neighbours import Neighbour, memory_of
from aiodist.backends.shm.records import Envelope, ShmReceive, ShmSend, place_of, too_long
from aiodist.errors import BackendError
from aiodist.handles import LARGE_BYTES

if TYPE_CHECKING:
    from aiodist.backends.shm.messages import Messages

NUMBERS = "messages"
"""Name of the memory with a rank's *numbers* for the other ranks (see `core/ring.h`)."""
CREDIT_BYTES = 1 << 22  # most bytes of short messages that wait at the receiver without a receive

_PIECES = 4  # chunks of a stage
_RECORD_BYTES = 64  # cost of a message in addition to the bytes
_GONE_SECONDS = 0.1  # time for the control channel to report the loss of a rank first
_SHORT, _LONG, _WANTED, _PIECE, _PUT, _GOT, _WITHDRAWN, _DISCARDED = range(1, 9)
# Records about a long message. From its sender: _PIECE (a chunk is in the stage), _PUT (the message is in the
# receiver's tensor), _WITHDRAWN (the sender has aborted). From its receiver: _WANTED (the sender must copy), _GOT (the
# receiver has the message), _DISCARDED (the receiver has aborted, or has seen the withdrawal).


def ring_bytes(members: int) -> int:
    """Return the size of a ring: a few MiB for all neighbours of a rank, if these are few."""
    return min(max((1 << 21) // members, 1 << 16), 1 << 19) // 64 * 64


def short_bytes(members: int) -> int:
    """Return the largest size of a short message."""
    return ring_bytes(members) // 8


def lost(rank: int) -> PeerGone:
    """Return the error of messages to and from a rank whose process has ended."""
    return PeerGone(f"rank {rank} is gone: its process has ended")


class ShmPeer:
    """See the module. Every method runs with the transport lock held."""

    def __init__(self, messages: Messages, neighbour: Neighbour, numbers: Tensor) -> None:
        """`numbers` are the counts of this rank for all neighbours."""
        self.rank = neighbour.rank
        self._messages = messages
        self._near = near = messages.near
        self.neighbour = neighbour
        self._ring_bytes = ring_bytes(len(near.members))
        at = near.members.index(neighbour.rank) * NUMBERS_BYTES
        self.rings = Rings(memory_of(numbers)[at : at + NUMBERS_BYTES], self._ring_bytes)
        self._short = short_bytes(len(near.members))
        self._piece = max(2 * self._short, 1 << 16)
        self.waiting: deque[ShmSend | Header] = deque()
        """Messages and records that wait for room."""
        self._offered: dict[int, ShmSend] = {}
        """Long messages that the neighbour may still read, also aborted ones."""
        self._staged: deque[ShmSend] = deque()
        self._brought: dict[int, ShmReceive] = {}  # receives that the neighbour writes to, also aborted ones
        self._fetched: dict[int, ShmReceive] = {}
        self._number = 0
        self._given = 0
        self._filled = 0
        self._stage: Tensor | None = None
        self._cut_at: float | None = None
        self.gone = False  # True if the process has ended

    @property
    def idle(self) -> bool:
        """True if no message can advance before the neighbour writes to its ring."""
        return self.rings.met and not self.waiting and not self._staged

    # --- sending ----------------------------------------------------------------------------------------------

    def send(self, send: ShmSend) -> None:
        """Send a message, after the waiting ones."""
        if self.gone:
            self._messages.finish(send, lost(self.rank))
        elif self.waiting or not self._begin(send):
            self.waiting.append(send)

    def send_now(self, data: bytearray, comm: int, tag: int) -> bool:
        """Send a short message. Return False, with no byte sent, if the message would have to wait."""
        nbytes = len(data)
        if self.waiting or self.gone or self._messages.failure is not None or not self._has_credit(nbytes):
            return False
        try:
            return self._put_short(comm, tag, nbytes, data)
        except MemoryError:  # the caller then sends an ordinary message, which gets the error
            return False

    def _has_credit(self, nbytes: int) -> bool:
        return nbytes <= self._short and self._given + nbytes + _RECORD_BYTES - self.rings.returned <= CREDIT_BYTES

    def _put_short(self, comm: int, tag: int, nbytes: int, data: bytearray | int) -> bool:
        """Write a short message with the bytes `data`, or with the bytes at that address.

        Return False if there is no room.
        """
        if not self.rings.is_open:
            self._open_ring()
        if not self.rings.put(_SHORT, comm, tag, 0, 0, -1, 0, nbytes, data):
            return False
        self._given += nbytes + _RECORD_BYTES
        if self.rings.met:
            self.neighbour.ring()
        else:
            self._ring()
        return True

    def _begin(self, send: ShmSend) -> bool:
        """Write the record of a message. Return False if there is no room."""
        t, nbytes = send.t, send.t.nbytes
        try:
            if self._has_credit(nbytes):
                if not self._put_short(send.comm, send.tag, nbytes, t.data_ptr()):
                    return False
                self._messages.finish(send, None)
                return True
            place = self._near.locate(t)
            number = self._number + 1
            record = Header(_LONG, send.comm, send.tag, number, nbytes, *(place or (-1, 0)))
            if not self._write(record):
                return False
        except MemoryError as error:
            self._messages.finish(send, BackendError(f"no memory for messages to rank {self.rank}: {error}"))
            return True
        except Exception as error:  # noqa: BLE001  - the error belongs to the task that awaits the send
            self._messages.finish(send, ours(error))
            return True
        self._number = send.number = number
        self._offered[number] = send
        self._ring()
        return True

    def _write(self, record: Header) -> bool:
        """Write a record that may have a place. Return False if there is no room."""
        if not self.rings.is_open:
            self._open_ring()
        # The descriptor of a new segment must be sent before the record is visible.
        return self.neighbour.flush() and self.rings.put(*record)

    def _open_ring(self) -> None:
        ring = self._near.arena.empty((self._ring_bytes,), torch.uint8)
        place = self._near.locate(ring)
        assert place is not None
        self.rings.open(memory_of(ring), *place)

    def _meet(self) -> bool:
        """Return True if the neighbour's numbers are known."""
        if not self.rings.met:
            self.neighbour.listen()
            if (place := self.neighbour.places.get(NUMBERS)) is None:
                return False
            at = place.offset + self._near.members.index(self._near.rank) * NUMBERS_BYTES
            self.rings.meet(memory_of(self.neighbour.memory(Place(place.segment, at), NUMBERS_BYTES)))
        return True

    def _ring(self) -> None:
        if self._meet():
            self.neighbour.ring()

    def _say(self, kind: int, number: int, place: tuple[int, int] = (-1, 0), nbytes: int = 0) -> None:
        record = Header(kind, 0, 0, number, nbytes, *place)
        if self.gone:
            return
        if self.waiting or not self._put(record):
            self.waiting.append(record)

    def _put(self, record: Header) -> bool:
        try:
            if not self._write(record):
                return False
        except MemoryError as error:
            self._messages.fail(BackendError(f"no memory for messages to rank {self.rank}: {error}"))
            return True
        self._ring()
        return True

    # --- polls --------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Read arrived records, and write waiting ones. Return True if there was one."""
        if not self.rings.met and not self._meet():
            return False
        moved = self.rings.arrived and self._read()
        while self.waiting:
            first = self.waiting[0]
            if not (self._put(first) if isinstance(first, Header) else self._begin(first)):
                break
            self.waiting.popleft()
            moved = True
        if self._staged:
            moved = self._fill() or moved
        return moved

    def is_gone(self, now: float) -> bool:
        """Return True if the process of the rank ended some time ago and all records are read."""
        if not self.neighbour.is_cut:
            return False
        self._cut_at = self._cut_at or now
        self.neighbour.listen()
        return now - self._cut_at > _GONE_SECONDS and not self.rings.arrived

    def _read(self) -> bool:
        messages, rings = self._messages, self.rings
        if not rings.is_mapped:
            rings.map(memory_of(self.neighbour.memory(Place(rings.segment, rings.offset), self._ring_bytes)))
        crowded = rings.fill > self._ring_bytes // 2
        moved = False
        while messages.budget > 0:
            try:
                fields = rings.first()
            except ValueError as error:
                raise BackendError(f"rank {self.rank}: {error}") from error
            if fields is None:
                break
            messages.budget -= fields[-1] + _RECORD_BYTES
            if fields[0] == _SHORT and (each := messages.each_of(fields[1], fields[2])) is not None:
                messages.hand(each, rings.take_data(fields[-1] + _RECORD_BYTES))
                moved = True
                continue
            ended: tuple[ShmSend | ShmReceive, BaseException | None] | None
            if fields[0] == _SHORT:
                ended = self._short_came(fields[1], fields[2], fields[-1])
            else:
                ended = self._heard(Header(*fields))
            rings.take()
            moved = True
            if ended is not None:
                messages.finish(*ended)
        if crowded:
            self._ring()
        return moved

    def _short_came(self, comm: int, tag: int, size: int) -> tuple[ShmReceive, BaseException | None] | None:
        box = self._messages.box(comm)
        receive = None if box is None else box.match(self.rank, tag)
        if box is not None and receive is None:
            box.keep(Envelope(self.rank, tag, size, self.rings.data(), cost=size + _RECORD_BYTES))
            return None
        self.rings.give_back(size + _RECORD_BYTES)
        if receive is None:
            return None
        error = too_long(size, receive)
        if size and error is None:
            try:
                self.rings.copy(receive.into.data_ptr())
            except Exception as raised:  # noqa: BLE001  - the error belongs to the task that awaits the receive
                return receive, ours(raised)
        return receive, error

    def _heard(self, record: Header) -> tuple[ShmSend | ShmReceive, BaseException | None] | None:
        number = record.number
        if record.kind == _LONG:
            self._long_came(record)
        elif record.kind == _WANTED:
            self._wanted(record)
        elif record.kind == _PIECE:
            return self._drain(record)
        elif record.kind == _PUT:
            receive = self._brought.pop(number, None)
            return None if receive is None else (receive, None)
        elif record.kind == _GOT:
            send = self._offered.pop(number, None)
            return None if send is None else (send, None)
        elif record.kind == _WITHDRAWN:
            return self._withdrawn(number)
        elif record.kind == _DISCARDED:
            send = self._offered.pop(number, None)
            if send is None:
                return None
            self._stop(send)
            self._say(_PUT, number)  # this rank no longer writes to the receiver's memory
            return send, BackendError(f"rank {self.rank} has discarded a message of {send.t.nbytes} bytes")
        return None

    # --- long messages, at their receiver ------------------------------------------------------------------------

    def _long_came(self, record: Header) -> None:
        box = self._messages.box(record.comm)
        if box is None:
            self._say(_DISCARDED, record.number)
            return
        message = Envelope(self.rank, record.tag, record.nbytes, number=record.number, place=place_of(record))
        receive = box.match(self.rank, record.tag)
        if receive is None:
            box.keep(message)
        else:
            self.receive(receive, message)

    def receive(self, receive: ShmReceive, message: Envelope) -> None:
        """Receive the bytes of a long message."""
        messages, nbytes, number = self._messages, message.nbytes, message.number
        receive.nbytes = nbytes
        error: BaseException | None = too_long(nbytes, receive)
        if error is not None:
            self._say(_GOT, number)
            messages.finish(receive, error)
            return
        try:
            source = None if message.place is None else self.neighbour.memory(message.place, nbytes)
            if nbytes >= LARGE_BYTES:
                receive.done = messages.progress.counted(receive.done)
            if source is None:
                self._brought[number] = receive
                self._say(_WANTED, number, self._near.locate(receive.into) or (-1, 0))
            else:
                self._fetched[number] = receive
                messages.copy(receive, receive.into, source, nbytes, self._copied, self._fetched, number)
        except Exception as raised:  # noqa: BLE001  - the error belongs to the task that awaits the receive
            self._say(_DISCARDED, number)
            messages.finish(receive, ours(raised))

    def _copied(self, table: dict[int, ShmSend] | dict[int, ShmReceive], number: int) -> None:
        """Finish the long message `number` of a table, whose bytes this rank has copied."""
        self._say(_PUT if table is self._offered else _GOT, number)
        self._messages.finish(table.pop(number), None)

    def _drain(self, record: Header) -> tuple[ShmReceive, None] | None:
        receive = self._brought.get(record.number)
        if receive is not None:
            piece = self.neighbour.memory(Place(record.place, record.extra), record.nbytes)
            move_bytes(receive.into.data_ptr() + receive.moved, piece.data_ptr(), record.nbytes)
            receive.moved += record.nbytes
            self._messages.budget -= record.nbytes
        self.rings.drain()
        self._ring()
        if receive is None or receive.moved < receive.nbytes:
            return None
        del self._brought[record.number]
        return receive, None

    def _withdrawn(self, number: int) -> tuple[ShmReceive, BaseException] | None:
        for box in self._messages.boxes.values():
            if withdrawn := [one for one in box.messages if one.src == self.rank and one.number == number]:
                box.cancel_messages(withdrawn)
                break
        receive = self._brought.pop(number, None) or self._fetched.pop(number, None)
        self._say(_DISCARDED, number)
        if receive is None:
            return None
        self._messages.stop(receive)
        return receive, BackendError(f"rank {self.rank} has withdrawn a message of {receive.nbytes} bytes")

    # --- long messages, at their sender --------------------------------------------------------------------------

    def _wanted(self, record: Header) -> None:
        send = self._offered.get(record.number)
        if send is None or send.finished:  # the receiver will get the withdrawal
            return
        nbytes = send.t.nbytes
        if nbytes >= LARGE_BYTES:
            send.done = self._messages.progress.counted(send.done)
        place = place_of(record)
        if place is None:
            self._staged.append(send)
            return
        try:
            target = self.neighbour.memory(place, nbytes)
        except Exception as error:  # noqa: BLE001  - the error belongs to the task that awaits the send
            self._withdraw(send, ours(error))
        else:
            self._messages.copy(send, target, send.t, nbytes, self._copied, self._offered, send.number)

    def _fill(self) -> bool:
        """Copy chunks to the room of the stage that the neighbour has drained."""
        messages = self._messages
        moved = False
        while self._staged and messages.budget > 0 and not self.waiting:
            if self._filled - self.rings.drained >= _PIECES:
                break
            send = self._staged[0]
            try:
                if self._stage is None:
                    self._stage = self._near.arena.empty((_PIECES * self._piece,), torch.uint8)
            except MemoryError as error:
                self._staged.popleft()
                self._withdraw(send, BackendError(f"no memory for messages to rank {self.rank}: {error}"))
                continue
            at = self._filled % _PIECES * self._piece
            place = self._near.locate(self._stage[at : at + self._piece])
            assert place is not None
            nbytes = min(self._piece, send.t.nbytes - send.moved)
            move_bytes(self._stage.data_ptr() + at, send.t.data_ptr() + send.moved, nbytes)
            send.moved += nbytes
            messages.budget -= nbytes
            self._filled += 1
            self._say(_PIECE, send.number, place, nbytes)
            moved = True
            if send.moved == send.t.nbytes:
                self._staged.popleft()
                del self._offered[send.number]
                messages.finish(send, None)
        return moved

    def _withdraw(self, send: ShmSend, error: BaseException) -> None:
        """Abort a send. The memory of the message is kept until the neighbour no longer reads the message."""
        self._stop(send)
        self._say(_WITHDRAWN, send.number)
        self._messages.finish(send, error)

    def _stop(self, send: ShmSend) -> None:
        self._messages.stop(send)
        if send in self._staged:
            self._staged.remove(send)

    # --- after the loss of the rank ----------------------------------------------------------------------------------

    def end(self) -> list[ShmSend | ShmReceive]:
        """Stop after the loss of the rank: return the pending operations, and forget announced messages."""
        self.gone = True
        for box in self._messages.boxes.values():
            box.cancel_messages([one for one in box.messages if one.src == self.rank and one.data is None])
        pending: list[ShmSend | ShmReceive] = [one for one in self.waiting if isinstance(one, ShmSend)]
        pending += [*self._offered.values(), *self._brought.values(), *self._fetched.values()]
        for operation in pending:
            self._messages.stop(operation)
        for held in (self.waiting, self._staged, self._offered, self._brought, self._fetched):
            held.clear()
        return pending

    # --- abort -----------------------------------------------------------------------------------------------------

    def discard(self, message: Envelope) -> None:
        """Discard `message`, which has no receive."""
        if message.data is None:
            self._say(_DISCARDED, message.number)
        else:
            self.rings.give_back(message.cost)

    def abort(self, comm: int | None, error: BaseException) -> None:
        """End the pending operations of a communicator, or for None of all communicators."""
        for waiting in [one for one in self.waiting if isinstance(one, ShmSend) and comm in (None, one.comm)]:
            self.waiting.remove(waiting)
            self._messages.finish(waiting, error)
        for send in [one for one in self._offered.values() if comm in (None, one.comm)]:
            self._withdraw(send, error)
        for receives in (self._brought, self._fetched):
            for number, receive in [(n, one) for n, one in receives.items() if comm in (None, one.comm)]:
                self._messages.stop(receive)
                if receives is self._fetched or not self._near.locate(receive.into):
                    del receives[number]  # else the neighbour may write to the memory until the record arrives
                self._say(_DISCARDED, number)
                self._messages.finish(receive, error)
