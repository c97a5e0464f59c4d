"""NCCL's library, and groups of ranks that launch its calls in one order."""

from aiodist.backends.nccl import LaunchOrder, LaunchSlot, Library, NcclGroup, NcclGroups, NcclNative, missing, supports

__all__ = ["LaunchOrder", "LaunchSlot", "Library", "NcclGroup", "NcclGroups", "NcclNative", "missing", "supports"]
