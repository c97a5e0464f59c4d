"""Pure plans of collectives: what each rank sends, receives and combines, in which order; no torch and no I/O."""

from aiodist.schedules.plan import MAX_LANES, Algorithm, Blocks, Copy, Cost, Lane, Recv, Schedule, Send, Step
from aiodist.schedules.registry import SCHEDULES, algorithm, lower_bound

__all__ = [
    "MAX_LANES",
    "SCHEDULES",
    "Algorithm",
    "Blocks",
    "Copy",
    "Cost",
    "Lane",
    "Recv",
    "Schedule",
    "Send",
    "Step",
    "algorithm",
    "lower_bound",
]
