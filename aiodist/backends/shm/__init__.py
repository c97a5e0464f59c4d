"""Shared memory among the ranks of a host: an arena for tensors, and collectives that work in it."""

from aiodist.backends.shm.group import Group, Groups
from aiodist.backends.shm.native import ShmNative
from aiodist.backends.shm.neighbours import Neighbourhood, meet

__all__ = ["Group", "Groups", "Neighbourhood", "ShmNative", "meet"]
