"""Which schedules there are, by operation and name, and what no schedule can do without."""

from __future__ import annotations

from collections.abc import Mapping

from aiodist.schedules import bruck, chain, direct, doubling, ring, tree
from aiodist.schedules.plan import MAX_LANES, Algorithm, Cost

__all__ = ["SCHEDULES", "algorithm", "lower_bound"]

SCHEDULES: Mapping[str, Mapping[str, Algorithm]] = {
    "allreduce": {
        "ring": Algorithm(ring.allreduce, ring.allreduce_cost, most_chunks=MAX_LANES),
        "doubling": Algorithm(doubling.allreduce, doubling.allreduce_cost),
        "halving": Algorithm(doubling.halving_allreduce, doubling.halving_allreduce_cost),
        "tree": Algorithm(tree.allreduce, tree.allreduce_cost, most_chunks=MAX_LANES),
        "direct": Algorithm(direct.allreduce, direct.broadcast_cost),
    },
    "broadcast": {
        "tree": Algorithm(tree.broadcast, tree.broadcast_cost, most_chunks=MAX_LANES),
        "chain": Algorithm(chain.broadcast, chain.cost, most_chunks=chain.MOST_CHUNKS),
        "direct": Algorithm(direct.broadcast, direct.broadcast_cost),
    },
    "reduce": {
        "tree": Algorithm(tree.reduce, tree.reduce_cost, most_chunks=MAX_LANES),
        "chain": Algorithm(chain.reduce, chain.cost, most_chunks=chain.MOST_CHUNKS),
        "direct": Algorithm(direct.reduce, direct.reduce_cost),
    },
    "allgather": {
        "ring": Algorithm(ring.allgather, ring.allgather_cost, most_chunks=MAX_LANES),
        "doubling": Algorithm(doubling.allgather, doubling.allgather_cost),
        "bruck": Algorithm(bruck.allgather, bruck.allgather_cost),
        "direct": Algorithm(direct.allgather, direct.allgather_cost),
    },
    "reduce_scatter": {
        "ring": Algorithm(ring.reduce_scatter, ring.reduce_scatter_cost, most_chunks=MAX_LANES),
        "halving": Algorithm(doubling.reduce_scatter, doubling.reduce_scatter_cost),
        "direct": Algorithm(direct.reduce_scatter, direct.reduce_scatter_cost),
    },
    "scan": {
        "doubling": Algorithm(doubling.scan, doubling.scan_cost),
        "chain": Algorithm(chain.scan, chain.cost, most_chunks=chain.MOST_CHUNKS),
        "direct": Algorithm(direct.scan, direct.scan_cost),
    },
    "alltoall": {
        "bruck": Algorithm(bruck.alltoall, bruck.alltoall_cost, equal=True),
        "direct": Algorithm(direct.alltoall, direct.alltoall_cost),
    },
}
"""operation -> name -> algorithm; an operation has only the names that make sense for it."""


def algorithm(operation: str, name: str) -> Algorithm:
    """Return the schedule called `name`; raise ValueError, with those there are, where there is none."""
    try:
        return SCHEDULES[operation][name]
    except KeyError:
        known = ", ".join(SCHEDULES.get(operation, ())) or "none"
        raise ValueError(f"no schedule {name!r} of {operation}: there are {known}") from None


def lower_bound(operation: str, size: int, n: int) -> Cost:
    """Return what no algorithm undercuts: messages one after another, and elements that some rank sends or receives.

    `n` is the elements of the longest buffer of a rank: the result of allgather, the tensor of reduce_scatter, what
    a rank sends in alltoall. Each message tells at most one more rank, so log2(size) rounds, rounded up; rounding up
    of elements too. Chan, Heimlich, Purkayastha, van de Geijn: Collective communication: theory, practice, and
    experience, 2007, section 3, DOI 10.1002/cpe.1206.
    """
    if size == 1 or n == 0:
        return Cost(0, 0)
    if operation in ("broadcast", "reduce", "scan"):
        elements = n
    else:
        times = 2 if operation == "allreduce" else 1
        elements = -(-times * n * (size - 1) // size)
    return Cost((size - 1).bit_length(), elements)
