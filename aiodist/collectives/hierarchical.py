"""Collectives in two levels: within each host, and between hosts.

n bytes per rank, h hosts of l ranks. Between hosts go 2n(h-1)/h bytes for each host where all its ranks take a share
(*hierarchical*: reduce_scatter within, allreduce among the k-th ranks of the hosts, allgather within), and the same
through its first rank alone where hosts have different numbers of ranks (*leaders*: reduce, allreduce among the
first, broadcast). A flat ring sends 2n(p-1)/p bytes across each link between two hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor

from aiodist.backends.base import Primitive, Wanted
from aiodist.collectives.choice.table import COMPARED_BYTES
from aiodist.collectives.endpoint import Endpoint, Implementation
from aiodist.collectives.lockstep import meet
from aiodist.collectives.scheduled import Scheduled, SubEndpoint, on_lane
from aiodist.collectives.traffic import Differ, Traffic
from aiodist.handles.kernel import together, transfers
from aiodist.types import ReduceOp

_OPERATIONS = ("allreduce", "broadcast", "reduce")


class Hierarchical(Implementation):
    """See the module, and `Implementation`.

    Hosts that differ on an operation stop what goes between them. The ranks within a host, which agree, all go on to
    the end: none may wait for one that has stopped. With several tensors they meet before they go on: those that take
    no part between the hosts are there first, and others have the small tensors before the large ones.
    """

    compares = True

    def __init__(
        self,
        form: str,
        hosts: Sequence[Sequence[int]],
        rank: int,
        within: Implementation | None,
        limits: Mapping[str, int],
    ) -> None:
        """`hosts` are the ranks of each host, `within` is for those of this one; see `LIMITS`."""
        self.name = form
        self._limits = limits
        self._host = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        self._hosts = [list(ranks) for ranks in hosts]
        self._here = self._hosts[self._host]
        self._local = self._here.index(rank)
        self._within = within or Scheduled("direct")
        self.recallable = self._within.recallable
        self._short, self._long = Scheduled("doubling"), Scheduled("ring", 1)  # on a lane: in one piece
        self._tree = Scheduled("tree")

    @classmethod
    def forms(
        cls, hosts: Sequence[Sequence[int]], rank: int, within: Implementation | None, limits: Mapping[str, int]
    ) -> list[Implementation]:
        """Return the forms that these hosts allow, the better first."""
        names = ["leaders"] if len({len(ranks) for ranks in hosts}) > 1 else ["hierarchical", "leaders"]
        return [cls(name, hosts, rank, within, limits) for name in names]

    def lacks(self, wanted: Wanted) -> str | None:
        return None if wanted.operation in _OPERATIONS else f"{wanted.operation} in levels is not implemented"

    async def run(self, ep: Endpoint, operation: Primitive) -> None:
        """Run an operation; an allreduce in pieces that are on their way at once."""
        if operation.kind == "broadcast":
            await self._broadcast(ep, operation)
            return
        if operation.kind == "reduce":
            await self._reduce(ep, operation)
            return
        t = operation.t
        one = self._allreduce_by_shares if self.name == "hierarchical" else self._allreduce_by_leaders
        pieces = max(1, min(t.nbytes // self._limits["hierarchical.piece_bytes"], self._limits["hierarchical.pieces"]))
        cut = [t.numel() * i // pieces for i in range(pieces + 1)]
        await together(*[one(on_lane(ep, i), t[cut[i] : cut[i + 1]], operation.op) for i in range(pieces)])

    async def _allreduce_by_shares(self, ep: Endpoint, t: Tensor, op: ReduceOp) -> None:
        here = SubEndpoint(ep, self._here)
        cut = [t.numel() * i // here.size for i in range(here.size + 1)]
        counts = [stop - start for start, stop in pairwise(cut)]
        mine = t[cut[self._local] : cut[self._local + 1]]
        if here.size > 1:
            await self._within.run(here, Primitive("reduce_scatter", t, mine, op=op, counts=counts))
        across = SubEndpoint(ep, [ranks[self._local] for ranks in self._hosts])
        await self._between(across, t, Primitive("allreduce", mine, op=op))
        if here.size > 1:
            await transfers([meet])
            await self._within.run(here, Primitive("allgather", mine, t, counts=counts))

    async def _allreduce_by_leaders(self, ep: Endpoint, t: Tensor, op: ReduceOp) -> None:
        here = SubEndpoint(ep, self._here)
        if here.size > 1:
            await self._within.run(here, Primitive("reduce", t, op=op))
        if self._local == 0:
            leaders = SubEndpoint(ep, [ranks[0] for ranks in self._hosts])
            await self._between(leaders, t, Primitive("allreduce", t, op=op))
        if here.size > 1:
            await transfers([meet])
            await self._within.run(here, Primitive("broadcast", t))

    async def _reduce(self, ep: Endpoint, o: Primitive) -> None:
        """Reduce within each host to the one that stands for it, and from there to root."""
        representatives, home = self._representatives(o.root)
        here = SubEndpoint(ep, self._here)
        mine = here.ranks.index(representatives[self._host])
        total = o.t if ep.rank == o.root or self._local != mine else o.t.clone()
        if here.size > 1:
            await self._within.run(here, Primitive("reduce", total, op=o.op, root=mine))
        if self._local == mine:
            across = SubEndpoint(ep, representatives)
            await self._between(across, o.t, Primitive("reduce", total, op=o.op, root=home))

    async def _broadcast(self, ep: Endpoint, o: Primitive) -> None:
        """From root to one rank of each host, and from there to the others."""
        representatives, home = self._representatives(o.root)
        here = SubEndpoint(ep, self._here)
        mine = here.ranks.index(representatives[self._host])
        if self._local == mine:
            across = SubEndpoint(ep, representatives)
            await self._between(across, o.t, Primitive("broadcast", o.t, root=home))
        if here.size > 1:
            await transfers([meet])
            await self._within.run(here, Primitive("broadcast", o.t, root=mine))

    def _representatives(self, root: int) -> tuple[list[int], int]:
        """Return a rank of each host, of which root stands for its own, and the number of that host."""
        home = next(i for i, ranks in enumerate(self._hosts) if root in ranks)
        return [root if i == home else ranks[0] for i, ranks in enumerate(self._hosts)], home

    async def _between(self, ep: Endpoint, whole: Tensor, operation: Primitive) -> None:
        """Run what goes between hosts, and stop where they differ; of a large `whole` it waits until that is known.

        How the operation ends is not decided here: its gate knows.
        """
        traffic = ep.traffic
        try:
            if traffic is not None and whole.nbytes >= COMPARED_BYTES:
                await transfers([traffic.agreed])
            await self._schedule_of(operation).run(ep, operation)
        except Exception:
            if traffic is None:
                raise
            # A message of another size than was asked for fails before it is known why.
            if await _agreed(traffic):
                raise

    def _schedule_of(self, operation: Primitive) -> Scheduled:
        if operation.kind != "allreduce":
            return self._tree
        return self._short if operation.t.nbytes < self._limits["hierarchical.ring_bytes"] else self._long


async def _agreed(traffic: Traffic) -> bool:
    try:
        await transfers([traffic.agreed])
    except Differ:
        return False
    return True
