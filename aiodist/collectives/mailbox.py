"""Point to point: tensors and objects between two ranks, matched by source and tag in issue order.

A message is a header of fixed size, with the data in it when that is short; longer data follows under a tag of
its own. One receive for headers, from any source, is posted while somebody waits; matching is done here. So a
receive that nothing matched can be withdrawn without losing a message, sizes need not be known, and every backend
behaves the same. A synchronous message asks for an answer, a header of its own kind, when a receive has matched it.
"""

from __future__ import annotations

import asyncio
import struct
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import Done, Transport, dtype_name, guarded, keeping, ours, tell
from aiodist.backends.inplace import bytes_of, copy
from aiodist.collectives.cuda.on_device import DeviceWork
from aiodist.collectives.endpoint import DeviceMessages
from aiodist.collectives.metadata import META_BYTES, Meta, pack_meta, unpack_meta
from aiodist.errors import BackendError
from aiodist.handles import join
from aiodist.types import ANY

_HEADER = struct.Struct("<BBiqI")  # kind, form, source, tag, payload number
_BEHIND, _INLINE, _IN_PIECES, _RETURNED = range(4)
"""Forms: the data follow in a message of their own, are in the header's, or follow as `DeviceMessages` sends them; or
the receive that they were for was given up."""
_SYNCHRONOUS, _KEPT = 0x80, 0x40
"""Added to the form of a message that asks for an answer; of one whose send ends only after a receive has matched it.
"""
_META_AT = _HEADER.size
_DATA_AT = _META_AT + META_BYTES
_FRAME_BYTES = 1024
_INLINE_BYTES = _FRAME_BYTES - _DATA_AT
_HEADER_TAG = 0
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
_PAYLOAD_TAGS = 1 << 20
_MOST_LINES = 4096


@dataclass(frozen=True)
class Arrived:
    """A message that was received."""

    data: Any
    """The tensor, or the object that it was unpacked to."""
    source: int
    tag: int
    nbytes: int
    kind: int
    """What it carries: `Mailbox.TENSOR` or `Mailbox.OBJECT`."""


@dataclass(frozen=True)
class Unpacked:
    """An object in place of its bytes: of a message that was received, and given back."""

    obj: Any


@dataclass(eq=False)
class Wanted:
    """A receive that waits for its message."""

    kind: int
    """Of the messages that it takes; ANY takes both."""
    src: int
    tag: int
    into: Tensor | None
    finish: Callable[[Arrived | None, BaseException | None], None]
    work: DeviceWork | None = None
    """What it does on a device, where `into` lies on one, or the message may."""
    work_later: Callable[[], DeviceWork] | None = None
    """Makes it, where the message may and this process has used no device yet: it opens none for what may not come."""
    given: _Unexpected | None = None
    """The message that it was matched with."""
    handle: object = None
    """The handle of the receive, once a message has matched it."""
    take: Callable[[], bool] = lambda: True
    """Called when a message matches; False withdraws the receive."""

    def cancel(self) -> None:
        """Nothing of it will be done on a device."""
        if self.work is not None:
            self.work.cancel()


@dataclass(eq=False)
class _Unexpected:
    """A message that came before its receive; `data` is there already if it was short or from this rank."""

    kind: int
    source: int
    tag: int
    payload: int
    meta: Meta
    form: int
    data: Tensor | None = field(repr=False)
    synchronous: bool = False
    """Its sender waits for an answer."""
    kept: bool = False
    """True until a receive matches it, if its send ends only after that."""
    place: int = 0
    """Number in the order of arrival."""
    error: BaseException | None = None
    """Error of its transfer, if it was put back before the transfer was finished."""
    waiting: list[Done] = field(default_factory=list)
    """Callbacks for the end of that transfer."""
    unpacked: Unpacked | None = field(default=None, repr=False)
    """The object that it carries, if a receive has unpacked it."""

    def __str__(self) -> str:
        what = self.meta if self.kind == Mailbox.TENSOR else f"an object of {self.meta.nbytes} bytes"
        return f"rank {self.source} sent tag {self.tag} {what}"


class Mailbox:
    """All sends and receives of one communicator; every method runs with the transport lock held.

    What is raised while a message is sent or received is the error of that one: `done` or `finish` gets it.
    """

    TENSOR, OBJECT, _FAREWELL, _ANSWER = range(4)

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.device_messages: DeviceMessages | None = None
        """Takes tensors that lie on a device."""
        self._frame_bytes = _FRAME_BYTES if not transport.capabilities().short_receives else 0
        self._wanted: list[Wanted] = []
        self._unexpected: list[_Unexpected] = []
        self._listening = False
        self.sent: Counter[int] = Counter()
        """How many headers went to each other rank, and came from each: equal on both where none is on its way."""
        self.heard: Counter[int] = Counter()
        self._sent = 0
        self._lines: dict[int, object] = {}
        self._heard_of = 0
        self._unanswered: dict[int, Done] = {}
        """By payload number: the synchronous messages that nothing is known to have matched."""
        self.taking: dict[Wanted, int] = {}
        """Receives that have matched a message in flight, each with the size of that in bytes."""
        self._kept_from = transport.capabilities().kept_from
        self.kept = 0
        """How many messages are pending that end only after a receive has matched them, but for synchronous ones."""
        self.kept_sent: Counter[int] = Counter()
        """How many of these have ended, by rank; no more than that rank's receives have matched, see `kept_matched`."""
        self.kept_matched: Counter[int] = Counter()
        self._parting: Done | None = None
        self._farewell_heard = False

    @property
    def wanted(self) -> tuple[Wanted, ...]:
        """The receives that nothing has matched."""
        return tuple(self._wanted)

    @property
    def unanswered(self) -> int:
        """How many synchronous messages nothing is known to have matched."""
        return len(self._unanswered)

    def note(self, number: int, line: object) -> None:
        """Keep for a while which line sent message `number`."""
        self._lines[number] = line
        if len(self._lines) > _MOST_LINES:
            del self._lines[next(iter(self._lines))]

    def line_of(self, number: int) -> object | None:
        """Return which line sent message `number`; None where that is no longer kept."""
        return self._lines.get(number)

    def leftovers(self) -> list[tuple[int, int, str]]:
        """Return what came and no receive has matched: its source, the number that it has there, and words."""
        return [(message.source, message.payload, str(message)) for message in tuple(self._unexpected)]

    def unmatched(self) -> list[str]:
        """Return what came and no receive has matched, as words; from any thread."""
        return [str(message) for message in tuple(self._unexpected)]

    def keeps(self, t: Tensor, dst: int) -> bool:
        """Return whether a send of `t` ends only after a receive has matched it."""
        kept = self._kept_from is not None and t.nbytes >= max(self._kept_from, _INLINE_BYTES + 1)
        return kept and t.is_cpu and dst != self._transport.rank

    def send(
        self, t: Tensor, dst: int, tag: int, kind: int, done: Done, *, line: object = None, synchronous: bool = False
    ) -> None:
        """Send `t`; `done` when it may be reused, which for this rank itself is at once.

        `line` is where it was issued. `synchronous`: not before a receive has matched it.
        """
        self.note(self._sent % _PAYLOAD_TAGS + 1, line)
        guarded(lambda told: self.carry(t, dst, tag, kind, synchronous, told), done)

    def carry(self, t: Tensor, dst: int, tag: int, kind: int, synchronous: bool, done: Done) -> None:
        """Begin the send; as `send`, but what it raises is not told to `done`."""
        flat = bytes_of(t)
        self._sent = number = self._sent % _PAYLOAD_TAGS + 1
        if synchronous:
            done = self._unanswered[number] = join(2, done)
            self.listen()
        if dst == self._transport.rank:
            meta = unpack_meta(pack_meta(t))
            # What it is copied behind on a device is queued on the stream that is current now.

            def copied(data: Tensor | None, error: BaseException | None) -> None:
                if data is not None:
                    self.arrived(_Unexpected(kind, dst, tag, number, meta, _INLINE, data, synchronous))
                done(error)

            if t.is_cpu:
                copied(flat.clone(), None)
            else:
                assert self.device_messages is not None
                self.device_messages.fetch(flat, copied)
            return
        inline = flat.nbytes <= (_INLINE_BYTES if t.is_cpu else 0)
        form = _INLINE if inline else _BEHIND if t.is_cpu else _IN_PIECES
        marked = form | _SYNCHRONOUS if synchronous else form
        if not synchronous and self.keeps(t, dst):
            marked = form | _KEPT
            done = self._keeping(dst, done)
        frame = self._frame(dst, kind, marked, tag, t, number, flat.nbytes if inline else 0)
        if inline:
            frame[_DATA_AT : _DATA_AT + flat.nbytes] = flat
            self._transport.isend(frame, dst, _HEADER_TAG, keeping(frame, done))
        else:
            both = join(2, keeping(frame, done))
            self._transport.isend(frame, dst, _HEADER_TAG, both)
            if form == _BEHIND:
                guarded(lambda told: self._transport.isend(flat, dst, number, told), both)
            else:
                assert self.device_messages is not None
                guarded(partial(self.device_messages.send, self._transport, flat, dst, number), both)

    def _keeping(self, dst: int, done: Done) -> Done:
        """Return `done`, counting a message that is kept until a receive has matched it."""
        self.kept += 1

        def over(error: BaseException | None) -> None:
            self.kept -= 1
            self.kept_sent[dst] += error is None
            done(error)

        return over

    def _frame(self, dst: int, kind: int, form: int, tag: int, t: Tensor, number: int, room: int = 0) -> Tensor:
        """Return the header of message `number`, of `t`, to rank `dst`, with so much room behind it."""
        head = _HEADER.pack(kind, form, self._transport.rank, tag, number) + pack_meta(t)
        frame = torch.empty(self._frame_bytes or (_DATA_AT + room), dtype=torch.uint8, device="cpu")
        frame[:_DATA_AT] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self.sent[dst] += 1
        return frame

    def part(self, done: Done) -> None:
        """Take in what was sent to this rank; `done` when the rank before it, in a ring, has said that it ends too.

        Every rank says so to the next one, when all have issued what they will. So no receive stays behind.
        """
        following = (self._transport.rank + 1) % self._transport.size
        frame = self._frame(following, self._FAREWELL, _INLINE, 0, _NOTHING, 0)
        both = join(2, keeping(frame, done))
        self._transport.isend(frame, following, _HEADER_TAG, both)
        if self._farewell_heard:
            both(None)
        else:
            self._parting = both
            self.listen()

    def receive(self, wanted: Wanted) -> None:
        """Give `wanted` the first message that matches, now or when it comes."""
        for message in self._unexpected:
            if _matches(wanted, message):
                if self._takes(wanted):
                    self._unexpected.remove(message)
                    self._deliver(message, wanted)
                return
        self._wanted.append(wanted)
        try:
            self.listen()
        except Exception as error:  # noqa: BLE001  - it belongs to the task that awaits the receive
            if wanted in self._wanted:
                self._wanted.remove(wanted)
                _fail(wanted, ours(error))

    def waits(self, wanted: Wanted) -> bool:
        """Return whether nothing has matched `wanted`."""
        return wanted in self._wanted

    def cancel(self, wanted: Wanted) -> None:
        """Forget `wanted`, which nothing has matched."""
        self._wanted.remove(wanted)
        wanted.cancel()

    def listen(self) -> None:
        """Receive the next header, if none is waited for."""
        if self._listening or self._transport.size == 1:
            return
        self._listening = True
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8, device="cpu")
        guarded(partial(self._transport.irecv, frame, ANY, _HEADER_TAG), partial(self._heard, frame))

    def _heard(self, frame: Tensor, error: BaseException | None) -> None:
        self._listening = False
        if error is None:
            try:
                self._take_in(frame)
            except Exception as raised:  # noqa: BLE001  - whose message it was nobody knows
                error = ours(raised)
        if error is not None:
            self.abort(error)
        elif self._wanted or self._unanswered or (self._parting is not None and not self._farewell_heard):
            self.listen()

    def _take_in(self, frame: Tensor) -> None:
        """Take a message, an answer, or that the rank before this one in the ring says that it ends."""
        _, _, source, _, number = _HEADER.unpack_from(frame.numpy().data)
        self.heard[source] += 1
        if frame[0] == self._FAREWELL:
            self._farewell_heard = True
            if self._parting is not None:
                self._parting(None)
        elif frame[0] == self._ANSWER:
            self._unanswered.pop(number)(None)
        else:
            self.arrived(_read(frame))

    def _answer(self, message: _Unexpected) -> None:
        """Tell who sent it that a receive has matched it."""
        message.synchronous = False
        if message.source == self._transport.rank:
            self._unanswered.pop(message.payload)(None)
            return
        frame = self._frame(message.source, self._ANSWER, _INLINE, 0, _NOTHING, message.payload)
        told = keeping(frame, lambda error: None)  # who is gone waits for no answer
        guarded(partial(self._transport.isend, frame, message.source, _HEADER_TAG), told)

    def abort(self, error: BaseException) -> None:
        """Nothing can be received any more: receives that nothing has matched end, and their memory is free."""
        wanted, self._wanted = self._wanted, []
        unanswered, self._unanswered = self._unanswered, {}
        tell([*((partial(_fail, receive), error) for receive in wanted), *((d, error) for d in unanswered.values())])
        if self._parting is not None:
            self._parting(error)

    def arrived(self, message: _Unexpected) -> None:
        """Give a message to the receive that takes it, or keep it for one."""
        self._heard_of += 1
        message.place = self._heard_of
        if not self._matched(message):
            self._unexpected.append(message)

    def put_back(self, wanted: Wanted) -> Callable[[Arrived | None, BaseException | None], None]:
        """Put the message of `wanted` back into its old place; call `match_again` next.

        Return the callback for the end of the transfer, which may still be in flight.
        """
        message = wanted.given
        assert message is not None
        message.form, message.data = _RETURNED, None
        insort(self._unexpected, message, key=lambda other: other.place)

        def over(arrived: Arrived | None, error: BaseException | None) -> None:
            message.data = None if arrived is None else bytes_of(arrived.data.cpu())
            message.error = error
            tell((then, None) for then in message.waiting)

        return over

    def take_back(self, wanted: Wanted, data: Tensor | Unpacked) -> None:
        """Do what `put_back` does for a message that was received as `data`."""
        message = wanted.given
        assert message is not None
        message.form = _RETURNED
        if isinstance(data, Unpacked):
            message.unpacked = data
        else:
            front = bytes_of(data.cpu())[: message.meta.nbytes]
            message.data = front if wanted.into is None else front.clone()
        insort(self._unexpected, message, key=lambda other: other.place)

    def match_again(self) -> None:
        """Deliver the messages that were put back to the receives that match them."""
        for message in [message for message in self._unexpected if message.form == _RETURNED]:
            if self._wanted and self._matched(message):
                self._unexpected.remove(message)

    def _matched(self, message: _Unexpected) -> bool:
        """Return True, and deliver it, where a receive waits for such a message."""
        while (wanted := next((one for one in self._wanted if _matches(one, message)), None)) is not None:
            self._wanted.remove(wanted)
            if self._takes(wanted):
                self._deliver(message, wanted)
                return True
        return False

    def _takes(self, wanted: Wanted) -> bool:
        """Return whether `wanted` takes a message that matches; withdraw it otherwise."""
        if wanted.take():
            return True
        _fail(wanted, asyncio.CancelledError())
        return False

    def _match(self, message: _Unexpected, wanted: Wanted) -> None:
        wanted.given = message
        if message.synchronous:
            self._answer(message)
        if message.kept:
            message.kept = False
            self.kept_matched[message.source] += 1
        if message.data is None:
            self.taking[wanted] = message.meta.nbytes

    def _deliver(self, message: _Unexpected, wanted: Wanted) -> None:
        self._match(message, wanted)
        meta = message.meta
        refusal = _refusal(meta, wanted.into)
        into: Any = message.unpacked or (wanted.into if refusal is None else None)
        work: DeviceWork | None = None

        def finish(error: BaseException | None) -> None:
            self.taking.pop(wanted, None)
            if work is None:
                wanted.cancel()
            if error is not None or refusal is not None:
                wanted.finish(None, error or refusal)
            else:
                wanted.finish(Arrived(into, message.source, message.tag, meta.nbytes, message.kind), None)

        def take(told: Done) -> None:
            nonlocal into, work
            on_device = refusal is None and (meta.on_device if into is None else not into.is_cpu)
            if on_device and wanted.work is None and wanted.work_later is not None:
                wanted.work = wanted.work_later()
            if not on_device or wanted.work is None:
                if into is None:
                    into = torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
                self.take(message, bytes_of(into)[: meta.nbytes], told)
                return
            with wanted.work.current():
                wanted.work.begin()
                if into is None:
                    into = torch.empty(meta.shape, dtype=meta.dtype, device=wanted.work.stream.device)
                    wanted.work.lend(into)
                front = bytes_of(into)[: meta.nbytes]
                work = wanted.work
                self._take_to_device(message, front, work, told)

        guarded(take if message.unpacked is None else _there, finish)

    def take(self, message: _Unexpected, flat: Tensor, done: Done) -> None:
        """Move the bytes of a message into `flat`, in the way that its header says."""
        if message.error is not None:
            done(message.error)
        elif message.data is not None:
            copy(flat, message.data)
            done(None)
        elif message.form == _RETURNED:
            message.waiting.append(lambda _: guarded(partial(self.take, message, flat), done))
        elif message.form == _IN_PIECES:
            assert self.device_messages is not None
            pieces = self.device_messages.cut(flat)
            all_of_them = join(len(pieces), done)
            for piece in pieces:
                guarded(partial(self._transport.irecv, piece, message.source, message.payload), all_of_them)
        else:
            self._transport.irecv(flat, message.source, message.payload, done)

    def _take_to_device(self, message: _Unexpected, flat: Tensor, work: DeviceWork, done: Done) -> None:
        device_messages = self.device_messages
        assert device_messages is not None

        def there(error: BaseException | None) -> None:
            work.end(lambda lost: done(error or lost))

        def on_host(data: Tensor, error: BaseException | None) -> None:
            if error is not None:
                there(error)
                return
            with work.current():
                guarded(partial(device_messages.put, data, flat), there)

        if message.form == _IN_PIECES:
            guarded(partial(device_messages.recv, self._transport, flat, message.source, message.payload), there)
        elif message.data is not None:
            on_host(message.data, None)
        else:
            host = torch.empty(flat.numel(), dtype=torch.uint8, device="cpu")
            guarded(partial(self.take, message, host), partial(on_host, host))


def _read(frame: Tensor) -> _Unexpected:
    """Return the message whose header, and perhaps data, is in `frame`."""
    data = frame.numpy().data
    kind, form, source, tag, payload = _HEADER.unpack_from(data)
    meta = unpack_meta(data, _META_AT)
    synchronous, kept, form = bool(form & _SYNCHRONOUS), bool(form & _KEPT), form & ~(_SYNCHRONOUS | _KEPT)
    inlined = frame[_DATA_AT : _DATA_AT + meta.nbytes] if form == _INLINE else None
    return _Unexpected(kind, source, tag, payload, meta, form, inlined, synchronous, kept)


def _there(done: Done) -> None:
    done(None)


def _fail(wanted: Wanted, error: BaseException | None) -> None:
    wanted.cancel()
    wanted.finish(None, error)


def _matches(wanted: Wanted, message: _Unexpected) -> bool:
    return (
        wanted.kind in (ANY, message.kind) and wanted.src in (ANY, message.source) and wanted.tag in (ANY, message.tag)
    )


def _refusal(meta: Meta, into: Tensor | None) -> BaseException | None:
    """Return why the message does not fit `into`; it is received all the same, and thrown away."""
    if into is None:
        return None
    if into.dtype is not meta.dtype:
        return TypeError(f"a message of {meta} met a receive into {dtype_name(into.dtype)}: dtypes must agree")
    if into.numel() < meta.numel:
        return BackendError(f"a message of {meta} ({meta.nbytes} bytes) is longer than {into.nbytes} bytes")
    return None
