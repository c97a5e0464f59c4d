"""A group of ranks, with the properties and the statistics of a communicator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import torch

from aiodist.collectives.choice.availability import Availability
from aiodist.collectives.choice.selector import Selector
from aiodist.collectives.choice.table import Edit
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.levels import Levels
from aiodist.communicator.resources import Resources
from aiodist.control.generations import Generation
from aiodist.handles import Handle
from aiodist.topology import Topology

_CPU = torch.device("cpu")

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


class Keeper(Protocol):
    """The registry, with the state that the communicators of one rank share."""

    resources: Resources
    stop_requested: bool
    generation: Generation
    waited: dict[str, WaitingCall]

    def edit(self, comm: Any, edit: Edit) -> Handle[None]:  # noqa: ANN401
        """Edit the tables of `comm` and of its descendants. Return the handle of the comparison."""


class Group:
    """A group of ranks, with the place of this rank."""

    def __init__(self, dispatcher: Dispatcher, topology: Topology | None, registry: Keeper) -> None:
        self._dispatcher = dispatcher
        self._transport = dispatcher.transport
        self._topology = topology
        bound = None if topology is None else topology.device
        self._device = _CPU if bound is None else torch.device("cuda", bound.index)
        self._levels: Levels | None = None
        self._made_of: tuple[Group, Sequence[int]] | None = None
        self._registry = registry
        self._repertoire = dispatcher.repertoire
        self._selector = Selector(
            self._repertoire, lambda edit: registry.edit(self, edit), lambda: dispatcher.large_bytes
        )

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
        return self._registry.generation.number

    @property
    def previous(self) -> tuple[int | None, ...]:
        """Rank of each rank before the last `shrink` or `grow`, or None for a rank that joined."""
        before = self._registry.generation.previous
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
            waited=self._registry.waited.get(self.name),
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
