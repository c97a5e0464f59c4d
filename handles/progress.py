"""`Progress` drives the pending operations of an event loop, by polls of the loop or of the progress thread.

A transport makes progress only while a thread calls into it. docs/design/handles.md says when an await, the loop and
the progress thread poll. `LoopWork` (`polling.py`) has the notes on the transport lock and on wake-ups.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any, ClassVar, Protocol, TypeVar, TypeVarTuple
from weakref import WeakValueDictionary

from aiodist import _core
from aiodist.handles.forks import part
from aiodist.handles.gil import Hurry
from aiodist.handles.polling import LoopPace, LoopWork, Poller, alarm, transport_lock
from aiodist.handles.progress_thread import progress_thread
from aiodist.handles.state import add_wait, waits_of
from aiodist.handles.timers import Quiet, Timers
from aiodist.handles.tracing import tracing
from aiodist.threads import end_workers

__all__ = ["LARGE_BYTES", "Driven", "Poller", "Progress", "transport_lock"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LARGE_BYTES = 1 << 22
"""Least size, in bytes, of a transfer that the progress thread drives, since a native poll may last milliseconds."""

_POLL_SECONDS = 300e-6  # time of polling after the last progress, before the loop parks
_PATIENCE_SECONDS = 50e-6  # longest wait of the loop for the lock, without the GIL, which the holder may need
_FORKED_SECONDS = 0.02  # period in which the loop of a forked child looks for calls of its threads
_POLLING, _PARKED, _IDLE = LoopPace.POLLING, LoopPace.PARKED, LoopPace.IDLE


class Driven(Protocol):
    """Pending operations that polls drive, and a thread without Python or other ranks, which wake a sleeping loop."""

    @property
    def heavy(self) -> bool:
        """True if many bytes are in flight.

        The thread without Python then drives these operations alone, and the loop sleeps.
        """

    def sleep(self) -> bool:
        """Let the next end call `Progress.resume`, since the loop will not poll.

        Return False if an operation has ended.
        """


class Progress(LoopWork, Quiet):
    """Starts the operations of one event loop, and polls the pending ones while that is worthwhile.

    `Progress.current()` returns the object of the running loop. Only the loop's thread writes the attributes of this
    class, except `belongings`. Other threads also write attributes of `LoopWork`. `spin_seconds` is the usual longest
    spin of an await. `looked_in_vain` is the time of the last spin without success, in seconds of `perf_counter`. True
    for `fair` lets awaits that never suspend yield now and then. The callbacks run code of the program only at the end
    of an operation, and in posted calls.
    """

    _of_loop: ClassVar[WeakValueDictionary[int, Progress]] = WeakValueDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.looked_in_vain = 0.0
        self.spin_seconds = 50e-6
        self.fair = True
        self.timers = Timers(loop)
        self.driven: list[Driven] = []
        """Sets of operations whose own thread wakes the loop while the loop does not poll."""
        self.own_files: set[int] = set()
        """File descriptors that the loop watches only for aiodist."""
        self.belongings: dict[object, Any] = {}
        """Objects of other modules for this loop, by a key of the module, dropped together with the loop."""
        self.carriers: dict[object, asyncio.Task[Any]] = {}
        """Tasks of aiodist that carry out operations, by handle (empty before Python 3.14)."""
        self._inside = False
        """True while the loop's thread holds the transport lock, to poll or to make a call."""
        self._quiet_since = 0.0
        """Time of the last progress, in seconds of `perf_counter`."""
        self._forked = False
        """True in a forked child."""

    @classmethod
    def current(cls) -> Progress:
        """Return the `Progress` of the running loop, created at first use, or raise `RuntimeError` if no loop runs."""
        loop = asyncio.get_running_loop()
        progress = cls._of_loop.get(id(loop))
        if progress is None:
            cls._of_loop[id(loop)] = progress = cls(loop)
            # This object stays until the loop has run, since a new one for each await would never notice a starved
            # loop.
            loop.call_soon(progress._run_posted)
        return progress

    def own(self, key: object, make: Callable[[], T]) -> T:
        """Return the belonging of this loop for `key`, created at first use (any thread)."""
        found = self.belongings.get(key)
        if found is None:
            found = self.belongings.setdefault(key, make())
        return found  # type: ignore[no-any-return]

    def carry_out(self, handle: object, task: asyncio.Task[Any]) -> None:
        """Note that `task` carries out the operation of `handle`, for the waiters in `python -m asyncio pstree`."""
        if sys.version_info >= (3, 14):
            self.carriers[handle] = task
            task.add_done_callback(lambda _: self.carriers.pop(handle))

    def install(self) -> None:
        """Make this object the result of `current` on its loop, before the first call of `current`."""
        self._of_loop[id(self.loop)] = self

    def add_poller(self, poller: Poller) -> None:
        """Poll `poller` from now on (any thread)."""
        with self._lock:
            self._pollers = (*self._pollers, poller)
        if not self.watched:
            progress_thread.add(self)

    # --- issuing ---------------------------------------------------------------------------------------

    def start(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Make `call`, which starts a transfer, now, or let the holder of the transport lock make the call later.

        `call` runs with the transport lock held, in order with the other calls. `call` must not raise, since
        an error goes only to the loop's exception handler.
        """
        self.polls += 1  # a loop that issues is alive, so the progress thread need not poll yet
        if not self.inbox and transport_lock.acquire(False):
            self._inside = True
            try:
                call(*args)
            except Exception as error:  # noqa: BLE001  - as in `_call`
                self._start_failed(call, error)
            finally:
                self._inside = False
                transport_lock.release()
        else:
            self.inbox.append((call, args))
        if self.pace is not _POLLING:
            self._begin_polling()
        elif alarm.asleep:  # user code has computed for so long that the progress thread went to sleep
            alarm.ring()

    def start_from_thread(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """As `start`, from any thread. The progress thread polls the requests of threads other than the loop's."""
        if self.owns_thread():
            self.start(call, *args)
        elif not self.inbox and transport_lock.acquire(False):
            try:
                self._call(call, args)
                self.ensure_polled()
            finally:
                transport_lock.release()
            if alarm.asleep:  # the pace of a blocked loop may be POLLING
                progress_thread.wake(self)
        else:
            self.inbox.append((call, args))
            self.held.add(self)
            progress_thread.wake(self)

    def start_in_thread(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """As `start`, but the progress thread makes the long call. The loop then does not poll."""
        self.add_large(1)
        self.inbox.append((self._call_large, (call, args)))
        self.held.add(self)
        progress_thread.wake(self)

    def _call_large(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            call(*args)
        finally:
            self.add_large(-1)

    def resume_polling(self) -> None:
        """Let the loop poll again, since a message came and more may follow (any thread).

        While a stream computes, the loop must not poll, and the progress thread continues.
        """
        if self.pace is not _POLLING and not self.computing:
            self.post(self._begin_polling)

    def _begin_polling(self) -> None:
        """Let the loop poll from its next iteration on. The progress thread checks that the loop polls."""
        if self.pace is _POLLING:
            return
        self.held.add(self)
        self._set_pace(_POLLING)
        self._quiet_since = perf_counter()
        alarm.loop_polls()
        self.loop.call_soon(self._turn)
        if alarm.asleep or not self.watched:
            progress_thread.wake(self)

    # --- polling ---------------------------------------------------------------------------------------

    def try_poll(self, patience: float = 0.0) -> bool:
        """Make one pass, unless another thread keeps the lock for `patience` seconds. Return True if a pass was made.

        Also called at an issue while other operations are pending, for progress before the next turn of the loop.
        """
        if not transport_lock.acquire(False) and not (patience and transport_lock.acquire(True, patience)):
            return False
        self._inside = True
        try:
            if self.poll():
                self._quiet_since = perf_counter()
        finally:
            self._inside = False
            transport_lock.release()
        return True

    def with_lock(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return the result of `call`, made with the transport lock held (loop's thread).

        The thread may hold the lock already: a waiter for a handle may be woken while the loop polls, with the lock
        held.
        """
        if self._inside:
            return call(*args)
        with transport_lock:
            self._inside = True
            try:
                return call(*args)
            finally:
                self._inside = False

    def spin(self, handle: _core.Handle) -> None:
        """Poll until `handle` is done, but not longer than `look_until` allows (loop's thread)."""
        if not handle._polled or self.large:
            return
        for driven in self.driven:
            if driven.heavy:
                return
        self.polls += 1  # also if the progress thread has the lock: that thread sees that the loop is back
        if not transport_lock.acquire(False) and not transport_lock.acquire(True, self.spin_seconds):
            return
        self._inside = True
        try:
            if handle._fence is not None and handle._fence.look() and not handle._is_pending:
                return
            until = self.look_until(perf_counter())
            while True:
                moved = self.poll(0.0 if self.crowded else until)
                if not handle._is_pending:  # unlike `done`, no sign that the program polls the handle
                    return
                if perf_counter() >= until or not (moved or self.pending()):
                    self.looked_in_vain = perf_counter()
                    return
                if self.crowded:
                    os.sched_yield()
        finally:
            self._inside = False
            transport_lock.release()

    def spin_counted(self, handle: _core.Handle) -> None:
        """As `spin`, with the wait counted for metrics."""
        waits, began = waits_of(handle), perf_counter()
        self.spin(handle)
        add_wait(waits, began)

    def _turn(self) -> None:
        """Poll once in an iteration of the loop while work is pending."""
        now = perf_counter()
        if now - self.last_ran > _POLL_SECONDS:
            self._quiet_since = now  # the loop was busy, and has not polled in vain
        self.last_ran = now
        if not self.pending():
            self._set_pace(_IDLE)
            if not self.unpin():  # a thread of a transport saw POLLING: see `ensure_polled`
                self._park()
            return
        if self.large or any(driven.heavy for driven in self.driven):
            self._park()
            return
        self.polls += 1  # also if the progress thread has the lock: that thread sees that the loop is back
        self.try_poll(_PATIENCE_SECONDS)
        if now - self._quiet_since < _POLL_SECONDS:
            if self.crowded:
                os.sched_yield()
            self.loop.call_soon(self._turn)
        else:
            self._park()

    def _park(self) -> None:
        self.held.add(self)
        self._set_pace(_PARKED)
        progress_thread.wake(self)
        self._sleep()

    def _sleep(self) -> None:
        """Let the next end wake the loop, or resume immediately if an operation has ended."""
        asleep = [driven.sleep() for driven in self.driven]
        if not all(asleep):
            self.loop.call_soon(self.resume)

    def resume(self) -> None:
        """Poll, since an operation has ended while the loop did not poll, and continue (loop's thread).

        While a stream computes, the loop must not poll, and sleeps until the next end.
        """
        if not self.try_poll(_PATIENCE_SECONDS):  # the holder of the lock may have polled before the end
            self.loop.call_soon(self.resume)
            return
        if self.pace is _POLLING:
            return
        if not self.pending():
            self._change_pace(_PARKED, _IDLE)
            self.unpin()
        elif not self.computing:
            self._begin_polling()
        else:
            self._sleep()

    # --- forks -------------------------------------------------------------------------------------------

    def check_not_forked(self, handle: _core.Handle) -> None:
        """Raise `RuntimeError` in a forked child, where `handle` never ends."""
        if self._forked:
            raise RuntimeError(f"{handle} was issued before os.fork: a child cannot wait for it")

    def after_fork(self) -> None:
        """Drop all work in a forked child, which must not touch its parent's transfers."""
        self._pollers = ()
        self.driven.clear()
        with warnings.catch_warnings():  # the parent runs these programs
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            self.inbox.clear()
        self._hurry = Hurry()
        self._forked = True
        if part(self.loop) and self.owns_thread():
            self._look_again()

    def _look_again(self) -> None:
        """Let the loop of a forked child look for calls of other threads, whose wake-ups reach the parent's loop.

        A timer alone does not make uvloop look.
        """
        self.loop.call_later(_FORKED_SECONDS, self.loop.call_soon, self._look_again)


def _after_fork() -> None:
    """Reset a forked child: no progress thread runs, and the parent owns the pending work."""
    progress_thread.__init__()  # type: ignore[misc]
    alarm.__init__()  # type: ignore[misc]
    for progress in list(Progress._of_loop.values()):
        progress.after_fork()
    tracing.to = None  # only the parent has the thread that writes


os.register_at_fork(after_in_child=_after_fork)
atexit.register(progress_thread.end)
atexit.register(end_workers)  # called before `end`: their jobs may wait for operations
