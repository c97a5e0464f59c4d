"""The clock of deadlines: the monotonic clock, without the time in which a debugger holds the job."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from math import inf
from time import monotonic
from typing import Final, NamedTuple


class _State(NamedTuple):
    """The pauses so far, replaced as one object, which any thread may read."""

    before: float = 0.0
    """Length of the pauses that have ended, in seconds."""
    since: float = inf
    """Start of the current pause, in seconds of `monotonic`, or inf without one."""


class DeadlineClock:
    """A clock that stands still while it has holders (any thread)."""

    def __init__(self) -> None:
        self._holders: set[Hashable] = set()
        self._lock = threading.Lock()
        self._state = _State()

    @property
    def stands(self) -> bool:
        """True while the clock stands still."""
        return self._state.since < inf

    def now(self) -> float:
        """Return the time, in seconds."""
        before, since = self._state
        real = monotonic()
        return (real if real < since else since) - before  # each operation with a timeout asks: `min` is slower

    def paused(self) -> float:
        """Return the seconds of all pauses, with the current one so far."""
        before, since = self._state
        return before if since == inf else before + max(0.0, monotonic() - since)

    def pause_until(self, left: float) -> float:
        """Return the seconds after which to look again for a deadline that is `left` seconds away."""
        return max(_LOOK_SECONDS, left) if self.stands else max(0.0, left)

    def hold(self, holder: Hashable) -> None:
        """Let the clock stand still until `holder` releases it."""
        with self._lock:
            self._holders.add(holder)
            if not self.stands:
                self._state = self._state._replace(since=monotonic())

    def release(self, holder: Hashable) -> None:
        """Let the clock run again unless there is another holder. Without this holder it is a no-op."""
        with self._lock:
            self._holders.discard(holder)
            if self.stands and not self._holders:
                before, since = self._state
                self._state = _State(before + monotonic() - since)


_LOOK_SECONDS: Final = 0.05
deadline_clock: Final = DeadlineClock()
"""The clock of this process, which all deadlines of the job use."""
