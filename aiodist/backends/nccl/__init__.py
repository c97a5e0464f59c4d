"""NCCL, for tensors on CUDA devices: calls of `nccl4py` on our own streams.

Nothing of it is imported before `load`, so that a machine without it never notices. What was found out about NCCL is
in [Note: nccl] of `library`.

Each module imports only from lines below its own:

    native                          collectives
    groups                          the communicators of a world
    group                           one communicator: opened late, called in order, given up when it fails
    launch_order | kinds | library  the order of calls; what NCCL takes; NCCL itself, and its errors as ours
"""

from aiodist.backends.nccl.group import Exchange, NcclGroup
from aiodist.backends.nccl.groups import NcclGroups
from aiodist.backends.nccl.kinds import supports
from aiodist.backends.nccl.launch_order import LaunchOrder, LaunchSlot
from aiodist.backends.nccl.library import Library, load, missing, refuses, version, version_installed
from aiodist.backends.nccl.native import NcclNative

__all__ = [
    "Exchange",
    "LaunchOrder",
    "LaunchSlot",
    "Library",
    "NcclGroup",
    "NcclGroups",
    "NcclNative",
    "load",
    "missing",
    "refuses",
    "supports",
    "version",
    "version_installed",
]
