"""A group of ranks, with the properties and the statistics of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from aiodist.collectives.choice.availability import Availability
from aiodist.collectives.choice.selector import Selector
from aiodist.collectives.choice.table import Edit
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.facts import WaitingCall
from aiodist.communicator.levels import Levels
from aiodist.communicator.resources import Resources
from aiodist.handles import Handle
from aiodist.topology import Topology

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CommunicatorStatistics:
    """Numbers of a communicator, on this rank."""

    collectives: int
    """Number of collectives issued without a name, equal on all ranks."""
    pending: int
    """Number of unfinished collectives and messages."""
    arena_bytes: int
    """Bytes of tensors in the arena that this rank gave to collectives in the host's shared memory."""
    ordinary_bytes: int
    """Bytes of tensors that are copied for the other ranks: tensors outside the arena, and those up to 32 KiB."""
    named: int
    """Number of collectives issued with `name=`, which are not in `collectives`."""
    waited: WaitingCall | None = None
    """Waits of the ranks for one another, up to a second ago, or None without `init(stragglers=True)`."""


class Group:
    """A group of ranks, with the place of this rank."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        topology: Topology | None,
        resources: Resources,
        edit: Callable[[Any, Edit], Handle[None]],
    ) -> None:
        """`edit` edits the tables of a communicator and its descendants, and returns the handle of the comparison."""
        self._dispatcher = dispatcher
        self._transport = dispatcher.transport
        self._topology = topology
        bound = None if topology is None else topology.device
        self._device = _CPU if bound is None else torch.device("cuda", bound.index)
        self._levels: Levels | None = None
        self._made_of: tuple[Group, Sequence[int]] | None = None
        self._resources = resources
        self._repertoire = dispatcher.repertoire
        self._selector = Selector(self._repertoire, lambda one: edit(self, one), lambda: dispatcher.large_bytes)

    @property
    def rank(self) -> int:
        """Number of this process, from 0, or -1 outside of the group."""
        return self._transport.rank

    @property
    def is_root(self) -> bool:
        """True on rank 0."""
        return self._transport.rank == 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._transport.size

    @property
    def name(self) -> str:
        """Name in error messages, which is "world" or a path below "world"."""
        return self._dispatcher.name

    @property
    def generation(self) -> int:
        """Number of the world's generation, from 0. Higher after each `shrink` and `grow`, and on a rank that joins."""
        return self._resources.generation.number

    @property
    def previous(self) -> tuple[int | None, ...]:
        """Rank of each rank before the last `shrink` or `grow`, or None for a rank that joined."""
        before = self._resources.generation.previous
        return tuple([before[rank] for rank in self._dispatcher.ranks])

    @property
    def timeout(self) -> float | None:
        """Default timeout of operations, in seconds, or None without one."""
        return self._dispatcher.timeout

    @property
    def seq(self) -> int:
        """Number of collectives called on this communicator."""
        return self._dispatcher.oplog.seq

    @property
    def topology(self) -> Topology:
        """Hosts of the ranks and connections of their GPUs, which `print` shows."""
        if self._topology is None:
            self._dispatcher.check_usable()
        assert self._topology is not None
        return self._topology

    @property
    def levels(self) -> Levels:
        """Groups of the ranks by `init(levels=)`, by a span, or by default by host. `print` shows the groups.

        The ranks of a `dup`, `group` or `split` keep their groups.
        """
        if self._levels is not None:
            return self._levels
        if self._made_of is not None:
            parent, ranks = self._made_of
            return parent.levels.among(ranks)
        return Levels(self.size, self.rank).below(self.topology.host_of)

    @property
    def local_rank(self) -> int:
        """Number of this rank among the ranks of its host, from 0."""
        return self.topology.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return self.topology.local_size

    @property
    def node(self) -> int:
        """Number of this host, from 0."""
        return self.topology.node

    @property
    def nodes(self) -> int:
        """Number of hosts."""
        return len(self.topology.hosts)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The distinct hosts, in the order of their first ranks."""
        return self.topology.hosts

    @property
    def device(self) -> torch.device:
        """This rank's CUDA device, number `local_rank` modulo the number of visible devices, or the CPU."""
        return self._device

    @property
    def backend(self) -> str:
        """Name of the transport, "mpi", "shm", "gloo" or "local"."""
        return self._transport.name

    @property
    def selector(self) -> Selector:
        """Table of implementations by operation and size. `print` shows the table, and `set` edits the table."""
        return self._selector

    def availability(self) -> Availability:
        """Return the availability of each operation, implementation and device, with the reason if one is missing.

        Local. `print` shows the result.
        """
        return self._repertoire.availability()

    def statistics(self) -> CommunicatorStatistics:
        """Return the numbers of operations, and of bytes with and without copies. Local."""
        within = self._repertoire.within
        submitted = (0, 0) if within is None else within.submitted_bytes
        return CommunicatorStatistics(
            self.seq,
            len(self._dispatcher.lifetime.pending()),
            *submitted,
            named=self._dispatcher.names.issued,
            waited=self._resources.waited.get(self.name),
        )

    def print(
        self,
        *values: object,
        sep: str | None = " ",
        end: str | None = "\n",
        file: TextIO | None = None,
        flush: bool = False,
    ) -> None:
        """Print on rank 0, without effect on the other ranks. The arguments are those of Python's `print`."""
        if self.is_root:
            print(*values, sep=sep, end=end, file=file, flush=flush)

    def __repr__(self) -> str:
        return f"<Communicator {self.name!r} rank {self.rank} of {self.size} over {self.backend}>"
