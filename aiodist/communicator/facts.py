"""The state of a rank that is stuck, for the search for deadlocks: plain data, which can be sent."""

from __future__ import annotations

from typing import Any, NamedTuple


class PendingOp(NamedTuple):
    """An operation that is pending, and what it needs of other ranks."""

    comm: str
    text: str
    """The operation, with the line that issued it and its communicator, or the user's call that it is a part of."""
    number: int
    """Its place in the order of its communicator; of a named one, how often the name was used before."""
    name: str
    """"" where it has none."""
    peers: list[int]
    """The world ranks of which any could end it, by a message; empty where it needs all ranks."""
    call: str = ""
    """The user's call that it is a part of, such as "net.step"; "" where the user issued it."""
    kept: bool = False
    """True for a send that ends only after a receive has matched it, as all large ones."""


class CommFacts(NamedTuple):
    """One communicator, as this rank sees it. Lists of pairs stand for dicts, whose keys would travel as words."""

    name: str
    ranks: list[int]
    """Its world ranks."""
    issued: int
    """How many collectives this rank has issued."""
    names: list[list[Any]]
    """How often it has used each name."""
    sent: list[list[int]]
    """How many messages it has sent to each other rank, and heard of each."""
    heard: list[list[int]]
    messages: int
    """How many messages this rank has issued, both ways."""
    kept: list[list[int]]
    """How many messages to each other rank have ended that end only after a receive has matched them."""
    matched: list[list[int]]
    """How many such messages of each rank a receive of this one has matched."""


class Facts(NamedTuple):
    """What a rank tells when nothing but the end of a pending operation can have it go on."""

    ops: list[PendingOp]
    comms: list[CommFacts]

    @classmethod
    def read(cls, told: list[Any]) -> Facts:
        """Return what another rank has sent."""
        ops, comms = told
        return cls([PendingOp(*op) for op in ops], [CommFacts(*comm) for comm in comms])
