"""Pure plans of collectives, without torch and I/O: each rank's sends, receives and combinations in order."""

from collections.abc import Mapping

from aiodist.schedules import bruck, chain, direct, doubling, ring, tree
from aiodist.schedules.plan import MAX_LANES, Algorithm, Blocks, Copy, Lane, Recv, Schedule, Send, Step

__all__ = [
    "MAX_LANES",
    "SCHEDULES",
    "Algorithm",
    "Blocks",
    "Copy",
    "Lane",
    "Recv",
    "Schedule",
    "Send",
    "Step",
    "in_fixed_order",
]

SCHEDULES: Mapping[str, Mapping[str, Algorithm]] = {
    "allreduce": {
        "ring": Algorithm(ring.allreduce, most_chunks=MAX_LANES),
        "doubling": Algorithm(doubling.allreduce),
        "halving": Algorithm(doubling.halving_allreduce),
        "tree": Algorithm(tree.allreduce, most_chunks=MAX_LANES),
        "direct": Algorithm(direct.allreduce, most_chunks=MAX_LANES),
    },
    "broadcast": {
        "tree": Algorithm(tree.broadcast, most_chunks=MAX_LANES),
        "chain": Algorithm(chain.broadcast, most_chunks=chain.MOST_CHUNKS),
        "direct": Algorithm(direct.broadcast),
    },
    "reduce": {
        "tree": Algorithm(tree.reduce, most_chunks=MAX_LANES),
        "chain": Algorithm(chain.reduce, most_chunks=chain.MOST_CHUNKS),
        "direct": Algorithm(direct.reduce, most_chunks=MAX_LANES),
    },
    "allgather": {
        "ring": Algorithm(ring.allgather, most_chunks=MAX_LANES),
        "doubling": Algorithm(doubling.allgather),
        "bruck": Algorithm(bruck.allgather),
        "direct": Algorithm(direct.allgather),
    },
    "reduce_scatter": {
        "ring": Algorithm(ring.reduce_scatter, most_chunks=MAX_LANES),
        "halving": Algorithm(doubling.reduce_scatter),
        "direct": Algorithm(direct.reduce_scatter, most_chunks=MAX_LANES),
    },
    "scan": {
        "doubling": Algorithm(doubling.scan),
        "chain": Algorithm(chain.scan, most_chunks=chain.MOST_CHUNKS),
        "direct": Algorithm(chain.scan),
    },
    "alltoall": {
        "bruck": Algorithm(bruck.alltoall, equal=True),
        "direct": Algorithm(direct.alltoall),
    },
}
"""Algorithms by operation and name."""


def in_fixed_order(operation: str, name: str, size: int) -> bool:
    """Return True if the schedule has the fixed order: that of `plan.combined`, for a scan that of the ranks."""
    if operation == "scan":
        return name in ("chain", "direct")
    if name == "doubling":
        return size & (size - 1) == 0
    return name == "direct" or (operation, name) == ("allreduce", "tree")
