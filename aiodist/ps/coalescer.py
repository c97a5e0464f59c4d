"""Entries between ranks: put together into frames while earlier frames are on their way.

A frame goes out at once when fewer than `_WINDOW` frames of requests are unanswered; otherwise entries gather until it
is full, or an answer comes. So a single small request is quick, and many cost little each. Entries between two ranks
arrive in order, and once: frames are numbered, and kept until the other side says that they came; what nobody has
spoken of for a while is sent again, and what came before is ignored. Every method runs with the transport lock held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import Done, Transport
from aiodist.ps.wire import ENTRY, FRAME, LAST, NUMBERED, REQUESTS
from aiodist.types import ANY

_UNTOLD = 8
"""So many frames without a request may come before their sender is told."""
_FRAME_TAG = 1
_DATA_TAGS = 1 << 20
_CONTINUES = 0x80
"""Of an entry's kind: the rest of it is in the next frame."""
_WINDOW = 2
_FULL_WINDOW = 16
_SHORT_BYTES = range(3 << 10, 4 << 10)
"""Full enough, and still what a library sends at once: longer messages wait for a sender that polls."""
_LONG_BYTES = 16 << 10
_ROOM_BYTES = 64 << 10
_FIXED_BYTES = 4 << 10  # of each frame where a receive must be as long as what it receives
RESENDS = 120
"""Who has taken nothing after so many cannot be reached: a rank that can says at once that it has what comes again."""
_PADDING = tuple(bytes(-n % 8) for n in range(8))


def keep(t: Tensor, error: BaseException | None) -> None:
    """Hold on to `t` until it is sent; whether that went well its receiver tells, or the control channel."""


Heard = Callable[[int, int, memoryview], None]
"""(rank, kind, body) of an entry; the body may be kept and written to, its memory is used for nothing else."""


@dataclass(eq=False, slots=True)
class _Outgoing:
    """What goes to one rank."""

    frame: bytearray = field(default_factory=lambda: bytearray(FRAME.size))
    has_requests: bool = False
    full: deque[tuple[bytearray, bool]] = field(default_factory=deque)
    sent: deque[tuple[bytearray, int]] = field(default_factory=deque)
    """Frames that may not have come, with their flags."""
    next: int = 0
    """The number of the next one."""
    unanswered: int = 0
    """How many of those sent have requests."""
    oldest: bytearray | None = None
    """Of those sent, when that was last looked at."""
    resent: int = 0
    """How often it was sent again."""
    awaited: int = 0
    """The number of the next frame from there."""
    came: int = 0
    """How many have come since it was told of any."""
    owed: bool = False
    """It waits to be told."""
    gone: bool = False

    def taken(self) -> tuple[bytearray, bool]:
        """Begin another frame, and return this one and whether it has requests."""
        taken = self.frame, self.has_requests
        self.frame = bytearray(FRAME.size)
        self.has_requests = False
        return taken

    def close(self) -> None:
        self.full.append(self.taken())

    def takes(self, number: int, flags: int) -> bool:
        """Return whether a frame from there is the one awaited: not one that came, nor one behind a missing one."""
        if number != self.awaited:
            self.owed = True
            return False
        self.awaited += 1
        self.came += 1
        self.owed = self.owed or bool(flags & REQUESTS) or self.came >= _UNTOLD
        return True


class Coalescer:
    """Puts the entries of one rank together into frames, sends these, and hears those of the others."""

    def __init__(
        self,
        transport: Transport,
        heard: Heard,
        failed: Callable[[BaseException], None],
        ring: Callable[[int], None],
        later: Callable[[], None],
        unheard: Callable[[int], None],
    ) -> None:
        """`failed` is told that nothing can be received; `ring(rank)` wakes who may sleep when something comes.

        `later` has `resend` called in a while; `unheard(rank)` is told that all that it sent again was in vain.
        """
        self._transport = transport
        self.rank = transport.rank
        self._heard = heard
        self._failed = failed
        self._ring = ring
        self._later = later
        self._unheard = unheard
        self._looks_later = False
        can = transport.capabilities()
        short = can.short_receives
        self._send_now = can.send_now
        self._fixed_bytes = 0 if short else _FIXED_BYTES
        self._room_bytes = _ROOM_BYTES if short else _FIXED_BYTES
        self._full_bytes = min(_LONG_BYTES, self._room_bytes)
        self.inline_bytes = self._room_bytes // 2 - 256
        """The most data that an entry carries."""
        self._longest = self._room_bytes - FRAME.size - ENTRY.size
        assert self._longest % 8 == 0
        self._room = torch.empty(self._room_bytes, dtype=torch.uint8, device="cpu")
        self._came = self._room.numpy().data
        self._outgoing = [_Outgoing() for _ in range(transport.size)]
        self._to_flush: set[int] = set()
        self._begun: dict[int, bytearray] = {}  # by rank: an entry of which more is to come
        self._own: deque[tuple[int, bytearray]] = deque()
        self._handling = False
        self._closed = False
        self._failures = 0
        self._ended: Callable[[], None] | None = None
        self.congested = False
        """Full frames wait for answers to earlier ones."""
        self.sent_bytes = 0

    def open(self) -> None:
        if self._transport.size > 1:
            self._listen()

    # --- sending ---------------------------------------------------------------------------------------------

    def put(self, dst: int, kind: int, head: bytes, data: bytes = b"", *, request: bool = False) -> None:
        """Have an entry go to `dst` with the next `flush`; `request`: the other side answers."""
        if dst == self.rank:
            self._own.append((kind, bytearray(head + data)))
            return
        outgoing = self._outgoing[dst]
        length = len(head) + len(data)
        if length > self._longest:
            self._put_long(dst, kind, head + data, request)
            return
        used = len(outgoing.frame)
        if used > FRAME.size and (used in _SHORT_BYTES or used + length + 2 * ENTRY.size > self._full_bytes):
            outgoing.close()
        frame = outgoing.frame
        frame += ENTRY.pack(kind, length)
        frame += head
        frame += data
        if length % 8:
            frame += _PADDING[length % 8]
        if request:
            outgoing.has_requests = True
        self._to_flush.add(dst)

    def _put_long(self, dst: int, kind: int, body: bytes, request: bool) -> None:
        *others, last = [body[at : at + self._longest] for at in range(0, len(body), self._longest)]
        for piece in others:
            self.put(dst, kind | _CONTINUES, piece, request=request)
        self.put(dst, kind, last, request=request)

    def flush(self) -> None:
        while self._to_flush:
            dst = self._to_flush.pop()
            outgoing = self._outgoing[dst]
            if outgoing.gone:
                outgoing.full.clear()
                outgoing.frame = bytearray(FRAME.size)
            else:
                self._send_some(dst, outgoing)
        if self._own and not self._handling:
            self._handle_own()

    def _send_some(self, dst: int, outgoing: _Outgoing) -> None:
        while outgoing.full and outgoing.unanswered < _FULL_WINDOW:
            self._send(dst, outgoing, *outgoing.full.popleft())
        self.congested = bool(outgoing.full)
        if outgoing.unanswered < _WINDOW and len(outgoing.frame) > FRAME.size:
            self._send(dst, outgoing, *outgoing.taken())
        if outgoing.owed:
            # No answer has taken the word along that its frames were read.
            self._send(dst, outgoing, bytearray(FRAME.size), False)

    def _send(self, dst: int, outgoing: _Outgoing, frame: bytearray, has_requests: bool, flags: int = 0) -> None:
        self.sent_bytes += len(frame)
        number = outgoing.next
        if len(frame) > FRAME.size or flags:
            flags |= NUMBERED | has_requests * REQUESTS
            outgoing.next += 1
            outgoing.sent.append((frame, flags))
            outgoing.unanswered += has_requests
            self._look_later()
        FRAME.pack_into(frame, 0, self.rank, len(frame), number, outgoing.awaited, flags)
        outgoing.owed, outgoing.came = False, 0
        if self._fixed_bytes:
            frame.extend(bytes(self._fixed_bytes - len(frame)))
        self._transmit(frame, dst)

    def _look_later(self) -> None:
        if not self._looks_later:
            self._looks_later = True
            self._later()

    def resend(self) -> None:
        self._looks_later = False
        for dst, outgoing in enumerate(self._outgoing if not self._closed else ()):
            if not outgoing.sent or outgoing.gone:
                continue
            if outgoing.oldest is outgoing.sent[0][0]:
                for frame, _ in outgoing.sent:
                    self._transmit(bytearray(frame), dst)  # the first one may still be on its way
                outgoing.resent += 1
                if outgoing.resent == RESENDS:
                    self._unheard(dst)
            else:
                outgoing.oldest, outgoing.resent = outgoing.sent[0][0], 0
            self._look_later()

    def _transmit(self, frame: bytearray, dst: int) -> None:
        if self._send_now is None or not self._send_now(frame, dst, _FRAME_TAG):
            t = torch.frombuffer(frame, dtype=torch.uint8)
            self._transport.isend(t, dst, _FRAME_TAG, partial(keep, t))
            self._ring(dst)

    def send(self, t: Tensor, dst: int, number: int, done: Done) -> None:
        """Send flat uint8 `t` as the data of request `number`."""
        self.sent_bytes += t.nbytes
        self._transport.isend(t, dst, _DATA_TAGS + number % _DATA_TAGS, done)

    def receive(self, t: Tensor, src: int, number: int, done: Done) -> None:
        """Receive the data of request `number` into flat uint8 `t`."""
        self._transport.irecv(t, src, _DATA_TAGS + number % _DATA_TAGS, done)

    # --- receiving -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._transport.irecv(self._room, ANY, _FRAME_TAG, self._arrived)

    def _arrived(self, error: BaseException | None) -> None:
        if self._closed:
            return
        if error is not None:
            # A backend says once of each rank that is lost that nothing more comes from it.
            self._failures += 1
            if self._failures < self._transport.size:
                self._listen()
            else:
                self._failed(error)
            return
        source, used, number, awaited, flags = FRAME.unpack_from(self._came)
        body = memoryview(bytearray(self._came[:used]))
        outgoing = self._outgoing[source]
        self._to_flush.add(source)
        while outgoing.sent and outgoing.next - len(outgoing.sent) < awaited:  # these have come there
            outgoing.unanswered -= outgoing.sent.popleft()[1] & REQUESTS
        if flags & NUMBERED and not outgoing.takes(number, flags):
            used, flags = 0, 0
        at = FRAME.size
        while at < used:
            kind, length = ENTRY.unpack_from(body, at)
            at += ENTRY.size
            self._take(source, kind, body[at : at + length])
            at += length + -length % 8
        self.flush()
        if flags & LAST:
            self._closed = True
            if self._ended is not None:
                self._ended()
        else:
            self._listen()  # after the answers, for which somebody waits

    def _take(self, source: int, kind: int, body: memoryview) -> None:
        if kind & _CONTINUES:
            self._begun.setdefault(source, bytearray()).extend(body)
            return
        if source in self._begun:
            body = memoryview(self._begun.pop(source) + body)
        self._heard(source, kind, body)

    def _handle_own(self) -> None:
        self._handling = True
        try:
            while self._own:
                kind, body = self._own.popleft()
                self._heard(self.rank, kind, memoryview(body))
        finally:
            self._handling = False
        if self._to_flush:
            self.flush()

    # --- the end ---------------------------------------------------------------------------------------------

    def forget(self, rank: int) -> None:
        outgoing = self._outgoing[rank]
        outgoing.gone = True
        outgoing.sent.clear()

    def say_last(self, dst: int) -> None:
        """Send `dst` all that is left, and that nobody will send it anything after this."""
        outgoing = self._outgoing[dst]
        if outgoing.gone:
            return
        if len(outgoing.frame) == FRAME.size and not outgoing.full:
            self._send(dst, outgoing, bytearray(FRAME.size), False, LAST)
            return
        if len(outgoing.frame) > FRAME.size:
            outgoing.close()
        while outgoing.full:
            frame, has_requests = outgoing.full.popleft()
            self._send(dst, outgoing, frame, has_requests, 0 if outgoing.full else LAST)

    def when_last(self, ended: Callable[[], None]) -> None:
        """Call `ended` once nothing is listened for any more: now, if that is so."""
        if self._closed or self._transport.size == 1:
            ended()
        else:
            self._ended = ended

    def abort(self) -> None:
        """Hear nothing any more; what was sent is left to the transport."""
        self._closed = True
        for outgoing in self._outgoing:
            outgoing.gone = True
