"""Shared memory among the ranks of a host: an arena for tensors, collectives in the arena, and messages."""

from aiodist.backends.shm.lanes import Lanes, ShmLane, ShmNative
from aiodist.backends.shm.neighbours import Met, Neighbourhood, meet
from aiodist.backends.shm.transport import ShmTransport, open_world

__all__ = ["Lanes", "Met", "Neighbourhood", "ShmLane", "ShmNative", "ShmTransport", "meet", "open_world"]
