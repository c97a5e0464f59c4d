"""Carriers that connect ranks without MPI: within one process, and through shared memory."""

from aiodist.backends.local import LocalHub, LocalTransport
from aiodist.backends.shm import Lanes, Neighbourhood, ShmNative, ShmTransport, meet, open_world

__all__ = ["Lanes", "LocalHub", "LocalTransport", "Neighbourhood", "ShmNative", "ShmTransport", "meet", "open_world"]
