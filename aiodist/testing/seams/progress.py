"""The process's progress thread, the transport lock, programs, and a net's compute thread and reducer."""

from collections.abc import Iterator
from contextlib import contextmanager

from aiodist.handles.kernel import run, transfers
from aiodist.handles.progress import ProgressThread, progress_thread, transport_lock
from aiodist.nn.data_parallel import compute_of, reducer_of

__all__ = [
    "ProgressThread",
    "compute_of",
    "own_thread",
    "progress_thread",
    "reducer_of",
    "run",
    "transfers",
    "transport_lock",
]


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
