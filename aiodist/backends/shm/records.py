"""Sends, receives and messages in shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from aiodist.backends.base import Done
from aiodist.backends.header import Header
from aiodist.backends.matching import Matching, PostedReceive, UnexpectedMessage
from aiodist.backends.shm.memory import Place
from aiodist.errors import BackendError


def place_of(header: Header) -> Place | None:
    """Return where the bytes of a message are, if its sender's memory is shared."""
    return Place(header.place, header.extra) if header.place >= 0 else None


@dataclass(eq=False, slots=True)
class Send:
    """A message of this rank that is not in flight yet, or that the receiver still needs."""

    t: Tensor
    comm: int
    tag: int
    done: Done
    number: int = 0  # among the long messages to that rank
    moved: int = 0  # bytes that were copied
    over: bool = False  # `done` was called


@dataclass(eq=False, slots=True)
class ShmReceive(PostedReceive):
    """A receive that is not finished; `src` is a rank of the world, or `ANY`."""

    into: Tensor
    comm: int
    done: Done
    nbytes: int = 0  # of the message, once there is one
    moved: int = 0
    over: bool = False


@dataclass(eq=False, slots=True)
class Envelope(UnexpectedMessage):
    """A message without a receive; its bytes are `data`, or rank `src` still has them."""

    nbytes: int
    data: bytes | None = field(default=None, repr=False)
    cost: int = 0  # what its sender is given back for it
    number: int = 0
    place: Place | None = None
    own: Send | None = None  # it is this rank's own


Box = Matching[ShmReceive, Envelope]  # the receives and messages of one communicator that have not met


def too_long(nbytes: int, receive: ShmReceive) -> BackendError | None:
    """Return the error of a receive that has no room for `nbytes`; None if it has."""
    room = receive.into.nbytes
    return BackendError(f"a message of {nbytes} bytes met a receive of {room}") if nbytes > room else None
