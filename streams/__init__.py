"""Ordered work beside the event loop: `HostStream`, and torch's modes, which travel with it."""

from aiodist.streams.host import HostStream
from aiodist.streams.modes import Modes

__all__ = ["HostStream", "Modes"]
