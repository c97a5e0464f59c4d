"""Collectives in two levels, within each host and between hosts.

With n bytes per rank and h hosts of l ranks, each host sends 2n(h-1)/h bytes to other hosts. In the form *hierarchical*
all ranks of a host send a share (reduce_scatter within, allreduce among the k-th ranks of the hosts, allgather within).
In the form *leaders*, for hosts with different numbers of ranks, the first rank of a host sends all (reduce, allreduce
among the first ranks, broadcast). A flat ring of p = hl ranks sends 2n(p-1)/p bytes across each link between two hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import itemgetter

from torch import Tensor

from aiodist.backends.base import Primitive, Wanted
from aiodist.collectives.choice.table import COMPARED_BYTES
from aiodist.collectives.endpoint import Differ, Endpoint, Implementation, Traffic
from aiodist.collectives.scheduled import Scheduled
from aiodist.handles.kernel import together
from aiodist.schedules import in_fixed_order
from aiodist.types import ReduceOp

_OPERATIONS = ("allreduce", "broadcast", "reduce")


class Hierarchical(Implementation):
    """See the module and `Implementation`.

    If hosts differ on an operation, the part between hosts stops. The ranks within a host agree. All ranks of a host
    continue to the end, since the others would wait for a rank that stopped.
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
        """`hosts` are the ranks of each host, `within` is the implementation for this host (see `LIMITS`)."""
        self.name = form
        self._limits = limits
        self._host = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        self._hosts = [list(ranks) for ranks in hosts]
        self._here = self._hosts[self._host]
        self._local = self._here.index(rank)
        self._within = within or Scheduled("direct")
        self.recallable = self._within.recallable
        # In the fixed order, in one chunk, on one lane.
        self._short = Scheduled("doubling" if in_fixed_order("allreduce", "doubling", len(hosts)) else "tree")
        self._long, self._tree = Scheduled("direct", 1), Scheduled("tree")

    @classmethod
    def forms(
        cls, hosts: Sequence[Sequence[int]], rank: int, within: Implementation | None, limits: Mapping[str, int]
    ) -> list[Implementation]:
        """Return the forms for these hosts, the best first."""
        names = ["leaders"] if len({len(ranks) for ranks in hosts}) > 1 else ["hierarchical", "leaders"]
        return [cls(name, hosts, rank, within, limits) for name in names]

    def lacks(self, wanted: Wanted) -> str | None:
        return None if wanted.operation in _OPERATIONS else f"{wanted.operation} in levels is not implemented"

    def in_fixed_order(self, operation: str, ranks: int) -> bool:
        """Return True if the ranks of each host are a subtree: equal powers of two of ranks in a row, the last may be
        shorter.
        """
        most = len(self._hosts[0])
        rows = [list(range(start, min(start + most, ranks))) for start in range(0, ranks, most)]
        return most & (most - 1) == 0 and self._hosts == rows

    async def run(self, ep: Endpoint, primitives: Sequence[Primitive]) -> None:
        """Run collectives of one kind. A single allreduce is split into chunks that are in flight at the same time."""
        first = primitives[0]
        ts = [o.t for o in primitives]
        if first.kind == "broadcast":
            await self._broadcast(ep, ts, first.root)
        elif first.kind == "reduce":
            await self._reduce(ep, primitives)
        elif len(ts) > 1 or ep.whole:
            await self._allreduce(ep, ts, first.op)
        else:
            most, t = self._limits["hierarchical.pieces"], ts[0]
            pieces = max(1, min(t.nbytes // self._limits["hierarchical.piece_bytes"], most))
            cut = [t.numel() * i // pieces for i in range(pieces + 1)]
            await together(*[self._allreduce(ep.on_lane(i), [t[cut[i] : cut[i + 1]]], first.op) for i in range(pieces)])

    async def _allreduce(self, ep: Endpoint, ts: Sequence[Tensor], op: ReduceOp) -> None:
        if self.name == "hierarchical":
            await self._allreduce_by_shares(ep, ts, op)
        else:
            await self._allreduce_by_leaders(ep, ts, op)

    async def _allreduce_by_shares(self, ep: Endpoint, ts: Sequence[Tensor], op: ReduceOp) -> None:
        here = ep.among(self._here)
        counts, shares = [], []
        for t in ts:
            cut = [t.numel() * i // here.size for i in range(here.size + 1)]
            counts.append([stop - start for start, stop in pairwise(cut)])
            shares.append(t[cut[self._local] : cut[self._local + 1]])
        parts = list(zip(ts, shares, counts, strict=True))
        if here.size > 1:
            await self._within.run(
                here, [Primitive("reduce_scatter", t, share, op=op, counts=cut) for t, share, cut in parts]
            )
        across = ep.among([ranks[self._local] for ranks in self._hosts])
        await self._between(across, ts, [Primitive("allreduce", share, op=op) for share in shares])
        if here.size > 1:
            await self._within.run(here, [Primitive("allgather", share, t, counts=cut) for t, share, cut in parts])

    async def _allreduce_by_leaders(self, ep: Endpoint, ts: Sequence[Tensor], op: ReduceOp) -> None:
        here = ep.among(self._here)
        if here.size > 1:
            await self._within.run(here, [Primitive("reduce", t, op=op) for t in ts])
        if self._local == 0:
            leaders = ep.among([ranks[0] for ranks in self._hosts])
            await self._between(leaders, ts, [Primitive("allreduce", t, op=op) for t in ts])
        if here.size > 1:
            await self._within.run(here, [Primitive("broadcast", t) for t in ts])

    async def _reduce(self, ep: Endpoint, primitives: Sequence[Primitive]) -> None:
        """Reduce within each host to a representative, then among the representatives to root."""
        root, op = primitives[0].root, primitives[0].op
        representatives, home = self._representatives(root)
        here = ep.among(self._here)
        mine = self._here.index(representatives[self._host])
        only_read = self._local == mine and ep.rank != root
        totals = [o.t.clone() if only_read else o.t for o in primitives]
        if here.size > 1:
            await self._within.run(here, [Primitive("reduce", total, op=op, root=mine) for total in totals])
        if self._local == mine:
            across = ep.among(representatives)
            await self._between(across, totals, [Primitive("reduce", total, op=op, root=home) for total in totals])

    async def _broadcast(self, ep: Endpoint, ts: Sequence[Tensor], root: int) -> None:
        """Broadcast from root to a representative of each host, then within each host."""
        representatives, home = self._representatives(root)
        here = ep.among(self._here)
        mine = self._here.index(representatives[self._host])
        if self._local == mine:
            across = ep.among(representatives)
            await self._between(across, ts, [Primitive("broadcast", t, root=home) for t in ts])
        if here.size > 1:
            await self._within.run(here, [Primitive("broadcast", t, root=mine) for t in ts])

    def _representatives(self, root: int) -> tuple[list[int], int]:
        """Return a rank of each host (root for root's host) and the number of root's host."""
        home = next(i for i, ranks in enumerate(self._hosts) if root in ranks)
        return [root if i == home else ranks[0] for i, ranks in enumerate(self._hosts)], home

    async def _between(self, ep: Endpoint, wholes: Sequence[Tensor], primitives: Sequence[Primitive]) -> None:
        """Run the part between hosts.

        If the hosts differ, stop without an error, since the agreement raises the error later. Parts of large `wholes`
        wait for the comparison.
        """
        traffic = ep.traffic
        groups: dict[tuple[bool, bool], list[Primitive]] = {}
        for whole, o in zip(wholes, primitives, strict=True):
            short = o.t.nbytes < self._limits["hierarchical.ring_bytes"]
            groups.setdefault((whole.nbytes >= COMPARED_BYTES, short), []).append(o)
        try:
            for (large, short), group in sorted(groups.items(), key=itemgetter(0)):
                if large and traffic is not None:
                    await traffic.agreed()
                by_kind = {"broadcast": self._tree, "reduce": self._long}
                schedule = by_kind.get(group[0].kind, self._short if short else self._long)
                await schedule.run(ep, group)
        except Exception:
            # If the hosts differ, a message of another size may fail before the comparison ends.
            if traffic is None or await _agreed(traffic):
                raise


async def _agreed(traffic: Traffic) -> bool:
    try:
        await traffic.agreed()
    except Differ:
        return False
    return True
