"""Shared memory among the ranks of a host: an arena for tensors, collectives in the arena, and messages."""

from aiodist.backends.shm.lanes import Lane, Lanes, ShmNative
from aiodist.backends.shm.neighbours import Met, Neighbourhood, meet
from aiodist.backends.shm.transport import ShmTransport, open_world

__all__ = ["Lane", "Lanes", "Met", "Neighbourhood", "ShmNative", "ShmTransport", "meet", "open_world"]
