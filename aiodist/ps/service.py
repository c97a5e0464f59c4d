"""The thread on which a parameter server does what takes long: arithmetic, copies, codecs, the user's own rules.

Torch's kernels run without the GIL there, so a rank that computes goes on computing, and its loop goes on too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from aiodist.backends.base import Done
from aiodist.handles import Progress

LIGHT_BYTES = 256 << 10
"""Work on fewer bytes is done at once, by the thread that makes progress; more is the service thread's."""

Work = Callable[[], object]


class Service:
    """One thread, begun at the first work; work runs in the order in which it was given."""

    def __init__(self, progress: Progress, name: str, flush: Callable[[], None]) -> None:
        """`flush` is called after what was done in the thread, for what `then` has put into the coalescer."""
        self._progress = progress
        self._name = name
        self._flush = flush
        self._queue: SimpleQueue[tuple[Work, Done] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def do(self, nbytes: int, work: Work, then: Done) -> None:
        """Do `work`, on so many bytes, then `then(error)`: at once where it is light, else as `run` does."""
        if nbytes <= LIGHT_BYTES:
            then(error_of(work))
        else:
            self.run(work, then)

    def run(self, work: Work, then: Done) -> None:
        """Run `work` in the thread, then `then(error)` with the transport lock held; called with it held.

        Once closed it does neither.
        """
        if self._closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
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

    def _over(self, then: Done, error: BaseException | None) -> None:
        self._progress.offloaded -= 1
        then(error)
        self._flush()


def error_of(work: Work) -> Exception | None:
    """Do `work`; return what it raised, which belongs to the client that asked for it."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  - told to the client that asked
        return error
    return None
