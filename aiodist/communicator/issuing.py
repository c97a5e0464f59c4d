"""The issuing thread of a communicator that several threads share."""

from __future__ import annotations

import threading
from types import TracebackType


class Issuing:
    """Allows one issuing thread at a time. A call of another thread raises, without effect on the first call.

    Two calls at the same time are an error of the program, since the other ranks cannot know the order. `_issuer` has
    the issuing thread. No other thread waits for that thread. Every call also holds `_lock`. The loop holds `_lock`
    (`with issuing:`) for changes that exclude calls, such as the refusal of later calls. A call may make nested calls.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._issuer: dict[None, threading.Thread] = {}
        """The issuing thread, if any, in a dict, whose `setdefault` tests and enters atomically."""
        self._depth = 0
        self._closed: BaseException | None = None
        """Error of calls of threads other than the one that closes the communicator."""
        self._closer: threading.Thread | None = None
        self._lock = threading.RLock()

    def begin(self) -> None:
        """Begin a call of this thread. Raise `RuntimeError` with both threads if another thread is issuing."""
        this = threading.current_thread()
        if self._closed is not None and this is not self._closer:
            raise self._closed.with_traceback(None)
        issuer = self._issuer.setdefault(None, this)
        if issuer is not this:
            raise RuntimeError(
                f"threads {issuer.name!r} and {this.name!r} issue on communicator {self._name!r} at once: let them "
                "take turns, in an order that is the same on all ranks, or give each a dup(thread=True) of its own"
            )
        self._depth += 1
        self._lock.acquire()

    def end(self) -> None:
        """End a call."""
        self._lock.release()
        self._depth -= 1
        if self._depth == 0:
            self._issuer.clear()

    def close(self, error: BaseException) -> None:
        """Allow only calls of this thread. Later calls of other threads raise `error`."""
        with self._lock:
            self._closed, self._closer = error, threading.current_thread()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
