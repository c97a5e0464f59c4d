"""The thread that is issuing, on a communicator that several threads share."""

from __future__ import annotations

import threading
from types import TracebackType


class Issuing:
    """One thread issues at a time: another that calls meanwhile is told, and the first is not hurt.

    Two calls at once are a mistake of the program, since the other ranks cannot know their order: `_issuer` has the
    thread that issues, and another one never waits for it. Every call holds `_lock` too, for which the loop waits: it
    holds that (`with issuing:`) while it does to the communicator what no call may come in between, such as refusing
    all later calls. A call may make others.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._issuer: dict[None, threading.Thread] = {}
        """Has one entry while a thread issues: `setdefault` looks and enters in one step."""
        self._depth = 0
        self._closed: BaseException | None = None
        """Error of calls of threads other than the one that closes the communicator."""
        self._closer: threading.Thread | None = None
        self._lock = threading.RLock()

    def begin(self) -> None:
        """This thread issues from now on; raise `RuntimeError`, naming both, where another one does."""
        this = threading.current_thread()
        if self._closed is not None and this is not self._closer:
            raise self._closed.with_traceback(None)
        issuer = self._issuer.setdefault(None, this)
        if issuer is not this:
            raise RuntimeError(
                f"threads {issuer.name!r} and {this.name!r} issue on communicator {self._name!r} at once: have them "
                "take turns, in an order that is the same on all ranks, or give each a dup(thread=True) of its own"
            )
        self._depth += 1
        self._lock.acquire()

    def end(self) -> None:
        """The call is over."""
        self._lock.release()
        self._depth -= 1
        if self._depth == 0:
            self._issuer.clear()

    def close(self, error: BaseException) -> None:
        """Let only this thread issue from now on: calls of other threads raise `error`."""
        with self._lock:
            self._closed, self._closer = error, threading.current_thread()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
