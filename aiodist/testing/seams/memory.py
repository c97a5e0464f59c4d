"""Shared memory: the arena of a host's ranks, and the move of a tensor into it."""

from aiodist.backends.shm.memory import Arena, Place, segment_fd
from aiodist.backends.shm.moving import move
from aiodist.machine import boot_id

__all__ = ["Arena", "Place", "boot_id", "move", "segment_fd"]
