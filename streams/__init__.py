"""Ordered work outside the event loop: `HostStream` and `CudaStream`, and torch's modes in this work."""

from aiodist.streams.cuda import CudaStream, event_handle, lend
from aiodist.streams.current import OnStream, check_not_capturing, on_device
from aiodist.streams.events import Events, Fence
from aiodist.streams.host import HostStream
from aiodist.streams.modes import Modes
from aiodist.streams.staging import Staging

__all__ = [
    "CudaStream",
    "Events",
    "Fence",
    "HostStream",
    "Modes",
    "OnStream",
    "Staging",
    "check_not_capturing",
    "event_handle",
    "lend",
    "on_device",
]
