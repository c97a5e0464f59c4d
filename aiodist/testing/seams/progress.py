"""The progress thread of the process, and the lock of the native calls."""

from collections.abc import Iterator
from contextlib import contextmanager

from aiodist.handles.progress import ProgressThread, progress_thread, transport_lock

__all__ = ["ProgressThread", "own_thread", "progress_thread", "transport_lock"]


@contextmanager
def own_thread(linger_seconds: float) -> Iterator[ProgressThread]:
    """Have a new progress thread in the block, which knows only open loops and sleeps after so many idle seconds."""
    thread = progress_thread()
    before = thread.linger_seconds
    thread.restart(linger_seconds)
    try:
        yield thread
    finally:
        thread.restart(before)
