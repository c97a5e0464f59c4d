"""The progress thread of the process polls for event loops that cannot poll, or should not."""

from __future__ import annotations

import os
import threading
from time import perf_counter
from typing import Final
from weakref import ref

from aiodist.handles.polling import LoopPace, LoopWork, alarm, transport_lock
from aiodist.threads import OwnThread

_TICK_SECONDS = 1e-3  # period in which the thread checks that the loops still poll
_PARKED_TICKS = 20  # most ticks without a look while all loops sleep, and nothing wakes them
_REST_SECONDS = 0.1  # longest time without a look after these ticks, see `core_doorbell_rest`
_LINGER_SECONDS = 0.2  # time without work before the thread sleeps (a wake-up costs 20 us)
_COMPUTING_LINGER_SECONDS = 2e-3  # the same while a stream computes
_MIN_PAUSE, _MAX_PAUSE = 20e-6, 1e-3
_EAGER_SECONDS = 3e-3  # time in which the thread polls a large transfer without a pause while nothing moves
_END_SECONDS = 1.0


class ProgressThread:
    """The progress thread. `linger_seconds` is the time without work before a sleep."""

    def __init__(self, linger_seconds: float = _LINGER_SECONDS) -> None:
        self.linger_seconds = linger_seconds
        self._members: tuple[ref[LoopWork], ...] = ()
        self._members_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ending = False
        self._seen: dict[int, int] = {}
        """`LoopWork.polls` of each loop at the last look, by id."""
        self._ticks, self._rest_seconds = 1, 0.0
        """Pauses, one after the other, and seconds of rest after them, while the loop sleeps and nothing wakes it."""
        self._idle_since = self._busy_since = self._parked_since = perf_counter()

    def wake(self, work: LoopWork) -> None:
        """Wake the thread, to poll for a loop that will not poll (any thread)."""
        if not work.watched:
            self.add(work)
        alarm.ring()

    def add(self, work: LoopWork) -> None:
        """Check the work of a loop from now on."""
        for other in tuple(LoopWork.held):
            if other.loop.is_closed() and not other.pending():  # the loop ended before a turn could find that
                other.unpin()
        with self._members_lock:
            self._members = (*[member for member in self._members if member() is not None], ref(work))
            work.watched = True
            if self._thread is None:
                self._start()

    def end(self, seconds: float | None = _END_SECONDS) -> None:
        """End and join the thread, since the interpreter ends.

        CPython before 3.14 ends a thread that returns from a native call into a finalized interpreter. Inside torch,
        this aborts the process (python/cpython#87135).
        """
        self._ending = True
        if self._thread is not None:
            alarm.ring()
            self._thread.join(seconds)

    def restart(self, linger_seconds: float) -> None:
        """Continue in a new thread, for the loops that are open."""
        self.end(None)
        with self._members_lock:
            self._members = tuple(ref(work) for work in self._alive() if not work.loop.is_closed())
            self.linger_seconds, alarm.asleep, self._ending = linger_seconds, False, False
            self._start()

    def _start(self) -> None:
        self._thread = OwnThread("aiodist-progress", self._run)
        self._thread.start()

    def _alive(self) -> list[LoopWork]:
        return [work for member in self._members if (work := member()) is not None]

    def _run(self) -> None:
        self._idle_since = self._busy_since = perf_counter()
        while not self._ending:
            try:
                self.pause(*self.look())
            except Exception as error:  # noqa: BLE001  - without the thread, operations never end
                for work in self._alive():
                    work.report("the progress thread failed, and continues", error)
                alarm.sleep(_MAX_PAUSE, for_all=True)

    def look(self) -> tuple[float | None, bool]:
        """Poll for the loops that do not poll themselves, and return the arguments of `pause`."""
        began, self._ticks, self._rest_seconds = perf_counter(), 1, 0.0
        pending = [work for work in self._alive() if work.pending()]
        polled = any(self._seen.get(id(work)) != work.polls for work in pending)
        due = [work for work in pending if self._is_due(work)]
        driven = [work.drive() for work in due]
        completed = any(driven)
        self._seen = {id(work): work.polls for work in pending}
        large = any(work.large for work in pending)
        now = perf_counter()
        if pending or completed:
            self._idle_since = now
        if completed or not due or (large and now - began > 10 * _MIN_PAUSE):
            self._busy_since = now
        if polled:
            self._parked_since = now
        left_to_us = any(work.pace is LoopPace.PARKED or work.large for work in due)
        if completed and left_to_us:
            return 0.0, True  # more may have ended
        vain = now - self._busy_since
        if large and vain < _EAGER_SECONDS and not any(work.computing for work in pending):
            if any(work.crowded for work in pending):
                os.sched_yield()
            return 0.0, True
        computing = any(work.computing for work in self._alive())  # each look takes the GIL from the stream
        if now - self._idle_since > (_COMPUTING_LINGER_SECONDS if computing else self.linger_seconds):
            return None, False
        rung = all(work.rings() and not work.threads_waiting for work in pending)
        if pending and rung and all(work.pace is LoopPace.PARKED for work in pending):
            if now - self._parked_since < _PARKED_TICKS * _TICK_SECONDS:
                self._ticks = _PARKED_TICKS
            else:
                self._rest_seconds = _REST_SECONDS
        return min(max(vain / 8, _MIN_PAUSE), _MAX_PAUSE) if driven and not rung else _TICK_SECONDS, left_to_us

    def _is_due(self, work: LoopWork) -> bool:
        """Return True if the loop leaves work to this thread or has not polled since the last look."""
        if work.pace is LoopPace.PARKED or work.large or work.threads_waiting:
            return True
        return self._seen.get(id(work)) == work.polls

    def pause(self, seconds: float | None, left_to_us: bool) -> None:
        """Sleep for `seconds`, or without a timeout for None. For 0, return immediately.

        True for `left_to_us` lets other processes wake the thread. While a loop polls for itself, a woken thread would
        only take the loop's core.
        """
        if seconds is None:
            alarm.asleep = True
            if self._nothing_pending():
                alarm.sleep(None, for_all=False)
            alarm.asleep = False
        elif seconds:
            alarm.sleep(seconds, for_all=left_to_us, times=self._ticks, rest=self._rest_seconds)

    def _nothing_pending(self) -> bool:
        """Return True if nothing is pending, also between the steps of an operation ([Note: no wake-up is lost])."""
        transport_lock.acquire()  # not `with`, which would ring
        try:
            return not any(work.pending() for work in self._alive())
        finally:
            transport_lock.release()


progress_thread: Final = ProgressThread()
