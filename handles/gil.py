"""Shortens CPython's switch interval while operations run outside Python, since their ends need the GIL soon."""

from __future__ import annotations

import os
import sys
import threading

_SWITCH_SECONDS = 2e-4


class SwitchInterval:
    """CPython's switch interval, at most 0.2 ms while any loop has a reason, and else as the program has set.

    With the default of 5 ms, and another thread in pure Python, a polling thread would wait 5 ms for the GIL after each
    native poll, longer than the transfer takes.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may finalize a `Hurry` inside `add`
        self._count = 0
        self._seconds = sys.getswitchinterval()

    def add(self, hurry: Hurry, count: int) -> None:
        """Add `count` to the reasons of one loop."""
        with self._lock:
            hurry.count += count
            if self._count == 0:
                self._seconds = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_SECONDS, self._seconds))
            self._count += count
            if self._count == 0:
                sys.setswitchinterval(self._seconds)


class Hurry:
    """Reasons of one loop for a shorter interval, as a count. The deletion of this object withdraws all reasons."""

    def __init__(self) -> None:
        self.count = 0
        self._process = os.getpid()

    def add(self, count: int) -> None:
        """Add `count` reasons, or remove some for a negative `count` (any thread)."""
        _interval.add(self, count)

    def __del__(self) -> None:
        if self.count and os.getpid() == self._process:
            _interval.add(self, -self.count)


_interval = SwitchInterval()

os.register_at_fork(after_in_child=_interval.__init__)  # type: ignore[misc]
