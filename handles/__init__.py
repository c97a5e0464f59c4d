"""`Handle`, the awaitable result of every call, and the code that drives and combines handles.

Works with asyncio only.
"""

from aiodist.handles.account import Account
from aiodist.handles.buffers import in_flight
from aiodist.handles.combinators import as_completed, gather
from aiodist.handles.deadline import timeout
from aiodist.handles.handle import Handle
from aiodist.handles.operation import Operation
from aiodist.handles.origin import Origin, listed
from aiodist.handles.posted import Posted, PostedOperation
from aiodist.handles.progress import LARGE_BYTES, Poller, Progress
from aiodist.handles.scheduler import Lane, Permit, Scheduler
from aiodist.handles.sources import Done, Source, from_future, from_source, join
from aiodist.handles.state import HandleFence

__all__ = [
    "LARGE_BYTES",
    "Account",
    "Done",
    "Handle",
    "HandleFence",
    "Lane",
    "Operation",
    "Origin",
    "Permit",
    "Poller",
    "Posted",
    "PostedOperation",
    "Progress",
    "Scheduler",
    "Source",
    "as_completed",
    "from_future",
    "from_source",
    "gather",
    "in_flight",
    "join",
    "listed",
    "timeout",
]
