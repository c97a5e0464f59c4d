"""The state of a stalled rank for the search for deadlocks, as plain data that can be sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class PendingOp(NamedTuple):
    """A pending operation, with its needs from other ranks."""

    comm: str
    text: str
    """The operation with its calling line and communicator, or the user's call of which the operation is a part."""
    number: int
    """Number on the communicator, or the count of earlier uses of the name."""
    name: str
    """Name of a named operation, else ""."""
    peers: list[int]
    """World ranks of which one message is enough to end the operation (empty if all ranks are needed)."""
    call: str = ""
    """The user's call with this operation as a part, such as "net.step", or "" if the user issued the operation."""
    kept: bool = False
    """True for a send that ends only after a receive has matched, as all large sends."""


class CommFacts(NamedTuple):
    """The state of one communicator on this rank.

    The facts have lists of pairs, since JSON keys of dicts are strings.
    """

    name: str
    ranks: list[int]
    """World ranks of the communicator."""
    issued: int
    """Number of collectives that this rank has issued."""
    names: list[list[Any]]
    """Number of uses of each name."""
    sent: list[list[int]]
    """Number of frames to each other rank. `heard` has the number of frames from each."""
    heard: list[list[int]]
    messages: int
    """Number of sends and receives that this rank has issued."""
    kept: list[list[int]]
    """Number of synchronous sends to each other rank that have ended. A synchronous send ends only after a match."""
    matched: list[list[int]]
    """Number of synchronous sends of each other rank that this rank's receives have matched."""


class Facts(NamedTuple):
    """Report of a rank that can continue only after the end of a pending operation."""

    ops: list[PendingOp]
    comms: list[CommFacts]

    @classmethod
    def read(cls, received: list[Any]) -> Facts:
        """Return the report that another rank sent."""
        ops, comms = received
        return cls([PendingOp(*op) for op in ops], [CommFacts(*comm) for comm in comms])


CAUSE = 0.8
"""Share of all waits for which a rank is called the cause."""


@dataclass(frozen=True)
class WaitingCall:
    """Waits of the ranks for one another.

    In a collective each rank waits from its own arrival to that of the last rank. A wait shorter than the error of the
    clocks does not count. A receive from one rank, not from `ANY`, waits for that rank from the call until the message
    has arrived. Waits below a millisecond do not count.
    """

    seconds: tuple[float, ...]
    """Sum of the waits for each rank, in seconds."""
    by_operation: Mapping[str, tuple[float, ...]]
    """The same sums by operation, such as "allreduce"."""
    compared: int
    """Number of compared collectives. Above some thousand per second, only the last ones are compared."""
    clock_error: float
    """Largest error of the difference of two clocks, in seconds."""

    @property
    def cause(self) -> int | None:
        """Rank that caused at least 80 % of the waits, or None if no rank did."""
        most = CAUSE * sum(self.seconds)
        return next((rank for rank, waited in enumerate(self.seconds) if waited >= most > 0), None)
