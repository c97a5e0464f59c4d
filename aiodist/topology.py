"""Which ranks share a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """The hosts of a communicator's ranks, in rank order.

    >>> t = Topology(("a", "b", "a"), rank=2)
    >>> t.hosts, t.node, t.local_rank, t.local_size, t.ranks_on("a")
    (('a', 'b'), 0, 1, 2, (0, 2))
    """

    host_of: tuple[str, ...]
    rank: int

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the distinct hosts, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.host_of))

    @property
    def node(self) -> int:
        """Return the number of this rank's host."""
        return self.hosts.index(self.host_of[self.rank])

    @property
    def local_rank(self) -> int:
        """Return this rank's place among those of its host."""
        return self.ranks_on(self.host_of[self.rank]).index(self.rank)

    @property
    def local_size(self) -> int:
        """Return how many ranks share this rank's host."""
        return len(self.ranks_on(self.host_of[self.rank]))

    def ranks_on(self, host: str) -> tuple[int, ...]:
        """Return the ranks that live on `host`."""
        return tuple(rank for rank, name in enumerate(self.host_of) if name == host)

    def among(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of `ranks`, of which this rank is one."""
        return Topology(tuple(self.host_of[rank] for rank in ranks), list(ranks).index(self.rank))

    def __str__(self) -> str:
        lines = [f"{len(self.host_of)} ranks on {len(self.hosts)} hosts"]
        lines += [f"  {host}: ranks {', '.join(map(str, self.ranks_on(host)))}" for host in self.hosts]
        return "\n".join(lines)
