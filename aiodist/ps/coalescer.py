"""Packs entries for other ranks into frames, and passes the entries of received frames to their handlers.

A frame is sent immediately while fewer than `_WINDOW` frames of requests are unanswered. Otherwise entries gather until
the frame is full, or until an answer comes. So a single small request is fast, and each of many requests costs little.

Transports deliver the frames between two ranks once and in order. Frames are numbered nevertheless: a frame that came
before is ignored, and a missing frame is an error that names the rank. Every method runs with the transport lock held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from aiodist.backends.base import Done, Transport
from aiodist.errors import BackendError
from aiodist.handles import Progress
from aiodist.ps.wire import ENTRY, FRAME, Kind
from aiodist.types import ANY

_FRAME_TAG = 1
_DATA_TAGS = 1 << 20
_CONTINUES = 0x80
"""Flag of an entry's kind: the next frame has more of the entry."""
_WINDOW = 2
_FULL_WINDOW = 16
_SHORT_BYTES = range(3 << 10, 4 << 10)
"""Sizes of a frame with many entries that a library still sends without a receiver that polls."""
_PADDING = tuple(bytes(-n % 8) for n in range(8))


class _Sizes(NamedTuple):
    """Sizes of frames, in bytes."""

    room: int
    """Memory for a received frame."""
    full: int
    """Size from which a frame takes no more entries."""
    fixed: int
    """Size of each sent frame if a receive must be as long as its message, else 0."""
    longest: int
    """Longest part of an entry in one frame, a multiple of eight bytes."""


_SHORT_RECEIVES = _Sizes(64 << 10, 16 << 10, 0, (64 << 10) - FRAME.size - ENTRY.size)
_FIXED_RECEIVES = _Sizes(4 << 10, 4 << 10, 4 << 10, (4 << 10) - FRAME.size - ENTRY.size)

Handler = Callable[[int, memoryview], object]
"""Takes the rank and the body of an entry, which no other code uses."""


def keep(t: Tensor, error: BaseException | None) -> None:
    """Keep `t` until the end of its transfer. The receiver or the control channel reports an error."""


class _Transfers:
    """The data messages in one direction between two ranks, in order, which both ranks count."""

    def __init__(self) -> None:
        self._begun = 0
        self._open: set[int] = set()
        self._waits: list[tuple[int, Done]] = []

    def begin(self, done: Done) -> Done:
        """Count a transfer, and return the callback for its end, which calls `done`."""
        number = self._begun
        self._begun += 1
        self._open.add(number)

        def over(error: BaseException | None) -> None:
            self._open.discard(number)
            waits, self._waits = self._waits, []
            for wait in waits:
                self.when_ended(*wait)
            done(error)

        return over

    @property
    def ended(self) -> int:
        """Number of the first transfer that has not ended."""
        return min(self._open, default=self._begun)

    def when_ended(self, number: int, done: Done) -> None:
        """Call `done` when all transfers below `number` have ended."""
        if self.ended >= number:
            done(None)
        else:
            self._waits.append((number, done))

    def forget(self) -> None:
        """Wait for no transfer any more."""
        self._open.clear()
        waits, self._waits = self._waits, []
        for _, done in waits:
            done(None)


@dataclass(eq=False, slots=True)
class _Peer:
    """The frames and data messages to and from one other rank."""

    frame: bytearray = field(default_factory=lambda: bytearray(FRAME.size))
    """Entries that wait for the next frame."""
    has_requests: bool = False
    """True if `frame` has a request."""
    full: deque[tuple[bytearray, bool]] = field(default_factory=deque)
    """Full frames that wait, each with its `has_requests`."""
    sent: int = 0
    """Number of sent frames."""
    unanswered: int = 0
    """Number of sent frames of requests that the rank has not handled, as far as known."""
    received: int = 0
    """Number of received frames."""
    handled: int = 0
    """Number of received frames of requests since the last sent frame."""
    begun: bytearray = field(default_factory=bytearray)
    """Received parts of an entry that continues in the next frame."""
    sends: _Transfers = field(default_factory=_Transfers)
    """Data messages to the rank."""
    receives: _Transfers = field(default_factory=_Transfers)
    """Data messages from the rank."""
    gone: bool = False

    def take(self) -> tuple[bytearray, bool]:
        """Return the frame that gathers entries, and begin another."""
        taken = self.frame, self.has_requests
        self.frame, self.has_requests = bytearray(FRAME.size), False
        return taken


class Coalescer:
    """The frames of one rank."""

    def __init__(self, transport: Transport, progress: Progress, failed: Callable[[BaseException], None]) -> None:
        """`failed` takes the error after which this rank can receive nothing."""
        self._transport = transport
        self._progress = progress
        self._failed = failed
        self.ring: Callable[[int], None] | None = None
        """Function that wakes a rank that may sleep, or None if no rank shares memory."""
        self.rank = transport.rank
        can = transport.capabilities()
        self._send_now, self._receive_each = can.send_now, can.receive_each
        self._sizes = _SHORT_RECEIVES if can.short_receives else _FIXED_RECEIVES
        self.inline_bytes = self._sizes.room // 2 - 256
        """Most bytes of data in an entry."""
        self._room = torch.empty(self._sizes.room, dtype=torch.uint8, device="cpu")
        self._peers = [_Peer() for _ in range(transport.size)]
        self._to_flush: set[int] = set()
        self._own: deque[tuple[int, bytearray]] = deque()
        """Entries of this rank for itself."""
        self._handling_own = False
        self._handlers: Mapping[int, Handler] = {}
        self._closed = False
        self.congested = False
        """True if full frames to some rank wait for answers to earlier ones."""
        self._failures = 0
        self._ended: Done | None = None
        """Callback for the last entry, or None."""
        self.sent_bytes = 0

    def open(self, handlers: Mapping[int, Handler]) -> None:
        """Begin to receive, with the handler of each kind of entry."""
        self._handlers = handlers
        if self._transport.size > 1:
            self._receive()

    def _receive(self) -> None:
        if self._receive_each is None:
            self._transport.irecv(self._room, ANY, _FRAME_TAG, self._arrived)
        else:
            self._receive_each(self._room, _FRAME_TAG, self._take, self._arrived)

    # --- sending ---------------------------------------------------------------------------------------------

    def put(self, dst: int, kind: int, head: bytes, data: bytes = b"", *, request: bool = False) -> None:
        """Send an entry to `dst` with the next `flush`. True for `request` means that the other side answers."""
        if dst == self.rank:
            self._own.append((kind, bytearray(head + data)))
            return
        peer = self._peers[dst]
        length = len(head) + len(data)
        if length > self._sizes.longest:
            self._put_long(dst, kind, head + data, request)
            return
        used = len(peer.frame)
        if used > FRAME.size and (used in _SHORT_BYTES or used + length + 2 * ENTRY.size > self._sizes.full):
            peer.full.append(peer.take())
            self.congested = True
        frame = peer.frame
        frame += ENTRY.pack(kind, length)
        frame += head
        frame += data
        if length % 8:
            frame += _PADDING[length % 8]
        if request:
            peer.has_requests = True
        self._to_flush.add(dst)

    def _put_long(self, dst: int, kind: int, body: bytes, request: bool) -> None:
        longest = self._sizes.longest
        *others, last = [body[at : at + longest] for at in range(0, len(body), longest)]
        for part in others:
            self.put(dst, kind | _CONTINUES, part, request=request)
        self.put(dst, kind, last, request=request)

    def flush(self) -> None:
        """Send the frames that need not wait, and handle the entries of this rank for itself."""
        while self._to_flush:
            dst = self._to_flush.pop()
            peer = self._peers[dst]
            if peer.gone:
                peer.full.clear()
                peer.take()
                continue
            while peer.full and peer.unanswered < _FULL_WINDOW:
                self._send(dst, peer, *peer.full.popleft())
            if peer.unanswered < _WINDOW and len(peer.frame) > FRAME.size:
                self._send(dst, peer, *peer.take())
            if peer.handled:  # no answer has reported these frames
                self._send(dst, peer, bytearray(FRAME.size), False)
        self.congested = self.congested and any(peer.full for peer in self._peers)
        if not self._own or self._handling_own:
            return
        self._handling_own = True
        try:
            while self._own:
                kind, body = self._own.popleft()
                self._handlers[kind](self.rank, memoryview(body))
        except Exception as error:  # noqa: BLE001  - as in `_arrived`
            self._report(self.rank, error)
        finally:
            self._handling_own = False
        if self._to_flush:
            self.flush()

    def _send(self, dst: int, peer: _Peer, frame: bytearray, has_requests: bool) -> None:
        self.sent_bytes += len(frame)
        FRAME.pack_into(frame, 0, self.rank, len(frame), peer.sent, peer.handled, has_requests)
        peer.sent += 1
        peer.unanswered += has_requests
        peer.handled = 0
        if self._sizes.fixed:
            frame.extend(bytes(self._sizes.fixed - len(frame)))
        if self._send_now is None or not self._send_now(frame, dst, _FRAME_TAG):
            t = torch.frombuffer(frame, dtype=torch.uint8)
            self._transport.isend(t, dst, _FRAME_TAG, partial(keep, t))
            if self.ring is not None:
                self.ring(dst)

    def send(self, t: Tensor, dst: int, number: int, done: Done) -> None:
        """Send flat uint8 `t` as the data of request `number`."""
        self.sent_bytes += t.nbytes
        self._transport.isend(t, dst, _DATA_TAGS + number % _DATA_TAGS, self._peers[dst].sends.begin(done))

    def receive(self, t: Tensor, src: int, number: int, done: Done) -> None:
        """Receive the data of request `number` into flat uint8 `t`."""
        self._transport.irecv(t, src, _DATA_TAGS + number % _DATA_TAGS, self._peers[src].receives.begin(done))

    def ended_sends(self, dst: int) -> int:
        """Return the number of the first data message to `dst` that the transport has not taken."""
        return self._peers[dst].sends.ended

    def when_received(self, src: int, number: int, done: Done) -> None:
        """Call `done` when the data messages below `number` from `src` have arrived. A lost message never arrives."""
        self._peers[src].receives.when_ended(number, done)

    # --- receiving -------------------------------------------------------------------------------------------

    def _arrived(self, error: BaseException | None) -> None:
        if self._closed:
            return
        if error is not None:
            self._failures += 1  # a backend reports each lost rank once
            if self._failures < self._transport.size:
                self._receive()
            else:
                self._failed(error)
            return
        came = self._room.numpy().data
        self._take(bytearray(came[: FRAME.unpack_from(came)[1]]))
        if not self._closed:  # after the answers, for which other ranks wait
            self._receive()

    def _take(self, frame: bytearray) -> None:
        if self._closed:
            return
        source, used, number, handled, has_requests = FRAME.unpack_from(frame)
        peer = self._peers[source]
        if number > peer.received:
            self._closed = True
            text = f"rank {source}: its frame {peer.received} to rank {self.rank} is lost, since frame {number} came"
            self._failed(BackendError(text))
            return
        if number < peer.received:
            return
        peer.received += 1
        peer.unanswered -= handled
        peer.handled += has_requests
        self._progress.resume_polling()
        self._to_flush.add(source)
        try:
            self._handle(source, peer, memoryview(frame)[:used])
        except Exception as raised:  # noqa: BLE001  - it must not end the progress of other operations
            self._report(source, raised)
        self.flush()

    def _handle(self, source: int, peer: _Peer, frame: memoryview) -> None:
        at = FRAME.size
        while at < len(frame):
            kind, length = ENTRY.unpack_from(frame, at)
            at += ENTRY.size
            body = frame[at : at + length]
            at += length + -length % 8
            if kind & _CONTINUES:
                peer.begun += body
            elif kind == Kind.LAST:
                self._closed = True
                self._end()
            else:
                if peer.begun:
                    body, peer.begun = memoryview(peer.begun + body), bytearray()
                self._handlers[kind](source, body)

    def _report(self, source: int, error: Exception) -> None:
        """Report the error of a handler, after which the order of requests is lost."""
        self._progress.report(f"parameter server: an entry of rank {source} failed", error)
        self._failed(error)

    # --- the end ---------------------------------------------------------------------------------------------

    def forget(self, rank: int) -> None:
        """Send a rank that is gone nothing more, and wait for none of its data, nor for the last entry."""
        self._peers[rank].gone = True
        self._peers[rank].receives.forget()
        self._end()

    def put_last(self, dst: int) -> None:
        """Send `dst` all entries now, with the notice that no rank will send it anything later."""
        self.put(dst, Kind.LAST, b"")
        peer = self._peers[dst]
        peer.full.append(peer.take())
        while peer.full and not peer.gone:
            self._send(dst, peer, *peer.full.popleft())

    def when_last(self, done: Done) -> None:
        """Call `done` when this rank receives nothing more, or when a lost rank may owe the last entry."""
        if self._closed or self._transport.size == 1 or any(peer.gone for peer in self._peers):
            done(None)
        else:
            self._ended = done

    def _end(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(None)

    def abort(self) -> None:
        """Receive nothing more. Frames in flight are not recalled."""
        self._closed = True
        for peer in self._peers:
            peer.gone = True
