"""Warns when this rank's event loop was blocked, for how long and at which line."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from aiodist.handles import Progress
from aiodist.handles.stacks import line_of_thread
from aiodist.handles.timers import Quiet
from aiodist.pauses import deadline_clock
from aiodist.threads import OwnThread

_PAUSE_SECONDS = 60.0  # between two warnings

_log = logging.getLogger("aiodist")


@contextmanager
def watched_loop(progress: Progress, rank: int, seconds: float | None) -> Iterator[None]:
    """Warn in this block if the loop runs no callback for `seconds`. None disables the warnings and the thread."""
    if seconds is None:
        yield
        return
    watcher = _LoopWatcher(progress, rank, seconds)
    try:
        yield
    finally:
        watcher.close()


class _LoopWatcher(Quiet):
    """Schedules `_beat` on the loop repeatedly. While `_beat` is late, samples the line of the loop's thread."""

    def __init__(self, progress: Progress, rank: int, seconds: float) -> None:
        self._progress = progress
        self._rank = rank
        self._seconds = seconds
        self._warned = -inf  # time of the last warning
        self._unreported = 0  # blocks since the last warning
        self._beaten = 0.0
        self._came = threading.Event()
        self._closing = False
        self._thread = OwnThread("aiodist-lag", self._run)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        self._came.set()
        self._thread.join()

    def _beat(self) -> None:
        self._beaten = deadline_clock.now()
        self._came.set()

    def _run(self) -> None:
        while not self._closing:
            self._came.clear()
            asked = deadline_clock.now()
            try:
                self._progress.loop.call_soon_threadsafe(self._beat)
            except RuntimeError:  # closed
                return
            lines: Counter[str] = Counter()
            while not self._came.wait(self._seconds / 2) and not self._closing:
                if deadline_clock.now() >= asked + self._seconds:
                    lines[line_of_thread(self._progress.thread_id)] += 1
            blocked = (
                self._beaten if self._beaten >= asked else deadline_clock.now()
            ) - asked  # no `_beat` after a close
            if blocked >= self._seconds:
                self._warn(blocked, lines)
            if self._closing:
                return
            self._came.clear()
            self._came.wait(self._seconds / 2)  # only `close` ends this sooner

    def _warn(self, seconds: float, lines: Counter[str]) -> None:
        """Warn at most once a minute, with the most frequent line of the thread."""
        self._unreported += 1
        now = deadline_clock.now()
        if now < self._warned + _PAUSE_SECONDS:
            return
        where = next((f"at {line}" for line, _ in lines.most_common(1) if line), "by native code that held the GIL")
        more = f" ({self._unreported - 1} times more since the last warning)" if self._unreported > 1 else ""
        _log.warning("rank %d: its event loop was blocked for %.2f s %s%s", self._rank, seconds, where, more)
        self._warned, self._unreported = now, 0
