"""Threads say what they wait for, work or a handle, so that others need not look into their frames.

The locals of a frame are for its own thread. Until Python 3.13 to ask for those of another one copies all of them:
where that ends an object whose destructor lets other threads run, the frame may be gone meanwhile, and the process
crashes.
"""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from aiodist.handles.handle import Handle, blocked

T = TypeVar("T")

work_of: Final[WeakKeyDictionary[Thread, SimpleQueue[Any]]] = WeakKeyDictionary()
"""Where threads of ours have their work from."""


def serve(queue: SimpleQueue[Any]) -> None:
    """Say that this thread has all its work from `queue`, by way of `next_of`."""
    work_of[current_thread()] = queue


def next_of(queue: SimpleQueue[T]) -> T:
    """Return what this thread is to do next. While it is in here, and the queue is empty, it has nothing to do."""
    return queue.get()


IN_LANE: Final = Handle._block_until.__code__
"""Where a thread stands that waits for a lane."""
AT_EVENT: Final = Handle._block_at.__code__
"""What a thread has called that waits for the event of a handle."""


def blocks_for_ever(thread_id: int) -> bool:
    """Return whether that thread waits for a handle, however long it takes."""
    _, until = blocked.get(thread_id, (None, 0.0))
    return until is None


def blocks_at_pending(thread_id: int) -> bool:
    """Return whether that thread waits for a handle that is not over, and of which nothing is left for it to do."""
    handle, _ = blocked.get(thread_id, (None, None))
    if handle is None or not handle.is_pending:
        return False
    return handle._event is None or not handle._event.is_set()
