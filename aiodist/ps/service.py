"""The thread on which a parameter server does what takes long: arithmetic, copies, codecs, the user's own rules.

Torch's kernels run without the GIL there, so a rank that computes goes on computing, and its loop goes on too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from aiodist.handles import Progress

__all__ = ["Service"]

Work = Callable[[], object]
Then = Callable[[BaseException | None], None]


class Service:
    """One thread, begun at the first work; work runs in the order in which it was given."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._name = name
        self._queue: SimpleQueue[tuple[Work, Then] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.waiting = 0
        """How much work is not over; with the transport lock held."""

    def run(self, work: Work, then: Then) -> None:
        """Run `work` in the thread, then `then(error)` with the transport lock held; called with it held.

        Once closed it does neither.
        """
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self.waiting += 1
        self._progress.offloaded += 1
        self._queue.put((work, then))

    def close(self) -> None:
        """End the thread after what it was given; waits for nothing; with the transport lock held."""
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, then = item
            error: BaseException | None = None
            try:
                work()
            except BaseException as raised:  # noqa: BLE001  - `then` is told of it
                error = raised
            self._progress.start_in_thread(lambda then=then, error=error: self._over(then, error))  # type: ignore[misc]
            del work, then, item, error

    def _over(self, then: Then, error: BaseException | None) -> None:
        self.waiting -= 1
        self._progress.offloaded -= 1
        then(error)
