"""Sends tensors and objects from rank to rank. Receives match messages by source and tag, in issue order.

A message is a frame with a header and short data. Longer data follow under a separate tag. One receive for frames, from
any source, is posted while a receive of the program waits. The mailbox matches messages, not the library. So a receive
without a message can be withdrawn without loss, sizes need not be known, and every backend behaves the same. The answer
to a synchronous message is a frame that is sent after the match.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import memmove, string_at

import torch
from torch import Tensor

from aiodist.backends.arithmetic import copy
from aiodist.backends.base import Done, Transport, ignore, ours, tell
from aiodist.backends.header import Header
from aiodist.backends.matching import Matching
from aiodist.collectives.cuda.on_device import on_devices
from aiodist.collectives.endpoint import DeviceMessages
from aiodist.collectives.messages import (
    FRAME_BYTES,
    INLINE_BYTES,
    Arrived,
    DataPlace,
    MailboxMessage,
    MailboxReceive,
    MessageFlag,
    MessageKind,
    Unpacked,
)
from aiodist.collectives.metadata import pack_meta, unpack_meta
from aiodist.handles.kernel import Transfer, resume, run, transfer, transfers
from aiodist.streams.memory import bytes_of
from aiodist.types import ANY

_FRAME_TAG = 0
_DATA_TAGS = 1 << 20
_MOST_LINES = 4096
_FAREWELL = 0  # below the numbers of messages


class Mailbox:
    """All sends and receives of one communicator. Every method runs with the transport lock held."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.device_messages: DeviceMessages | None = None
        """Moves tensors that are on a device, or None without devices."""
        can = transport.capabilities()
        self._least_bytes = 0 if can.short_receives else FRAME_BYTES
        self._room = torch.empty(FRAME_BYTES, dtype=torch.uint8, device="cpu")
        self._came = self._room.numpy().data
        self.matching: Matching[MailboxReceive, MailboxMessage] = Matching()
        """Messages without a receive, and receives without a message."""
        self._listening = self._looping = self._farewell_came = False
        self.sent: Counter[int] = Counter()
        """Number of frames sent to each other rank, whose `heard` of this rank is equal if no frame is in flight."""
        self.heard: Counter[int] = Counter()
        self._number = 0
        self.lines: dict[int, object] = {}
        """Lines of the last sends, by number of the message."""
        self._unanswered: dict[int, Done] = {}
        """Callbacks of unanswered synchronous messages, by number. `_FAREWELL` has the wait for the farewell."""
        self.taking: dict[MailboxReceive, int] = {}
        """Receives that have matched a message in flight, each with the size of the message in bytes."""
        self._kept_from = can.kept_from
        self.kept = 0
        """Number of pending sends that end only after a match. Synchronous sends are not counted."""
        self.kept_sent: Counter[int] = Counter()
        """Number of such sends that have ended, by destination, which counts these sends in `kept_matched`."""
        self.kept_matched: Counter[int] = Counter()

    @property
    def wanted(self) -> Sequence[MailboxReceive]:
        """The receives without a message."""
        return self.matching.receives

    @property
    def unanswered(self) -> int:
        """Number of synchronous messages without an answer."""
        return len(self._unanswered) - (_FAREWELL in self._unanswered)

    def leftovers(self) -> list[tuple[int, int, str]]:
        """Return the messages without a receive, as source, number at the source and text (any thread)."""
        return [(message.src, message.number, str(message)) for message in self.matching.messages]

    def keeps(self, t: Tensor, dst: int) -> bool:
        """Return True if a send of `t` ends only after a receive has matched the message."""
        kept = self._kept_from is not None and t.nbytes >= max(self._kept_from, INLINE_BYTES + 1)
        return kept and t.is_cpu and dst != self._transport.rank

    # --- sending ------------------------------------------------------------------------------------------------

    async def send(self, t: Tensor, dst: int, tag: int, kind: int, line: object, *, synchronous: bool = False) -> None:
        """Send `t` as a message. Return when `t` may be reused.

        `line` is the line of the call. A synchronous send returns after a receive has matched the message.
        """
        self._number = number = self._number % _DATA_TAGS + 1
        self.lines[number] = line
        if len(self.lines) > _MOST_LINES:
            del self.lines[next(iter(self.lines))]
        step: list[Transfer] = [(self._wait_for, number)] if synchronous else []
        kept = not synchronous and self.keeps(t, dst)
        flags = MessageFlag.SYNCHRONOUS * synchronous + MessageFlag.KEPT * kept
        if dst == self._transport.rank:
            meta = unpack_meta(pack_meta(t))
            message = MailboxMessage(dst, tag, number, meta, t.nbytes, DataPlace.INLINE, flags, kind=kind)
            message.data = await self._copied(bytes_of(t))
            await transfers([*step, (self._to_itself, message)])
            return
        place, size = DataPlace.AFTER if t.is_cpu else DataPlace.PIECES, 0
        if t.is_cpu and t.nbytes <= INLINE_BYTES:
            place, size = DataPlace.INLINE, t.nbytes
        header = Header(kind, self._transport.rank, tag, number, t.nbytes, place, flags, size)
        step.append((self._transport.isend, self._frame(header, t, dst), dst, _FRAME_TAG))
        if place == DataPlace.AFTER:
            step.append((self._transport.isend, bytes_of(t), dst, number))
        elif place == DataPlace.PIECES:
            assert self.device_messages is not None
            step.append((self.device_messages.send, self._transport, bytes_of(t), dst, number))
        self.kept += kept
        try:
            await transfers(step)
        finally:
            self.kept -= kept
        if kept:
            self.kept_sent[dst] += 1

    def _wait_for(self, number: int, done: Done) -> None:
        """Wait for the answer to a synchronous message, or for the farewell."""
        if number == _FAREWELL and self._farewell_came:
            done(None)
        else:
            self._unanswered[number] = done
            self.listen()

    async def _copied(self, flat: Tensor) -> Tensor:
        """Return a copy of `flat` on the host."""
        if flat.is_cpu:
            return flat.clone()
        assert self.device_messages is not None
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu")
        await transfer(self.device_messages.fetch, host, flat)
        return host

    def _to_itself(self, message: MailboxMessage, done: Done) -> None:
        self.arrived(message)
        done(None)

    def _frame(self, header: Header, t: Tensor | None, dst: int) -> Tensor:
        """Return a frame for rank `dst`, with the first `header.size` bytes of `t`."""
        self.sent[dst] += 1
        data = header.pack()
        if t is not None:
            data += pack_meta(t)
            if header.size:
                data += string_at(t.data_ptr(), header.size)
        return torch.frombuffer(bytearray(data.ljust(self._least_bytes, b"\0")), dtype=torch.uint8)

    def _answer(self, message: MailboxMessage) -> None:
        """Notify the sender that a receive has matched `message`."""
        if message.src == self._transport.rank:
            self._unanswered.pop(message.number)(None)
            return
        header = Header(MessageKind.ANSWER, self._transport.rank, number=message.number)
        answer = self._frame(header, None, message.src)
        run(transfer(self._transport.isend, answer, message.src, _FRAME_TAG))  # a lost rank waits for no answer

    async def part(self) -> None:
        """Send a farewell to the next rank, and receive frames until the farewell of the previous rank, in a ring.

        All ranks run this after their last operation. Then no receive stays posted.
        """
        following = (self._transport.rank + 1) % self._transport.size
        header = Header(MessageKind.FAREWELL, self._transport.rank)
        farewell = self._frame(header, None, following)
        send = (self._transport.isend, farewell, following, _FRAME_TAG)
        await transfers([send, (self._wait_for, _FAREWELL)])

    # --- frames that come ---------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Keep a receive for frames posted while a frame is expected."""
        if self._looping or self._transport.size == 1:
            return
        self._looping = True  # `irecv` may call `_heard` before the return; this loop then posts the next receive
        try:
            while (self.matching.expects or self._unanswered) and not self._listening:
                self._listening = True
                self._transport.irecv(self._room, ANY, _FRAME_TAG, self._heard)
        except BaseException:
            self._listening = False
            raise
        finally:
            self._looping = False

    def _heard(self, error: BaseException | None) -> None:
        """Handle a frame, which is a message, an answer or the farewell of the previous rank.

        Then receive the next frame.
        """
        self._listening = False
        try:
            if error is None:
                header = Header.read(self._came)
                self.heard[header.comm] += 1
                if header.kind == MessageKind.FAREWELL:
                    self._farewell_came = True
                    self._unanswered.pop(_FAREWELL, ignore)(None)
                elif header.kind == MessageKind.ANSWER:
                    self._unanswered.pop(header.number)(None)
                else:
                    self.arrived(MailboxMessage.read(header, self._came))
                self.listen()
        except Exception as raised:  # noqa: BLE001  - the frame may be for any receive, so all fail
            error = ours(raised)
        if error is not None:
            self.abort(error)

    def abort(self, error: BaseException) -> None:
        """End receives without a message, and waits for answers, with `error`."""
        wanted = self.matching.cancel_receives()
        unanswered, self._unanswered = self._unanswered, {}
        failed: list[Done] = [*(receive.fail for receive in wanted), *unanswered.values()]
        tell((done, error) for done in failed)

    # --- matching -----------------------------------------------------------------------------------------------

    def receive(self, wanted: MailboxReceive) -> None:
        """Give `wanted` the first message that matches, now or at arrival."""
        message = self.matching.post(wanted)
        if message is not None:
            if not self._deliver(message, wanted):
                self.matching.keep(message)
            return
        try:
            self.listen()
        except Exception as error:  # noqa: BLE001  - the error belongs to the task that awaits the receive
            if self.matching.waits(wanted):
                self.matching.cancel(wanted)
                wanted.fail(ours(error))

    def cancel(self, wanted: MailboxReceive) -> None:
        """Remove `wanted`, which no message has matched."""
        self.matching.cancel(wanted)
        wanted.cancel_work()

    def arrived(self, message: MailboxMessage) -> None:
        """Give a message to the first receive that takes the message, or keep the message."""
        if not message.order:
            self.matching.number(message)
        while (wanted := self.matching.match(message.src, message.tag, message.kind)) is not None:
            if self._deliver(message, wanted):
                return
        self.matching.keep(message)

    def put_back(self, wanted: MailboxReceive) -> Callable[[Arrived | None, BaseException | None], None]:
        """Put the message of `wanted` back into its old place. The caller then calls `match_again`.

        Return the callback for the end of the transfer, which may still be in flight.
        """
        message = wanted.given
        assert message is not None
        message.place, message.data = DataPlace.RETURNED, None
        self.matching.keep(message)
        return message.end_transfer

    def take_back(self, wanted: MailboxReceive, data: Tensor | Unpacked) -> None:
        """Put the message of `wanted`, which was received as `data`, back into its old place."""
        message = wanted.given
        assert message is not None
        message.place = DataPlace.RETURNED
        if isinstance(data, Unpacked):
            message.unpacked = data
        else:
            front = bytes_of(data.cpu())[: message.nbytes]
            message.data = front if wanted.into is None else front.clone()
        self.matching.keep(message)

    def match_again(self) -> None:
        """Deliver the messages that were put back to matching receives."""
        returned = [message for message in self.matching.messages if message.place == DataPlace.RETURNED]
        for message in self.matching.cancel_messages(returned):
            self.arrived(message)

    # --- delivery -----------------------------------------------------------------------------------------------

    def _deliver(self, message: MailboxMessage, wanted: MailboxReceive) -> bool:
        """Begin to move `message` to `wanted`. Withdraw `wanted` and return False if `wanted` takes no message."""
        if not wanted.take():
            wanted.fail(asyncio.CancelledError())
            return False
        wanted.given = message
        flags, message.flags = message.flags, 0
        if flags & MessageFlag.SYNCHRONOUS:
            self._answer(message)
        if flags & MessageFlag.KEPT:
            self.kept_matched[message.src] += 1
        if message.data is None:
            self.taking[wanted] = message.nbytes
        run(self._bring(message, wanted), wanted.finish)
        return True

    async def _bring(self, message: MailboxMessage, wanted: MailboxReceive) -> Arrived:
        """Move the bytes of a message to its receive. Return what arrived, or raise the error of the receive."""
        misfit = wanted.misfit(message)
        into = wanted.into if misfit is None else None
        data: Tensor | Unpacked
        work = None
        try:
            if message.unpacked is not None:
                data = message.unpacked
            elif misfit is None and (work := wanted.work_for(message)) is not None:
                data = await resume(on_devices(self._to_device(message, into, work.stream.device), [work], [into]))
            else:
                meta = message.meta
                data = torch.empty(meta.shape, dtype=meta.dtype, device="cpu") if into is None else into
                await self._to_host(message, data)
        finally:
            self.taking.pop(wanted, None)
            if work is None and wanted.work is not None:
                wanted.work.cancel()
        if misfit is not None:
            raise misfit
        return Arrived(data, message.src, message.tag, message.nbytes, message.kind)

    async def _to_host(self, message: MailboxMessage, into: Tensor) -> None:
        """Move the bytes of a message to the front of `into`, which is on the host."""
        while message.place == DataPlace.RETURNED and message.data is None and message.error is None:
            await transfer(message.waiting.append)
        if message.error is not None:
            raise message.error
        data = message.data
        if isinstance(data, bytes):
            memmove(into.data_ptr(), data, len(data))
            return
        if data is not None:
            copy(bytes_of(into)[: message.nbytes], data)
            return
        pieces = [bytes_of(into)[: message.nbytes]]
        if message.place == DataPlace.PIECES:
            assert self.device_messages is not None
            pieces = [*self.device_messages.cut(*pieces)]
        await transfers([(self._transport.irecv, piece, message.src, message.number) for piece in pieces])

    async def _to_device(self, message: MailboxMessage, into: Tensor | None, device: torch.device) -> Tensor:
        """Move the bytes of a message to the front of `into`, or to a new tensor, on a device. Return the tensor."""
        messages, meta = self.device_messages, message.meta
        assert messages is not None
        if into is None:
            into = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        front = bytes_of(into)[: message.nbytes]
        if message.place == DataPlace.PIECES:
            await transfer(messages.recv, self._transport, front, message.src, message.number)
            return into
        host = torch.empty(message.nbytes, dtype=torch.uint8, device="cpu")
        await self._to_host(message, host)
        await transfer(messages.put, host, front)
        return into
