"""Threads note at which queue they wait, so that others need not look into their frames; see also `handle`.

The locals of a frame are for its own thread. Until Python 3.13 to ask for those of another one copies all of them:
where that ends an object whose destructor lets other threads run, the frame may be gone meanwhile, and the process
crashes.
"""

from __future__ import annotations

import os
from queue import SimpleQueue
from threading import get_ident
from typing import Any, Final, TypeVar

T = TypeVar("T")

_queues: Final[dict[int, SimpleQueue[Any]]] = {}
"""By thread: the queue at which it waits just now."""


def next_of(queue: SimpleQueue[T], timeout: float | None = None) -> T:
    """Return what this thread is to do next, as `queue.get` does; until there is something it stays in here.

    With a `timeout` only for callers that do nothing then but look whether anything may come.
    """
    me = get_ident()
    _queues[me] = queue
    try:
        return queue.get(timeout=timeout)
    finally:
        del _queues[me]


def waits_for_work(thread_id: int) -> bool:
    """Return whether that thread is in `next_of`, at a queue that is empty."""
    queue = _queues.get(thread_id)
    return queue is not None and queue.empty()


os.register_at_fork(after_in_child=_queues.clear)
