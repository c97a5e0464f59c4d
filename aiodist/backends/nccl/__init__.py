"""The backend over NCCL for tensors on CUDA devices, by calls of `nccl4py` on streams of aiodist.

`load` imports nccl4py, so that a machine without nccl4py can import this package. [Note: nccl] of `library` has the
properties of NCCL that matter here.
"""

from aiodist.backends.nccl.group import Exchange, NcclCall, NcclGroup, NcclGroups
from aiodist.backends.nccl.launch_order import LaunchOrder, LaunchSlot
from aiodist.backends.nccl.library import Library, load, missing, unconnectable, version, version_installed
from aiodist.backends.nccl.native import NcclNative, as_numbers, reducer, supports

__all__ = [
    "Exchange",
    "LaunchOrder",
    "LaunchSlot",
    "Library",
    "NcclCall",
    "NcclGroup",
    "NcclGroups",
    "NcclNative",
    "as_numbers",
    "load",
    "missing",
    "reducer",
    "supports",
    "unconnectable",
    "version",
    "version_installed",
]
