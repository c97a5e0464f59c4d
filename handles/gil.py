"""Threads hand over the GIL sooner while an operation runs outside Python, since its end needs the GIL."""

from __future__ import annotations

import os
import sys
import threading

_SWITCH_SECONDS = 2e-4


class SwitchInterval:
    """CPython's switch interval: shorter while any loop asks for that, else as the program has set it.

    A thread that needs the GIL after each native poll would wait 5 ms each time if another thread runs pure Python:
    longer than the transfer.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may end a `Hurry` inside `add`
        self._count = 0
        self._seconds = sys.getswitchinterval()

    def add(self, hurry: Hurry, count: int) -> None:
        """Count the reasons of one loop."""
        with self._lock:
            hurry.count += count
            if self._count == 0:
                self._seconds = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_SECONDS, self._seconds))
            self._count += count
            if self._count == 0:
                sys.setswitchinterval(self._seconds)


class Hurry:
    """The reasons of one loop for a shorter interval; the count of a loop that stopped ends with this object."""

    def __init__(self) -> None:
        self.count = 0
        self._process = os.getpid()

    def add(self, count: int) -> None:
        """Add `count` reasons, or remove them; from any thread."""
        _interval.add(self, count)

    def __del__(self) -> None:
        if self.count and os.getpid() == self._process:
            _interval.add(self, -self.count)


_interval = SwitchInterval()

os.register_at_fork(after_in_child=_interval.__init__)  # type: ignore[misc]
