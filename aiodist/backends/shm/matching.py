"""Which message goes to which receive: by communicator, source and tag, each in the order of its issue or arrival."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from aiodist.backends.base import Done
from aiodist.backends.shm.memory import Place
from aiodist.errors import BackendError
from aiodist.types import ANY

__all__ = ["Box", "Message", "Receive", "Send", "too_long"]


@dataclass(eq=False, slots=True)
class Send:
    """A message of this rank that is not on its way yet, or that the receiver still needs."""

    t: Tensor
    comm: int
    tag: int
    done: Done
    number: int = 0
    """Among the long messages to that rank."""
    moved: int = 0
    """Bytes that were copied."""
    over: bool = False
    """`done` was called."""


@dataclass(eq=False, slots=True)
class Receive:
    """A receive that is not over; `src` is a rank of the world, or `ANY`."""

    t: Tensor
    comm: int
    src: int
    tag: int
    done: Done
    nbytes: int = 0
    """Of the message, once there is one."""
    moved: int = 0
    over: bool = False


@dataclass(eq=False, slots=True)
class Message:
    """A message that nothing has received; its bytes are `data`, or the rank `src` has them yet."""

    comm: int
    src: int
    tag: int
    nbytes: int
    data: bytes | None = field(default=None, repr=False)
    cost: int = 0
    """What its sender is given back for it."""
    number: int = 0
    place: Place | None = None
    own: Send | None = None
    """It is this rank's own."""


class Box:
    """The receives and messages of one communicator that have not met; either side may be there first."""

    def __init__(self) -> None:
        self._receives: dict[int, list[Receive]] = {}
        self._messages: dict[int, list[Message]] = {}

    def receive(self, receive: Receive) -> Message | None:
        """Return the first message that fits; without one `receive` waits."""
        messages = self._messages.get(receive.tag, ())
        for i, message in enumerate(messages):
            if receive.src in (ANY, message.src):
                self._remove(self._messages, receive.tag, i)
                return message
        self._receives.setdefault(receive.tag, []).append(receive)
        return None

    def match(self, src: int, tag: int) -> Receive | None:
        """Return the first receive that fits a message, which waits no longer."""
        for i, receive in enumerate(self._receives.get(tag, ())):
            if receive.src in (ANY, src):
                self._remove(self._receives, tag, i)
                return receive
        return None

    def keep(self, message: Message) -> None:
        """Have `message`, which `match` found nothing for, wait."""
        self._messages.setdefault(message.tag, []).append(message)

    def forget(self, src: int, number: int) -> bool:
        """Take out the long message `number` of `src`; True if it was there."""
        for tag, messages in self._messages.items():
            for i, message in enumerate(messages):
                if message.src == src and message.number == number:
                    self._remove(self._messages, tag, i)
                    return True
        return False

    def receives(self) -> Iterator[Receive]:
        """Yield the receives that wait."""
        for waiting in self._receives.values():
            yield from waiting

    def messages(self) -> Iterator[Message]:
        """Yield the messages that wait."""
        for waiting in self._messages.values():
            yield from waiting

    @staticmethod
    def _remove(table: dict[int, list[Receive]] | dict[int, list[Message]], tag: int, i: int) -> None:
        del table[tag][i]
        if not table[tag]:
            del table[tag]


def too_long(nbytes: int, receive: Receive) -> BackendError | None:
    """Return why a message of `nbytes` cannot be received there, None where it can."""
    room = receive.t.nbytes
    return BackendError(f"a message of {nbytes} bytes met a receive of {room}") if nbytes > room else None
