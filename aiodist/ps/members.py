"""Who takes part in a parameter server, told by each rank when it is opened, or goes on with another communicator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Roles = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks that serve, and those that work."""


@dataclass(frozen=True)
class ServerMember:
    """One rank. What stands behind `uid` is of the communicator before; a rank that is new has nothing there."""

    uid: str
    """The name of its client for good."""
    size: int = 0
    """How many ranks there were."""
    servers: int = 0
    """How many of them served."""
    served: int | None = None
    """Its place among those."""
    worked: bool = True
    roles: Roles | None = None
    """What it was told now."""
    saved: tuple[int, str] | None = None
    """How many checkpoints it knows of, and the folder of the last."""

    def said(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def roles_among(members: Sequence[ServerMember], own: Roles) -> Roles:
    """Return who serves and who works: `own`, as this rank was told, where all are new.

    Else as the ranks that were there were told. If not at all: where every rank served, all do; or those that served
    go on, in their order, and work those that did, and new ones. Raises ValueError where no server is left.
    """
    old = [member for member in members if member.size]
    if not old:
        return own
    if old[0].roles is not None:
        servers, workers = old[0].roles
        return tuple(servers), tuple(workers)
    everybody = tuple(range(len(members)))
    if old[0].servers == old[0].size:
        return everybody, everybody
    places = {member.served: rank for rank, member in enumerate(members) if member.served is not None}
    if not places:
        raise ValueError("no server of the parameter server is left: expected servers=, the ranks that serve now")
    servers = tuple(places[at] for at in sorted(places))
    return servers, tuple(rank for rank in everybody if rank not in servers and members[rank].worked)


def kept(members: Sequence[ServerMember], servers: Sequence[int]) -> bool:
    """Return whether every shard is on the server where it was."""
    old = next((member for member in members if member.size), None)
    return old is not None and [members[rank].served for rank in servers] == list(range(old.servers))
