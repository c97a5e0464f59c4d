"""Threads say where they have their work from, so that others need not look into their frames; see also `handle`.

The locals of a frame are for its own thread. Until Python 3.13 to ask for those of another one copies all of them:
where that ends an object whose destructor lets other threads run, the frame may be gone meanwhile, and the process
crashes.
"""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

work_of: Final[WeakKeyDictionary[Thread, SimpleQueue[Any]]] = WeakKeyDictionary()
"""Where threads of ours have their work from."""


def serve(queue: SimpleQueue[Any]) -> None:
    """Say that this thread has all its work from `queue`, by way of `next_of`."""
    work_of[current_thread()] = queue


def next_of(queue: SimpleQueue[T]) -> T:
    """Return what this thread is to do next. While it is in here, and the queue is empty, it has nothing to do."""
    return queue.get()
