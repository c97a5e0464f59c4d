"""Frames between the ranks of the world, for all communicators.

A frame is a header of 64 bytes, then short data.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from ctypes import memmove
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple, Protocol, TypeVarTuple, cast

from torch import Tensor

from aiodist.backends.base import Done, again, tell
from aiodist.backends.gloo.library import (
    CLOSE_SECONDS,
    FOREVER,
    FRAMES,
    LAST_PAYLOAD,
    PAYLOADS,
    ProcessGroup,
    Work,
    abort_group,
    backend_error,
    empty,
    pieces,
)
from aiodist.backends.header import HEADER_BYTES
from aiodist.backends.header import Header as Header
from aiodist.errors import BackendError
from aiodist.handles import Progress
from aiodist.handles.polling import transport_lock
from aiodist.streams.memory import bytes_of
from aiodist.threads import OwnThread

Ts = TypeVarTuple("Ts")

MESSAGE, OFFER, TAKEN, CREDITS = range(4)

_POSTED = 4  # posted receives of frames, per peer
CREDIT = 64  # number of received frames that a separate frame acknowledges


class GlooFrame(NamedTuple):
    """A received frame. `data` is a view of a reused buffer."""

    header: Header
    data: Tensor

    def copied(self) -> GlooFrame:
        """Return the frame with a copy of the data."""
        return self._replace(data=self.data.clone())

    @staticmethod
    def read(buffer: Tensor, view: memoryview) -> GlooFrame:
        """Return the frame in `buffer`, whose memory `view` is."""
        header = Header.read(view)
        return GlooFrame(header, buffer[HEADER_BYTES : HEADER_BYTES + header.size])

    @staticmethod
    def write(header: Header, data: Tensor | None) -> Tensor:
        """Return a frame to send, with a copy of the first `header.size` bytes of `data`."""
        frame = empty(HEADER_BYTES + header.size)
        address = frame.data_ptr()
        memmove(address, header.pack(), HEADER_BYTES)
        if data is not None:
            memmove(address + HEADER_BYTES, data.data_ptr(), header.size)
        return frame


class Member(Protocol):
    """The interface of a communicator to its wire (transport lock held, world ranks)."""

    def frame_arrived(self, src: int, frame: GlooFrame) -> None:
        """Handle a frame from `src`."""

    def lost(self, world_rank: int, error: BackendError) -> None:
        """Handle the loss of `world_rank`."""


class Wire:
    """Frames between the ranks of the world, for all communicators (transport lock held)."""

    def __init__(self, group: ProcessGroup, rank: int, size: int, progress: Progress) -> None:
        self.group = group
        self.progress = progress
        self.capacity = max(4096, (1 << 20) // size)
        """Longest data of a frame, in bytes."""
        self.members: dict[int, Member] = {}
        self._closed: set[int] = set()
        self._early: dict[int, list[tuple[int, GlooFrame]]] = {}  # frames for communicators that do not exist here yet
        self._closing = False
        self.at_close: set[Callable[[], None]] = set()  # callbacks that close gloo's own collectives
        self._close_lock = threading.Lock()
        self._closed_all = False
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        self.peers = {other: GlooPeer(self, other) for other in range(size) if other != rank}

    def join(self, comm: int, member: Member) -> None:
        """Deliver the frames of `comm` to `member`."""
        self.members[comm] = member
        for src, frame in self._early.pop(comm, ()):
            member.frame_arrived(src, frame)
        for peer in self.peers.values():
            if peer.error is not None:
                member.lost(peer.rank, peer.error)

    def leave(self, comm: int) -> None:
        self.members.pop(comm, None)
        self._early.pop(comm, None)
        self._closed.add(comm)

    def call(self, fn: Callable[[*Ts], None], *args: *Ts) -> None:
        """Call `fn`, which may complete operations, with the lock (thread of gloo or of this module)."""
        with transport_lock:
            try:
                fn(*args)
            except Exception as error:  # noqa: BLE001  - an error must not end the thread
                self.progress.report("the callback of a frame failed", error)
            self.progress.make_calls()
            self.progress.ensure_polled()

    def frame_arrived(self, src: int, frame: GlooFrame) -> None:
        member = self.members.get(frame.header.comm)
        if member is not None:
            member.frame_arrived(src, frame)
        elif frame.header.comm not in self._closed:
            self._early.setdefault(frame.header.comm, []).append((src, frame.copied()))

    def lost(self, rank: int, error: BackendError) -> None:
        if not self._closing:
            for member in list(self.members.values()):
                member.lost(rank, error)

    def abort(self, error: BackendError) -> None:
        """Stop all sends and receives."""
        self._closing = True
        for peer in self.peers.values():
            peer.error = peer.error or error
            peer.abort(error)

    def _at_exit(self) -> None:
        """Close the wire at exit: a thread that returns from gloo while the interpreter ends would end the process."""
        if os.getpid() == self._pid:
            self.close()

    def close(self) -> None:
        """End the threads and close the connections (lock not held). The call blocks for `CLOSE_SECONDS` at most."""
        with self._close_lock:  # at exit, the interpreter waits for another thread's close
            if self._closed_all:
                return
            self._closed_all = True
            for close in list(self.at_close):
                close()
            abort_group(self.group, self.peers)
            until = monotonic() + CLOSE_SECONDS
            if all([peer.join(until) for peer in self.peers.values()]):  # noqa: C419  - each must be joined
                del self.group
            atexit.unregister(self._at_exit)


class GlooPeer:
    """Frames to and from one other rank of the world (transport lock held, unless a method says otherwise)."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire = wire
        self.rank = rank
        self.error: BackendError | None = None  # why the peer cannot be reached, or None
        self.sent: deque[Work] = deque()  # frames that must stay alive until the peer acknowledges them
        self._offers: dict[int, tuple[list[Work], Done]] = {}
        self._next_payload = PAYLOADS
        self._received = self._reported = self._acknowledged = 0
        self._payloads: SimpleQueue[tuple[int, list[Work], Done] | None] = SimpleQueue()
        self._threads = [OwnThread(f"aiodist-gloo-{rank}", self._receive)]
        self._threads[0].start()

    # Sending.

    def send(
        self, kind: int, comm: int = 0, tag: int = 0, number: int = 0, nbytes: int = 0, data: Tensor | None = None
    ) -> BackendError | None:
        """Send a frame with a copy of `data` and the number of received frames. Return an error if that fails."""
        if self.error is not None:
            return self.error
        self._reported = self._received
        size = 0 if data is None else data.nbytes
        frame = GlooFrame.write(Header(kind, comm, tag, number, nbytes, extra=self._reported, size=size), data)
        try:
            self.sent.append(self._wire.group.send([frame], self.rank, FRAMES))
        except Exception as error:  # noqa: BLE001  - torch chooses the class
            return backend_error(error)
        return None

    def offer(self, t: Tensor, tag: int, comm: int, done: Done) -> None:
        """Announce and send `t`, done when the peer acknowledges the data."""
        parts = pieces(bytes_of(t))
        if self._next_payload + len(parts) > LAST_PAYLOAD:
            self._next_payload = PAYLOADS
        number = self._next_payload
        self._next_payload += len(parts)
        error = self.send(OFFER, comm, tag, number, t.nbytes)
        works: list[Work] = []
        try:
            if error is None:
                send = self._wire.group.send
                works = [send([part], self.rank, number + i) for i, part in enumerate(parts)]
        except Exception as raised:  # noqa: BLE001  - as above
            error = backend_error(raised)
        if error is None:
            self._offers[number] = works, done
        else:
            done(again(error))

    def fetch(self, number: int, into: Tensor, done: Done) -> None:
        """Receive the data of offer `number` into the bytes `into`."""
        try:
            receive = self._wire.group.recv
            parts = pieces(into)
            works = [receive([part], self.rank, number + i) for i, part in enumerate(parts)]
        except Exception as error:  # noqa: BLE001  - as above
            done(backend_error(error))
            return

        if len(self._threads) == 1:
            self._threads.append(OwnThread(f"aiodist-gloo-{self.rank}-data", self._collect))
            self._threads[1].start()
        self._payloads.put((number, works, done))

    # Receiving, on separate threads, which take the lock for callbacks.

    def _receive(self) -> None:
        try:
            works = deque(self._post(empty(HEADER_BYTES + self._wire.capacity)) for _ in range(_POSTED))
            while True:
                work, buffer, view = works.popleft()
                work.wait(FOREVER)
                self._wire.call(self._arrived, buffer, view)
                works.append(self._post(buffer, view))
        except Exception as error:  # noqa: BLE001  - without this thread no frame of that rank is received
            self._wire.call(self._lost, backend_error(error, f"rank {self.rank} cannot be reached: "))

    def _post(self, buffer: Tensor, view: memoryview | None = None) -> tuple[Work, Tensor, memoryview]:
        work = self._wire.group.recv([buffer], self.rank, FRAMES)
        return work, buffer, memoryview(cast(Any, buffer.numpy())) if view is None else view

    def _arrived(self, buffer: Tensor, view: memoryview) -> None:
        if self.error is not None:
            return
        frame = GlooFrame.read(buffer, view)
        header, acknowledged = frame.header, frame.header.extra
        self._received += 1
        if not 0 <= acknowledged - self._acknowledged <= len(self.sent):
            sent = f"{self._acknowledged + len(self.sent)} were sent to it, and {self._acknowledged} acknowledged"
            self._lost(BackendError(f"gloo: rank {self.rank} acknowledges {acknowledged} frames: {sent}"))
            return
        for _ in range(acknowledged - self._acknowledged):
            self.sent.popleft()
        self._acknowledged = acknowledged
        if self._received - self._reported >= CREDIT:
            self.send(CREDITS)
        if header.kind == TAKEN:
            if (offer := self._offers.pop(header.number, None)) is None:
                self._lost(BackendError(f"gloo: rank {self.rank} took data number {header.number}: none was offered"))
            else:
                offer[1](None)
        elif header.kind != CREDITS:
            self._wire.frame_arrived(self.rank, frame)

    def _collect(self) -> None:
        """Wait for data in the order of the receives. The peer has sent all these data already."""
        while (item := self._payloads.get()) is not None:
            number, works, done = item
            failure: BackendError | None = None
            try:
                for work in works:
                    work.wait(FOREVER)
            except Exception as error:  # noqa: BLE001  - as above
                failure = backend_error(error)
            self._wire.call(self._end_fetch, number, done, failure)
            del works, done, item

    def _end_fetch(self, number: int, done: Done, error: BackendError | None) -> None:
        if error is None:
            self.send(TAKEN, number=number)
        done(error)

    def _lost(self, error: BackendError) -> None:
        if self.error is None:
            self.error = error
            self.abort(error)
            self._wire.lost(self.rank, error)

    def abort(self, error: BackendError) -> None:
        """Fail the offers that the peer has not taken."""
        offers, self._offers = self._offers, {}
        tell((done, again(error)) for _, done in offers.values())

    def join(self, until: float) -> bool:
        """Wait for the threads after the close of the connection. Return True if all ended. The lock is not held."""
        self._payloads.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        if ended:  # otherwise sent frames may still be in use
            self.sent.clear()
        return ended
