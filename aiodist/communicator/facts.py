"""The state of a rank that is stuck, for the search for deadlocks: plain data, which can be sent."""

from __future__ import annotations

from typing import Any, NamedTuple


class PendingOp(NamedTuple):
    """A pending operation, and its needs from other ranks."""

    comm: str
    text: str
    """The operation, with the line that issued it and its communicator, or the user's call that it is a part of."""
    number: int
    """Its place in the order of its communicator; of a named one, how often the name was used before."""
    name: str
    """Name of a named operation, else ""."""
    peers: list[int]
    """World ranks, each of which could end it by a message; empty if it needs all ranks."""
    call: str = ""
    """The user's call that it is a part of, such as "net.step"; "" if the user issued it."""
    kept: bool = False
    """True for a send that ends only after a receive has matched it, as all large ones."""


class CommFacts(NamedTuple):
    """One communicator, as this rank sees it. Lists of pairs stand for dicts, whose keys would travel as words."""

    name: str
    ranks: list[int]
    """Its world ranks."""
    issued: int
    """Number of collectives that this rank has issued."""
    names: list[list[Any]]
    """Number of uses of each name."""
    sent: list[list[int]]
    """Numbers of messages sent to each other rank, and received from each."""
    heard: list[list[int]]
    messages: int
    """Number of messages that this rank has issued, both ways."""
    kept: list[list[int]]
    """Numbers of synchronous messages to each other rank that have ended: each was matched by a receive."""
    matched: list[list[int]]
    """Numbers of such messages from each rank that this rank's receives have matched."""


class Facts(NamedTuple):
    """Report of a rank that only the end of a pending operation can continue."""

    ops: list[PendingOp]
    comms: list[CommFacts]

    @classmethod
    def read(cls, told: list[Any]) -> Facts:
        """Return the report that another rank sent."""
        ops, comms = told
        return cls([PendingOp(*op) for op in ops], [CommFacts(*comm) for comm in comms])
