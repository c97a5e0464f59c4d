"""All messages between this rank and the others of its host, on every communicator, as `Progress` polls them.

[Note: ranks that are gone] A rank whose process has ended fails its pending messages, and later sends to it and
receives from it. On each communicator of the rank it also fails receives from any source, once: those that wait, else
the next one without a message. Later ones wait for the other ranks. Short messages that the rank sent
are still received; long ones that were not received in full by then are gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from ctypes import memmove
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from aiodist._core import NUMBERS_BYTES, arrived
from aiodist.backends.base import ours
from aiodist.backends.shm.memory import move_bytes
from aiodist.backends.shm.neighbours import Neighbourhood
from aiodist.backends.shm.peers import NUMBERS, Peer
from aiodist.backends.shm.records import Box, Envelope, Send, ShmReceive, too_long
from aiodist.errors import AiodistError, BackendError
from aiodist.handles import Progress
from aiodist.types import ANY

PASS_BYTES = 1 << 20  # how much one pass over everything copies, about

_LOOK_PASSES = 64  # after how many passes the sockets are looked at, once nothing moves
_BUSY_PASSES = 1024  # after how many at the latest
_GONE_SECONDS = 0.02  # how often it is asked whether the others are still there


@dataclass(eq=False, slots=True)
class _Copy:
    """Bytes in flight from one rank's memory to another's."""

    operation: Send | ShmReceive
    into: Tensor
    source: Tensor
    nbytes: int
    finish: Callable[[], None]
    moved: int = 0


class Messages:
    """See the module; everything but making it runs with the transport lock held."""

    of_ranks = True

    def __init__(self, near: Neighbourhood, progress: Progress) -> None:
        self.near = near
        self.progress = progress
        self.rank = near.rank
        self.boxes: dict[int, Box] = {}
        """By communicator: what waits to be received, and receives that wait."""
        self.budget = 0  # how many bytes this pass may still copy
        numbers = near.place(NUMBERS, NUMBERS_BYTES * len(near.members), tuple(near.neighbours))
        self.peers = {rank: Peer(self, neighbour, numbers) for rank, neighbour in near.neighbours.items()}
        self._poll_only(self.peers.values())
        self._gone: set[int] = set()
        self._copies: deque[_Copy] = deque()
        self._members: dict[int, tuple[int, ...]] = {}
        self._untold: dict[int, int] = {}
        """By communicator: a rank that is gone, and has failed no receive from any source yet."""
        self._closed: set[int] = set()
        self._pending = 0
        self._passes = 0
        self._ask_at = 0.0
        self._failure: AiodistError | None = None
        progress.add_poller(self)

    def _poll_only(self, peers: Iterable[Peer]) -> None:
        self._polled = tuple(peers)
        self._rings = tuple([peer.rings for peer in self._polled])

    def join(self, comm: int, ranks: tuple[int, ...]) -> None:
        """There is a communicator of these ranks of the world."""
        self._members[comm] = ranks
        for rank in ranks:
            if rank != self.rank and self.peers[rank].gone:
                self._untold[comm] = rank

    # --- sending and receiving ---------------------------------------------------------------------------------

    def send(self, send: Send, to: int) -> None:
        if self._failure is not None:
            send.done(self._failure)
            return
        self._pending += 1
        try:
            self._send(send, to)
        except Exception as error:  # noqa: BLE001  - it belongs to the task that awaits the operation
            self.over(send, ours(error))

    def send_now(self, data: bytearray, comm: int, to: int, tag: int) -> bool:
        """Send a few bytes to rank `to`; False where they would have to wait: then nothing is sent."""
        peer = self.peers.get(to)
        return peer is not None and self._failure is None and peer.send_now(data, comm, tag)

    def _send(self, send: Send, to: int) -> None:
        box = self.box(send.comm)
        if box is None:  # an operation that was aborted came to its next step
            self.over(send, BackendError("the communicator is closed"))
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
        if self._failure is not None:
            receive.done(self._failure)
            return
        self._pending += 1
        try:
            self._receive(receive)
        except Exception as error:  # noqa: BLE001  - as above
            self.over(receive, ours(error))

    def _receive(self, receive: ShmReceive) -> None:
        box = self.box(receive.comm)
        if box is None:
            self.over(receive, BackendError("the communicator is closed"))
            return
        message = box.take(receive.src, receive.tag)
        if message is not None:
            self._deliver(message, receive)
        elif self._gone and (error := self._never(receive)) is not None:
            self.over(receive, error)
        else:
            box.expect(receive)

    def _never(self, receive: ShmReceive) -> BackendError | None:
        """Return why `receive`, for which nothing has come, has to fail, see [Note: ranks that are gone]."""
        if receive.src == ANY:
            rank = self._untold.pop(receive.comm, None)
        else:
            rank = receive.src if receive.src in self._gone else None
        return None if rank is None else self.peers[rank].lost()

    def _deliver(self, message: Envelope, receive: ShmReceive) -> None:
        if (own := message.own) is not None:
            error = too_long(own.t.nbytes, receive)

            def finish() -> None:
                self.over(own, None)
                self.over(receive, error)

            self.copy(receive, receive.into, own.t, 0 if error else own.t.nbytes, finish)
            return
        peer = self.peers[message.src]
        if message.data is None:
            peer.receive(receive, message)
            return
        peer.give_back(message.cost)
        error = too_long(message.nbytes, receive)
        if error is None:
            memmove(receive.into.data_ptr(), message.data, message.nbytes)
        self.over(receive, error)

    def over(self, operation: Send | ShmReceive, error: BaseException | None) -> None:
        """Tell the `done` of `operation`, once."""
        if not operation.over:
            operation.over = True
            self._pending -= 1
            try:
                operation.done(error)
            except Exception as raised:  # noqa: BLE001  - what follows in the queue is to be read all the same
                self.progress.report("what a message completed failed", raised)

    def box(self, comm: int) -> Box | None:
        """Return what waits on a communicator, None when that is closed."""
        box = self.boxes.get(comm)
        if box is None and comm not in self._closed:
            box = self.boxes[comm] = Box()
        return box

    def copy(
        self, operation: Send | ShmReceive, into: Tensor, source: Tensor, nbytes: int, finish: Callable[[], None]
    ) -> None:
        """Copy `nbytes` for `operation`, some in each pass, and call `finish`."""
        self._copies.append(_Copy(operation, into, source, nbytes, finish))

    def stop(self, operation: Send | ShmReceive) -> None:
        """Copy no more for `operation`."""
        for copy in self._copies:
            if copy.operation is operation:
                self._copies.remove(copy)
                return

    # --- a poller's -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._pending or sum([peer.stuck for peer in self._polled])

    @property
    def rings(self) -> bool:
        """Return False when there is more to do than one pass does."""
        return not self._copies and self.budget > 0

    def poll(self, until: float = 0.0) -> bool:
        """Move everything on; True when something moved."""
        while True:
            self.budget = PASS_BYTES
            moved = False
            try:
                for peer in self._polled:
                    if peer.advance():
                        moved = True
            except Exception as error:  # noqa: BLE001  - what was read half cannot be read again
                self.fail(ours(error))
                return True
            if self._copies:
                self._work()
                moved = True
            self._passes += 1
            if self._passes >= (_BUSY_PASSES if moved else _LOOK_PASSES) and self._look():
                return True
            if moved:
                return True
            if not until or perf_counter() >= until:
                return False
            if all(peer.idle for peer in self._polled) and not arrived(self._rings, until):
                self._passes = _LOOK_PASSES

    def _look(self) -> bool:
        """Send what could not be sent over the sockets; True when a rank was found to be gone."""
        self._passes = 0
        for peer in self._polled:
            peer.look()
        now = perf_counter()
        if now < self._ask_at:
            return False
        self._ask_at = now + _GONE_SECONDS
        gone = [peer for peer in self._polled if peer.is_gone(now)]
        for peer in gone:
            self._lose(peer)
        return bool(gone)

    def _lose(self, peer: Peer) -> None:
        self._gone.add(peer.rank)
        self._poll_only(one for one in self._polled if one is not peer)
        failed: list[Send | ShmReceive] = peer.end()
        for comm in [comm for comm, ranks in self._members.items() if peer.rank in ranks]:
            box = self.box(comm)
            assert box is not None
            waiting = box.cancel_receives(lambda receive: receive.src in (ANY, peer.rank))
            failed += waiting
            if all(receive.src != ANY for receive in waiting):
                self._untold[comm] = peer.rank
        for operation in failed:
            self.over(operation, peer.lost())

    def _work(self) -> None:
        """Copy what this pass may still copy, for one operation after the other."""
        while self._copies and self.budget > 0:
            copy = self._copies[0]
            nbytes = min(self.budget, copy.nbytes - copy.moved)
            try:
                move_bytes(copy.into.data_ptr() + copy.moved, copy.source.data_ptr() + copy.moved, nbytes)
            except Exception as error:  # noqa: BLE001  - it belongs to the task that awaits the operation
                self._copies.popleft()
                self.over(copy.operation, ours(error))
                continue
            copy.moved += nbytes
            self.budget -= max(nbytes, 1)
            if copy.moved < copy.nbytes:
                self._copies.rotate(-1)
            else:
                self._copies.popleft()
                copy.finish()

    # --- its end --------------------------------------------------------------------------------------------------

    def give_up(self, comm: int, error: BaseException) -> None:
        """A communicator is closed: its pending messages fail, and those that come are thrown away."""
        self._closed.add(comm)
        self._members.pop(comm, None)
        self._untold.pop(comm, None)
        box = self.boxes.pop(comm, None)
        for peer in self._polled:
            peer.give_up(comm, error)
        for copy in [one for one in self._copies if one.operation.comm == comm]:  # to myself
            self._copies.remove(copy)
            self.over(copy.operation, error)
        if box is None:
            return
        for receive in box.cancel_receives():
            self.over(receive, error)
        for message in box.cancel_messages():
            if message.own is not None:
                self.over(message.own, error)
            else:
                self.peers[message.src].refuse(message)

    def fail(self, error: AiodistError) -> None:
        """The others' memory cannot be reached: everything fails, now and from now on."""
        self._failure = error
        for comm in tuple(self.boxes):
            self.give_up(comm, error)
        for peer in self._polled:
            peer.give_up(None, error)

    def close(self, error: AiodistError) -> None:
        """Poll no more; what is pending fails."""
        self.fail(error)
        self.progress.remove_poller(self)

    def release(self) -> None:
        """Give the memory for messages back, after all ranks have parted."""
        self._poll_only(())
        self.peers.clear()
