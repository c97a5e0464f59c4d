"""`Rebindable`: the interface of objects that continue in the next generation of an elastic world."""

from __future__ import annotations

from typing import Protocol

from aiodist.communicator import Communicator


class Rebindable(Protocol):
    """A net, an engine, a queue or a parameter server.

    After `shrink` or `grow`, every rank of the new world calls `rebind` with it, also a rank that joins. A second call
    with the same communicator is a no-op. If a rank is lost meanwhile, `rebind` raises `PeerError`, and the program
    calls `shrink` and `rebind` again.
    """

    async def rebind(self, coll: Communicator, /) -> None:
        """Continue on `coll`."""
