"""All messages between this rank and the others of its host, on every communicator. Has a poller of `Progress`.

[Note: lost ranks] When the process of a rank has ended, pending and later sends and receives with that rank fail. On
each communicator of that rank, receives from any source fail once: all waiting receives, or else the next receive that
finds no message. Later receives wait for the other ranks. Short messages of the lost rank are still received. Long
messages are lost unless all bytes had arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from ctypes import memmove
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVarTuple

from torch import Tensor

from aiodist._core import NUMBERS_BYTES, arrived
from aiodist.backends.base import ours
from aiodist.backends.shm.memory import move_bytes
from aiodist.backends.shm.neighbours import Neighbourhood
from aiodist.backends.shm.peers import NUMBERS, ShmPeer, lost
from aiodist.backends.shm.records import Box, Envelope, ShmReceive, ShmSend, too_long
from aiodist.errors import AiodistError, BackendError
from aiodist.handles import Progress
from aiodist.handles.polling import LoopPace
from aiodist.types import ANY

Ts = TypeVarTuple("Ts")
PASS_BYTES = 1 << 20  # bytes that one poll copies, approximately

_LOOK_PASSES = 64  # idle polls between two checks of the sockets
_BUSY_PASSES = 1024  # most polls between two checks of the sockets
_GONE_SECONDS = 0.02  # between two checks for lost ranks


@dataclass(eq=False, slots=True)
class _Copy:
    """A copy in progress, between the memory of two ranks or within this rank's."""

    operation: ShmSend | ShmReceive
    into: Tensor
    source: Tensor
    nbytes: int
    end: Callable[..., None]
    args: tuple[Any, ...]
    moved: int = 0


class Messages:
    """See the module. All methods except the constructor and `sleep` run with the transport lock held."""

    of_ranks = True
    heavy = False

    def __init__(self, near: Neighbourhood, progress: Progress) -> None:
        self.near = near
        self.progress = progress
        self.rank = near.rank
        self.boxes: dict[int, Box] = {}
        """Waiting messages and receives, by communicator."""
        self.budget = 0  # bytes that this poll may still copy
        numbers = near.place(NUMBERS, NUMBERS_BYTES * len(near.members), tuple(near.neighbours))
        self.peers = {rank: ShmPeer(self, neighbour, numbers) for rank, neighbour in near.neighbours.items()}
        self._poll_only(self.peers.values())
        self._gone: set[int] = set()
        self._copies: deque[_Copy] = deque()
        self._members: dict[int, tuple[int, ...]] = {}
        self._unreported: dict[int, int] = {}
        """Lost ranks that no receive from any source has reported yet, by communicator."""
        self._closed: set[int] = set()
        self._pending = 0
        self._passes = 0
        self._ask_at = 0.0
        self.failure: AiodistError | None = None
        """Error of all operations, or None."""
        progress.add_poller(self)
        progress.driven.append(self)

    def _poll_only(self, peers: Iterable[ShmPeer]) -> None:
        self._polled = tuple(peers)
        self._rings = tuple([peer.rings for peer in self._polled])

    def join(self, comm: int, ranks: tuple[int, ...]) -> None:
        """Add a communicator of these world ranks."""
        self._members[comm] = ranks
        for rank in ranks:
            if rank != self.rank and self.peers[rank].gone:
                self._unreported[comm] = rank

    # --- sending and receiving ---------------------------------------------------------------------------------

    def send(self, send: ShmSend, to: int) -> None:
        if self.failure is not None:
            send.done(self.failure)
            return
        self._pending += 1
        try:
            self._send(send, to)
        except Exception as error:  # noqa: BLE001  - the error belongs to the task that awaits the operation
            self.finish(send, ours(error))

    def _send(self, send: ShmSend, to: int) -> None:
        box = self.box(send.comm)
        if box is None:  # the next step of an aborted operation
            self.finish(send, BackendError("the communicator is closed"))
            return
        if to != self.rank:
            self.peers[to].send(send)
            return
        message = Envelope(to, send.tag, send.t.nbytes, own=send)
        receive = box.match(to, send.tag)
        if receive is None:
            box.keep(message)
        else:
            self._deliver(message, receive)

    def receive(self, receive: ShmReceive) -> None:
        if self.failure is not None:
            receive.done(self.failure)
            return
        self._pending += 1
        try:
            self._receive(receive)
        except Exception as error:  # noqa: BLE001  - the error belongs to the task that awaits the operation
            self.finish(receive, ours(error))

    def _receive(self, receive: ShmReceive) -> None:
        box = self.box(receive.comm)
        if box is None:
            self.finish(receive, BackendError("the communicator is closed"))
            return
        message = box.post(receive)
        if message is not None:
            self._deliver(message, receive)
        elif self._gone and (error := self._loss_for(receive)) is not None:
            box.cancel(receive)
            self.finish(receive, error)

    def _loss_for(self, receive: ShmReceive) -> BackendError | None:
        """Return the error of a `receive` without a message that must fail (see [Note: lost ranks])."""
        if receive.src == ANY:
            rank = self._unreported.pop(receive.comm, None)
        else:
            rank = receive.src if receive.src in self._gone else None
        return None if rank is None else lost(rank)

    def _deliver(self, message: Envelope, receive: ShmReceive) -> None:
        if (own := message.own) is not None:
            error = too_long(own.t.nbytes, receive)
            nbytes = 0 if error else own.t.nbytes
            self.copy(receive, receive.into, own.t, nbytes, self._end_own, own, receive, error)
            return
        peer = self.peers[message.src]
        if message.data is None:
            peer.receive(receive, message)
            return
        peer.rings.give_back(message.cost)
        error = too_long(message.nbytes, receive)
        if error is None:
            memmove(receive.into.data_ptr(), message.data, message.nbytes)
        self.finish(receive, error)

    def _end_own(self, own: ShmSend, receive: ShmReceive, error: BaseException | None) -> None:
        """Finish a message of this rank to itself."""
        self.finish(own, None)
        self.finish(receive, error)

    def finish(self, operation: ShmSend | ShmReceive, error: BaseException | None) -> None:
        """Call the `done` of `operation`, once."""
        if not operation.finished:
            operation.finished = True
            self._pending -= 1
            try:
                operation.done(error)
            except Exception as raised:  # noqa: BLE001  - later messages must still be read
                self.progress.report("the callback of a message failed", raised)

    def each_of(self, comm: int, tag: int) -> Callable[[bytearray], object] | None:
        """Return the function that gets the next short message of a communicator with `tag`, or None."""
        box = self.boxes.get(comm)
        receive = None if box is None else box.first(tag)
        return None if receive is None else receive.each

    def hand(self, each: Callable[[bytearray], object], data: bytearray) -> None:
        """Call `each` with a short message."""
        try:
            each(data)
        except Exception as raised:  # noqa: BLE001  - as in `finish`
            self.progress.report("the callback of a message failed", raised)

    def box(self, comm: int) -> Box | None:
        """Return the waiting messages and receives of a communicator, or None for a closed one."""
        box = self.boxes.get(comm)
        if box is None and comm not in self._closed:
            box = self.boxes[comm] = Box()
        return box

    def copy(
        self,
        operation: ShmSend | ShmReceive,
        into: Tensor,
        source: Tensor,
        nbytes: int,
        end: Callable[[*Ts], None],
        *args: *Ts,
    ) -> None:
        """Copy `nbytes` for `operation`, some in each poll, then call `end`."""
        self._copies.append(_Copy(operation, into, source, nbytes, end, args))

    def stop(self, operation: ShmSend | ShmReceive) -> None:
        """Stop the copy for `operation`."""
        for copy in self._copies:
            if copy.operation is operation:
                self._copies.remove(copy)
                return

    # --- as a poller ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._pending or sum([bool(peer.waiting) for peer in self._polled])

    @property
    def rings(self) -> bool:
        """True if the last poll has left no work, so that only other ranks can cause new work."""
        return not self._copies and self.budget > 0 and all(peer.idle for peer in self._polled)

    def poll(self, until: float = 0.0) -> bool:
        """Advance all messages. Return True if one advanced."""
        while True:
            self.budget = PASS_BYTES
            moved = False
            try:
                for peer in self._polled:
                    if peer.advance():
                        moved = True
            except Exception as error:  # noqa: BLE001  - a partly read record cannot be read again
                self.fail(ours(error))
                return True
            if self._copies:
                self._work()
                moved = True
            # While the loop sleeps, the pauses between polls are long.
            self._passes += _LOOK_PASSES if self.progress.pace is LoopPace.PARKED else 1
            if self._passes >= (_BUSY_PASSES if moved else _LOOK_PASSES) and self._look():
                return True
            if moved:
                return True
            if not until or perf_counter() >= until:
                return False
            if all(peer.idle for peer in self._polled) and not arrived(self._rings, until):
                self._passes = _LOOK_PASSES

    def sleep(self) -> bool:
        """Let the next message wake the loop, and not the progress thread. Return False if one has come already."""
        if self._copies or not all(peer.idle for peer in self._polled):
            return True  # more than messages would advance
        self.near.doorbell.set_loop_waits(True)
        return not len(self) or not arrived(self._rings, 0.0)  # without a request, no poll would read the message

    def _look(self) -> bool:
        """Send waiting data over the sockets and check for lost ranks. Return True if a rank is newly lost."""
        self._passes = 0
        for peer in self._polled:
            peer.neighbour.flush()
        now = perf_counter()
        if now < self._ask_at:
            return False
        self._ask_at = now + _GONE_SECONDS
        gone = [peer for peer in self._polled if peer.is_gone(now)]
        for peer in gone:
            self._lose(peer)
        return bool(gone)

    def _lose(self, peer: ShmPeer) -> None:
        self._gone.add(peer.rank)
        self._poll_only(one for one in self._polled if one is not peer)
        failed: list[ShmSend | ShmReceive] = peer.end()
        for comm in [comm for comm, ranks in self._members.items() if peer.rank in ranks]:
            box = self.box(comm)
            assert box is not None
            waiting = box.cancel_receives([receive for receive in box.receives if receive.src in (ANY, peer.rank)])
            failed += waiting
            if all(receive.src != ANY for receive in waiting):
                self._unreported[comm] = peer.rank
        for operation in failed:
            self.finish(operation, lost(peer.rank))

    def _work(self) -> None:
        """Copy the bytes that this poll may still copy, for one operation after another."""
        while self._copies and self.budget > 0:
            copy = self._copies[0]
            nbytes = min(self.budget, copy.nbytes - copy.moved)
            try:
                move_bytes(copy.into.data_ptr() + copy.moved, copy.source.data_ptr() + copy.moved, nbytes)
            except Exception as error:  # noqa: BLE001  - the error belongs to the task that awaits the operation
                self._copies.popleft()
                self.finish(copy.operation, ours(error))
                continue
            copy.moved += nbytes
            self.budget -= max(nbytes, 1)
            if copy.moved < copy.nbytes:
                self._copies.rotate(-1)
            else:
                self._copies.popleft()
                copy.end(*copy.args)

    # --- its end --------------------------------------------------------------------------------------------------

    def close_comm(self, comm: int, error: BaseException) -> None:
        """Close a communicator: pending operations fail, later messages are discarded."""
        self._closed.add(comm)
        self._members.pop(comm, None)
        self._unreported.pop(comm, None)
        box = self.boxes.pop(comm, None)
        for peer in self._polled:
            peer.abort(comm, error)
        for copy in [one for one in self._copies if one.operation.comm == comm]:  # to this rank itself
            self._copies.remove(copy)
            self.finish(copy.operation, error)
        if box is None:
            return
        for receive in box.cancel_receives():
            self.finish(receive, error)
        for message in box.cancel_messages():
            if message.own is not None:
                self.finish(message.own, error)
            else:
                self.peers[message.src].discard(message)

    def fail(self, error: AiodistError) -> None:
        """Fail all pending and later operations, since the others' memory cannot be used."""
        self.failure = error
        for comm in tuple(self.boxes):
            self.close_comm(comm, error)
        for peer in self._polled:
            peer.abort(None, error)

    def close(self, error: AiodistError) -> None:
        """Stop polling. Pending operations fail."""
        self.fail(error)
        self.progress.remove_poller(self)
        self.progress.driven.remove(self)

    def release(self) -> None:
        """Free the memory for messages, which no rank uses any more."""
        self._poll_only(())
        self.peers.clear()
