"""Which pushes make a version, in which order, and when a read may be served: pure machines, no torch and no I/O."""

from aiodist.ps.consistency.each import Asynchronous, Bounded
from aiodist.ps.consistency.events import (
    EXACT_STALENESS,
    Action,
    Apply,
    Counts,
    Drop,
    Part,
    Pull,
    Push,
    Serve,
    Waiting,
)
from aiodist.ps.consistency.machine import Machine, Policy
from aiodist.ps.consistency.stale import inverse_age
from aiodist.ps.consistency.steps import Quorum, Synchronous

__all__ = [
    "EXACT_STALENESS",
    "Action",
    "Apply",
    "Asynchronous",
    "Bounded",
    "Counts",
    "Drop",
    "Machine",
    "Part",
    "Policy",
    "Pull",
    "Push",
    "Quorum",
    "Serve",
    "Synchronous",
    "Waiting",
    "inverse_age",
]
