"""The progress thread of the process, and the lock of the native calls."""

from aiodist.handles.progress import transport_lock

__all__ = ["transport_lock"]
