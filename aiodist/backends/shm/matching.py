"""What is sent and received, and how both meet: by communicator, source and tag."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from aiodist.backends.base import Done
from aiodist.backends.matching import Matching
from aiodist.backends.shm.memory import Place
from aiodist.errors import BackendError


class Record(NamedTuple):
    """What one rank says to another; which of the fields mean something depends on `kind`, which is not 0."""

    kind: int
    comm: int = 0
    tag: int = 0
    number: int = 0
    nbytes: int = 0
    segment: int = -1
    offset: int = 0
    size: int = 0  # how many bytes follow it

    @property
    def place(self) -> Place | None:
        return Place(self.segment, self.offset) if self.segment >= 0 else None


@dataclass(eq=False, slots=True)
class Send:
    """A message of this rank that is not on its way yet, or that the receiver still needs."""

    t: Tensor
    comm: int
    tag: int
    done: Done
    number: int = 0  # among the long messages to that rank
    moved: int = 0  # bytes that were copied
    over: bool = False  # `done` was called


@dataclass(eq=False, slots=True)
class Receive:
    """A receive that is not over; `src` is a rank of the world, or `ANY`."""

    t: Tensor
    comm: int
    src: int
    tag: int
    done: Done
    nbytes: int = 0  # of the message, once there is one
    moved: int = 0
    over: bool = False


@dataclass(eq=False, slots=True)
class Envelope:
    """A message that nothing has received; its bytes are `data`, or the rank `src` has them yet."""

    comm: int
    src: int
    tag: int
    nbytes: int
    data: bytes | None = field(default=None, repr=False)
    cost: int = 0  # what its sender is given back for it
    number: int = 0
    place: Place | None = None
    own: Send | None = None  # it is this rank's own


Box = Matching[Receive, Envelope]  # the receives and messages of one communicator that have not met


def too_long(nbytes: int, receive: Receive) -> BackendError | None:
    """Return why a message of `nbytes` cannot be received there, None where it can."""
    room = receive.t.nbytes
    return BackendError(f"a message of {nbytes} bytes met a receive of {room}") if nbytes > room else None
