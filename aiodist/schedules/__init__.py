"""Pure plans of collectives: what each rank sends, receives and combines, in which order; no torch and no I/O."""

from aiodist.schedules.plan import MAX_LANES, Algorithm, Blocks, Copy, Lane, Recv, Schedule, Send, Step
from aiodist.schedules.registry import SCHEDULES

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
]
