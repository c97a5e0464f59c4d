"""Topology: ranks that share a host, the CUDA devices of each rank, and which devices reach one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Device:
    """The CUDA device of a rank."""

    index: int
    """Its number in that process."""
    physical: str
    """Which of the host's it is: equal for ranks that share it."""
    means: Means
    peers: frozenset[str] = frozenset()
    """The others of the host whose memory it can read and write, of those that its rank sees."""

    def reaches(self, other: Device) -> bool:
        """Return True for itself, and for what can read and write its memory on the same host."""
        return other.physical == self.physical or other.physical in self.peers or self.physical in other.peers


class Means(NamedTuple):
    """What a rank says of what it has for its device."""

    nccl: tuple[int, ...] = ()
    """The version of NCCL."""
    no_nccl: str = ""
    """Why it cannot be had, empty where it can."""
    nccl_shares: bool = False
    """NCCL was told that ranks may share a device."""
    no_ipc: str = ""
    """Why memory of the device cannot be lent to other processes, empty where it can."""


def bound(local_rank: int, physical: Sequence[str], means: Means, peers: Sequence[Sequence[int]]) -> Device | None:
    """Return the device of the rank that is number `local_rank` on a host that shows it those; None where none are.

    `peers` are, for each of them, the numbers of those that it reaches.

    >>> device = bound(3, ["GPU-a", "GPU-b"], Means(), [[1], [0]])
    >>> device.physical, set(device.peers)
    ('GPU-b', {'GPU-a'})
    """
    if not physical:
        return None
    index = local_rank % len(physical)
    return Device(index, physical[index], means, frozenset(physical[peer] for peer in peers[index]))


def named(names: Sequence[str], hosts: Sequence[int]) -> tuple[str, ...]:
    """Return the name of each rank's host, that of its first rank, with a number where an earlier host has the same.

    >>> named(["a", "a", "b", "a"], hosts=[0, 1, 2, 0])
    ('a', 'a#2', 'b', 'a')
    """
    firsts = sorted(set(hosts))
    alike = {first: sum(names[other] == names[first] for other in firsts[: i + 1]) for i, first in enumerate(firsts)}
    return tuple(names[host] + (f"#{alike[host]}" if alike[host] > 1 else "") for host in hosts)


@dataclass(frozen=True)
class Topology:
    """The hosts of a communicator's ranks, in rank order.

    >>> t = Topology(("a", "b", "a"), rank=2)
    >>> t.hosts, t.node, t.local_rank, t.local_size, t.ranks_on("a")
    (('a', 'b'), 0, 1, 2, (0, 2))
    """

    host_of: tuple[str, ...]
    rank: int
    devices: tuple[Device | None, ...] = ()
    """The CUDA device of each rank; empty where no rank has one."""

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
        devices = tuple(self.devices[rank] for rank in ranks) if self.devices else ()
        return Topology(tuple(self.host_of[rank] for rank in ranks), list(ranks).index(self.rank), devices)

    @property
    def device(self) -> Device | None:
        """Return the CUDA device of this rank."""
        return self.devices[self.rank] if self.devices else None

    @property
    def peer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks in groups whose CUDA devices all reach one another, as far as is known.

        Ranks come into the first group that they fit into, in their order; those without a device stay alone.
        """
        if not self.devices:
            return tuple((rank,) for rank in range(len(self.host_of)))
        groups: list[list[int]] = []
        for rank in range(len(self.host_of)):
            fitting = (group for group in groups if all(self._reach(rank, other) for other in group))
            if (group := next(fitting, None)) is None:
                groups.append([rank])
            else:
                group.append(rank)
        return tuple(map(tuple, groups))

    @property
    def peer_group(self) -> tuple[int, ...]:
        """Return that of this rank: `hierarchy(str(topology.peer_group[0]))` has a communicator for each."""
        return next(group for group in self.peer_groups if self.rank in group)

    def _reach(self, rank: int, other: int) -> bool:
        mine, theirs = self.devices[rank], self.devices[other]
        here = self.host_of[rank] == self.host_of[other]
        return here and mine is not None and theirs is not None and mine.reaches(theirs)

    def __str__(self) -> str:
        lines = [f"{len(self.host_of)} ranks on {len(self.hosts)} hosts"]
        groups = [group for group in self.peer_groups if len(group) > 1]
        for host in self.hosts:
            lines.append(f"  {host}: ranks {', '.join(map(self._named, self.ranks_on(host)))}")
            near = [", ".join(map(str, group)) for group in groups if self.host_of[group[0]] == host]
            lines += [f"    GPUs that reach one another: ranks {ranks}" for ranks in near]
        return "\n".join(lines)

    def _named(self, rank: int) -> str:
        device = self.devices[rank] if self.devices else None
        return f"{rank}" if device is None else f"{rank} (cuda:{device.index})"
