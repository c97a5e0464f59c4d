"""Messages of the mailbox between two ranks, as records in memory and as bytes on the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor

from aiodist.backends.base import Done, dtype_name, tell
from aiodist.backends.header import HEADER_BYTES, Header
from aiodist.backends.matching import PostedReceive, UnexpectedMessage
from aiodist.collectives.cuda.on_device import DeviceWork
from aiodist.collectives.metadata import META_BYTES, Meta, unpack_meta
from aiodist.errors import BackendError
from aiodist.streams.memory import bytes_of

FRAME_BYTES = 1024
"""Most bytes of a frame: a header, dtype and shape of the tensor, short data."""
INLINE_BYTES = FRAME_BYTES - HEADER_BYTES - META_BYTES
"""Most bytes of data in a frame."""

_DATA_AT = HEADER_BYTES + META_BYTES


class MessageKind(IntEnum):
    """Kind of a frame."""

    TENSOR = 0
    OBJECT = 1
    FAREWELL = 2
    """The rank will send nothing more."""
    ANSWER = 3
    """A receive has matched a synchronous message."""


class DataPlace(IntEnum):
    """Place of the bytes of a message."""

    AFTER = 0
    """The data are in a separate message, which follows."""
    INLINE = 1
    """The data are in the frame."""
    PIECES = 2
    """The data are in messages of `DeviceMessages`, which follow."""
    RETURNED = 3
    """The data went to a receive that has put the message back."""


class MessageFlag(IntEnum):
    """Event that the sender of a message waits for."""

    SYNCHRONOUS = 1
    """An answer."""
    KEPT = 2
    """The match with a receive, without an answer, since the transport ends the send only after the match."""


@dataclass(frozen=True)
class Arrived:
    """A message that was received."""

    data: Any
    """The tensor, or the unpacked object."""
    source: int
    tag: int
    nbytes: int
    kind: int
    """`MessageKind.TENSOR` or `MessageKind.OBJECT`."""


@dataclass(frozen=True)
class Unpacked:
    """The object of a message that was received and put back, in place of the bytes."""

    obj: Any


@dataclass(eq=False)
class MailboxReceive(PostedReceive):
    """A receive of the program, of tensors or objects."""

    into: Tensor | None
    finish: Callable[[Arrived | None, BaseException | None], None]
    take: Callable[[], bool]
    """Function called when a message matches. A result of False withdraws the receive."""
    work: DeviceWork | None = None
    """Work on the device of `into`, or of the message, or None."""
    work_later: Callable[[], DeviceWork] | None = None
    """Factory of `work` for a message from a device. The process uses no device before such a message comes."""
    given: MailboxMessage | None = None
    """The message that has matched, or None."""
    handle: object = None
    """The handle of the receive after a match."""

    def fail(self, error: BaseException | None) -> None:
        """End the receive with `error`, and cancel its work on a device."""
        self.cancel_work()
        self.finish(None, error)

    def cancel_work(self) -> None:
        """Cancel the work on a device, if there is any."""
        if self.work is not None:
            self.work.cancel()

    def work_for(self, message: MailboxMessage) -> DeviceWork | None:
        """Return the work on a device if `message` is received there, else None."""
        if message.meta.on_device if self.into is None else not self.into.is_cpu:
            if self.work is None and self.work_later is not None:
                self.work = self.work_later()
            return self.work
        return None

    def misfit(self, message: MailboxMessage) -> BaseException | None:
        """Return the error of a `message` that does not fit, else None. Such a message is received and discarded."""
        into, meta = self.into, message.meta
        if into is None:
            return None
        if into.dtype is not meta.dtype:
            return TypeError(f"a message of {meta} met a receive into {dtype_name(into.dtype)}: dtypes must agree")
        if into.nbytes < message.nbytes:
            return BackendError(f"a message of {meta} ({message.nbytes} bytes) is longer than {into.nbytes} bytes")
        return None


@dataclass(eq=False)
class MailboxMessage(UnexpectedMessage):
    """A message of the program."""

    number: int
    """Number of the message at its sender."""
    meta: Meta
    nbytes: int
    place: int
    """See `DataPlace`."""
    flags: int = 0
    """Sum of `MessageFlag`."""
    data: bytes | Tensor | None = field(default=None, repr=False)
    """The bytes, or None until the bytes are here."""
    error: BaseException | None = None
    """Error of the transfer of a message that was put back before the transfer was finished."""
    waiting: list[Done] = field(default_factory=list)
    """Callbacks for the end of the transfer of a message that was put back."""
    unpacked: Unpacked | None = field(default=None, repr=False)
    """The object of the message, if a receive has unpacked the object."""

    def __str__(self) -> str:
        what = self.meta if self.kind == MessageKind.TENSOR else f"an object of {self.nbytes} bytes"
        return f"rank {self.src} sent tag {self.tag} {what}"

    @staticmethod
    def read(header: Header, data: memoryview) -> MailboxMessage:
        """Return the message of a frame."""
        kind, src, tag, number, nbytes, place, flags, size = header
        inline = bytes(data[_DATA_AT : _DATA_AT + size]) if place == DataPlace.INLINE else None
        meta = unpack_meta(data, HEADER_BYTES)
        return MailboxMessage(src, tag, number, meta, nbytes, place, flags, inline, kind=kind)

    def end_transfer(self, arrived: Arrived | None, error: BaseException | None) -> None:
        """Take the bytes of a message that was put back before the end of its transfer, or the error."""
        self.data = None if arrived is None else bytes_of(arrived.data.cpu())
        self.error = error
        waiting, self.waiting = self.waiting, []
        tell((done, None) for done in waiting)
