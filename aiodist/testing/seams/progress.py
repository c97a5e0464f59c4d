"""The process's progress thread, the transport lock, programs, and a net's compute thread and reducer."""

from collections.abc import Iterator
from contextlib import contextmanager

from aiodist.handles.kernel import run, transfers
from aiodist.handles.polling import alarm, transport_lock
from aiodist.handles.progress_thread import progress_thread
from aiodist.nn.data_parallel import compute_of, reducer_of

__all__ = [
    "alarm",
    "compute_of",
    "own_thread",
    "progress_thread",
    "reducer_of",
    "run",
    "transfers",
    "transport_lock",
]


@contextmanager
def own_thread(linger_seconds: float) -> Iterator[None]:
    """Use a new progress thread in the block, which knows only open loops and sleeps after `linger_seconds`."""
    before = progress_thread.linger_seconds
    progress_thread.restart(linger_seconds)
    try:
        yield
    finally:
        progress_thread.restart(before)
