"""The memory, the CUDA devices and the flags that the communicators of a rank share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from aiodist.backends.base import Transport
from aiodist.backends.shm import Lanes, Neighbourhood, ShmNative
from aiodist.collectives.choice.table import Table
from aiodist.collectives.cuda.accelerator import Accelerator
from aiodist.collectives.implementations import Repertoire
from aiodist.communicator.agreement import Agreement, Dissemination
from aiodist.communicator.facts import WaitingCall
from aiodist.communicator.operation import CommunicatorOperation
from aiodist.env import Generation
from aiodist.handles import Progress
from aiodist.handles.polling import transport_lock

if TYPE_CHECKING:
    from aiodist.topology import Topology

MOST_CLOSED = 100
"""Number of closed communicators, nets and parameter servers whose counts are kept for metrics."""


class Resources:
    """Shared memory and CUDA devices. Makes the parts of a communicator on memory and devices."""

    def __init__(
        self, near: Neighbourhood | None, alone: str, sharing: Sequence[Sequence[int]], generation: Generation
    ) -> None:
        """`sharing` has all groups of ranks that share memory. A rank outside the groups shares no memory."""
        self.progress = Progress.current()
        self.near = near
        """The ranks of this host that share memory, or None."""
        self.lanes = Lanes(self.progress, near) if near is not None else None
        self.alone = alone
        """Reason why no other rank shares memory with this one, or ""."""
        self.accelerator: Accelerator | None = None
        """CUDA resources of this rank, or None if no rank has a device."""
        self.generation = generation
        """Generation of the world, 0 without an elastic job."""
        self.stop_requested = False
        """True if this rank was asked to stop and asks all others.

        Any thread may set the flag. The flag is never cleared.
        """
        self.reproducible = False
        """True if sums of floats depend on nothing but the number of ranks (see `Repertoire`)."""
        self.waited: dict[str, WaitingCall] = {}
        """Waits of the ranks, by communicator, if measured."""
        self.tallies: dict[str, Callable[[], Mapping[str, float]]] = {}
        """Functions that return the numbers of nets and parameter servers for metrics, by communicator (any thread)."""
        self._ended: dict[str, None] = {}
        """Communicators of closed nets and parameter servers, in order."""
        self._sharing = sharing

    def end_tally(self, name: str) -> None:
        """Keep the last numbers of a closed net or parameter server, for the newest `MOST_CLOSED`."""
        if (tally := self.tallies.get(name)) is not None:
            self.tallies[name] = dict(tally()).copy
            self._ended[name] = None
        if len(self._ended) > MOST_CLOSED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self.tallies.pop(oldest, None)

    def repertoire(
        self, name: str, transport: Transport, ranks: Sequence[int], topology: Topology | None, table: Table | None
    ) -> Repertoire:
        """Return the implementations of collectives of a new communicator."""
        hosts = [] if topology is None else [topology.ranks_on(host) for host in topology.hosts]
        accelerator = self.accelerator
        cuda = "there is no CUDA device here" if accelerator is None else accelerator.kit(name, ranks, topology)
        within = self._shared_memory(name, ranks)
        return Repertoire(
            transport,
            table,
            hosts=hosts,
            within=within,
            alone=self.alone,
            cuda=cuda,
            reproducible=self.reproducible,
        )

    def _shared_memory(self, name: str, ranks: Sequence[int]) -> ShmNative | None:
        """Return the collectives among those of `ranks` that share memory, or None if this rank is the only one."""
        if self.near is None or self.lanes is None:
            return None
        here = [rank for rank in ranks if rank in self.near.members]
        if len(here) == 1:
            return None
        with transport_lock:  # else the progress thread, which joins other lanes, may notify a neighbour too
            return ShmNative(self.lanes, name, here, here.index(self.near.rank))

    def agreement(
        self,
        transport: Transport,
        ranks: Sequence[int],
        within: ShmNative | None,
        on_differ: Callable[[CommunicatorOperation], None],
        broken: Callable[[BaseException], None],
    ) -> Agreement:
        """Return the agreement of a communicator of these world ranks. The ranks `within` share memory."""
        leaders = self._leaders(ranks)
        several = len(leaders) > 1
        between = Dissemination(transport, leaders, broken) if several and transport.rank in leaders else None
        lane = verdicts = None
        if within is not None:
            lane = within.ordered
            if several:
                with transport_lock:
                    verdicts = within.open("verdicts")
        return Agreement(self.progress, lane, verdicts, between, several=several, on_differ=on_differ)

    def _leaders(self, ranks: Sequence[int]) -> list[int]:
        """Return the first rank of each group of `ranks` that share memory, in the numbers of their communicator."""
        group_of = {rank: group[0] for group in self._sharing for rank in group}
        first: dict[int, int] = {}
        for number, rank in enumerate(ranks):
            first.setdefault(group_of.get(rank, rank), number)
        return list(first.values())

    async def release(self, name: str, *, drained: bool) -> None:
        """Release the device groups of a closed communicator."""
        if self.accelerator is not None:
            await self.accelerator.release(name, drained=drained)

    async def close(self) -> None:
        """Release the memory and devices of other ranks, after every communicator is closed or aborted."""
        try:
            if self.accelerator is not None:
                await self.accelerator.aclose()
        finally:
            if self.near is not None and self.lanes is not None:
                with transport_lock:  # no poll is in progress
                    self.lanes.close()
                    self.near.close()
