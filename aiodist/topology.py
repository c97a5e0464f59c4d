"""Topology: the host and the CUDA device of each rank, and the devices that reach one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Device:
    """The CUDA device of a rank."""

    index: int
    """Number in the rank's process."""
    physical: str
    """Identity on the host, equal for ranks that share the device."""
    means: Means
    peers: frozenset[str] = frozenset()
    """Other devices of the host that the rank sees and whose memory this device can read and write."""

    def reaches(self, other: Device) -> bool:
        """Return True if one device can read and write the memory of the other, on the same host, or is the other."""
        return other.physical == self.physical or other.physical in self.peers or self.physical in other.peers


class Means(NamedTuple):
    """The libraries that a rank has for its device."""

    nccl: tuple[int, ...] = ()
    """Version of NCCL."""
    no_nccl: str = ""
    """Reason why the rank has no NCCL, or an empty text."""
    nccl_shares: bool = False
    """True if the environment lets NCCL's ranks share a device."""
    no_ipc: str = ""
    """Reason why other processes cannot map memory of the device, or an empty text."""


def bound(local_rank: int, physical: Sequence[str], means: Means, peers: Sequence[Sequence[int]]) -> Device | None:
    """Return the device of a rank that sees devices `physical` and is number `local_rank` on its host.

    `peers` has the numbers of the devices that each device reaches. Return None without devices.

    >>> device = bound(3, ["GPU-a", "GPU-b"], Means(), [[1], [0]])
    >>> device.physical, set(device.peers)
    ('GPU-b', {'GPU-a'})
    """
    if not physical:
        return None
    index = local_rank % len(physical)
    return Device(index, physical[index], means, frozenset(physical[peer] for peer in peers[index]))


def named(names: Sequence[str], hosts: Sequence[int]) -> tuple[str, ...]:
    """Return the name of each rank's host: that of its first rank, with a number if an earlier host has the same name.

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
    """CUDA device of each rank, or empty if no rank has a device."""

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
        """Return this rank's number among the ranks of its host, from 0."""
        return self.ranks_on(self.host_of[self.rank]).index(self.rank)

    @property
    def local_size(self) -> int:
        """Return the number of ranks on this rank's host."""
        return len(self.ranks_on(self.host_of[self.rank]))

    def ranks_on(self, host: str) -> tuple[int, ...]:
        """Return the ranks on `host`."""
        return tuple(rank for rank, name in enumerate(self.host_of) if name == host)

    def among(self, ranks: Sequence[int]) -> Topology:
        """Return the topology of `ranks`, which include this rank."""
        devices = tuple(self.devices[rank] for rank in ranks) if self.devices else ()
        return Topology(tuple(self.host_of[rank] for rank in ranks), list(ranks).index(self.rank), devices)

    @property
    def device(self) -> Device | None:
        """Return the CUDA device of this rank."""
        return self.devices[self.rank] if self.devices else None

    @property
    def peer_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks in groups. The CUDA devices of a group reach one another, as far as is known.

        Each rank in turn joins the first group that fits. A rank without a device has its own group.
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
        """Return the group of this rank. `hierarchy(str(topology.peer_group[0]))` has a communicator per group."""
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
