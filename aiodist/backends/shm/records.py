"""Sends, receives and messages in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from aiodist.backends.base import Done
from aiodist.backends.header import Header
from aiodist.backends.matching import Matching, PostedReceive, UnexpectedMessage
from aiodist.backends.shm.memory import Place
from aiodist.errors import BackendError


def place_of(header: Header) -> Place | None:
    """Return the place of the bytes of a message in shared memory, or None."""
    return Place(header.place, header.extra) if header.place >= 0 else None


@dataclass(eq=False, slots=True)
class ShmSend:
    """A message of this rank that waits to be sent, or that the receiver still needs."""

    t: Tensor
    comm: int
    tag: int
    done: Done
    number: int = 0  # among the long messages to that rank
    moved: int = 0  # copied bytes
    finished: bool = False  # True after the call of `done`


@dataclass(eq=False, slots=True)
class ShmReceive(PostedReceive):
    """A receive that is not finished. `src` is a rank of the world, or `ANY`."""

    into: Tensor
    comm: int
    done: Done
    nbytes: int = 0  # of the matched message
    moved: int = 0
    finished: bool = False
    each: Callable[[bytearray], object] | None = None
    """Function that gets the bytes of short messages from any source, while the receive waits on, or None."""


@dataclass(eq=False, slots=True)
class Envelope(UnexpectedMessage):
    """A message without a receive, with the bytes in `data` or in the memory of rank `src`."""

    nbytes: int
    data: bytes | None = field(default=None, repr=False)
    cost: int = 0  # credit of the sender, in bytes, which the receive returns
    number: int = 0
    place: Place | None = None
    own: ShmSend | None = None  # the send of a message from this rank to itself


Box = Matching[ShmReceive, Envelope]  # waiting receives and messages of one communicator


def too_long(nbytes: int, receive: ShmReceive) -> BackendError | None:
    """Return the error of a message of `nbytes` that is longer than `receive`, or None for one that fits."""
    room = receive.into.nbytes
    return BackendError(f"a message of {nbytes} bytes met a receive of {room}") if nbytes > room else None
