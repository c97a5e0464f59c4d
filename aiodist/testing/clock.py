"""An event loop whose clock jumps: a program that sleeps for an hour takes no time, and one that hangs is found out.

Time stands still while code runs. When nothing is ready, the clock jumps to the next timer. When there is no timer
either, nothing can ever happen any more: that is a deadlock, told at once instead of hanging. Work outside the loop
(a function in an executor, a socket, a thread of the program's) is waited for in real time.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import thread as executors
from contextlib import suppress
from functools import partial
from math import inf
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVarTuple, cast
from weakref import ref

from aiodist import _core
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.handles.operation import Operation
from aiodist.handles.polling import LoopPace, transport_lock
from aiodist.handles.progress import Progress
from aiodist.handles.timers import Expiring, Quiet, Timers, is_quiet, may_pass
from aiodist.threads import current_frames, is_waiting, library_checks
from aiodist.watch.stillness import thread_at_work

if TYPE_CHECKING:
    from aiodist.handles import Handle

GRACE_SECONDS = 0.05  # real time for sockets and threads to come with something, before the clock jumps
Ts = TypeVarTuple("Ts")

_LAST_GRACE_SECONDS = 2.0  # and before it is a deadlock
_GRACE_PARTS = 40
_POLL_SECONDS = 2e-4  # of real time, between two polls
_QUIET_SECONDS = 3.0  # of its time, in which those who watch for stalled operations find out what there is
_LOOK_SECONDS = 0.5  # before what the program waits for: they ask once more then, ahead of a deadline
_BUSY_TURNS = 1000  # of the loop, after which messages come although some rank continues, as one that polls does
_LOCK_SECONDS = 5.0  # of real time, for which another thread may hold the transport lock
_WORKERS = ("asyncio_", "aiodist-future")  # of executors, and of torch's futures
_LIBRARY_THREADS = ("aiodist-progress", "aiodist-ps-", "aiodist-leave", "pytest_timeout", *_WORKERS)


def _waits_in_library(thread_id: int) -> bool:
    """Return True if that thread is an executor's worker without work, or carries pytest-xdist's messages."""
    frame = current_frames().get(thread_id)
    if frame is None:
        return False
    if (frame.f_code.co_filename, frame.f_code.co_name) == (executors.__file__, "_worker"):
        # A thread that has ended may have had the same number.
        queues = [queue for t, queue in executors._threads_queues.items() if t.ident == thread_id and t.is_alive()]
        return all(queue.empty() for queue in queues)
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "execnet"


library_checks.append(_waits_in_library)


class TimeLimit(Quiet, partial[None]):
    """The callback of a time limit of the whole program; such a timer does not hide a deadlock."""


class FakeClockLoop(asyncio.SelectorEventLoop):
    """An asyncio loop with a clock of its own, which starts at 0.

    With `group_of`, callbacks that are ready at the same time run in an order drawn from `seed`: those of one group
    keep theirs, the groups are shuffled. `on_quiet` is called, with the transport lock held, when nothing can happen
    before time passes, and returns True if it has started something. `on_deadlock` is called when nothing can ever
    happen any more.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        group_of: Callable[[asyncio.Handle], object] | None = None,
        on_quiet: Callable[[], bool] | None = None,
        on_deadlock: Callable[[], None] | None = None,
    ) -> None:
        self.now = 0.0
        self._executing = 0
        self._random = Random(seed)
        self._group_of = group_of
        self.on_quiet = on_quiet
        self._busy_turns = 0
        self._on_deadlock = on_deadlock
        super().__init__(_JumpingSelector(self))
        self._own_files = len(self.selector.get_map())
        self.progress = _OneThread(self)
        self.progress.install()

    def time(self) -> float:
        """Return the seconds that have passed, jumps included."""
        return self.now

    def run_in_executor(  # type: ignore[override]  # the checker knows a variadic form
        self,
        executor: Any,  # noqa: ANN401
        func: Callable[..., Any],
        *args: Any,  # noqa: ANN401
    ) -> asyncio.Future[Any]:
        """As always, and the clock does not jump meanwhile."""
        future = super().run_in_executor(executor, func, *args)
        self._executing += 1

        def executed(_: asyncio.Future[Any]) -> None:
            self._executing -= 1

        future.add_done_callback(executed)
        return future

    @property
    def selector(self) -> selectors.BaseSelector:
        """The selector of the loop."""
        return self._selector  # type: ignore[attr-defined, no-any-return]

    @property
    def ready(self) -> bool:
        """Whether something can run now."""
        return bool(self._ready)  # type: ignore[attr-defined]

    @property
    def outside(self) -> bool:
        """Whether something may come from a socket or from a thread of the program's that needs nothing first."""
        threads = {t.ident: t.name for t in threading.enumerate()}
        apart = (threading.get_ident(), threading.main_thread().ident)
        at_work = any(
            ident not in apart
            and not threads.get(ident, "").startswith(_LIBRARY_THREADS)
            and not is_waiting(ident, limited=True)
            for ident in current_frames()
        )
        return len(self.selector.get_map()) > self._own_files or at_work

    @property
    def executing(self) -> bool:
        """Whether a function runs in an executor or a parameter server, or on a `HostStream`, waiting for no handle."""
        return self._executing > 0 or self.progress.offloaded > 0 or bool(self.progress.computing)

    @property
    def returning(self) -> bool:
        """True if a worker has notified the loop of a result, and has not returned to its queue."""
        return any(t.name.startswith(_WORKERS) and not is_waiting(t.ident or 0) for t in threading.enumerate())

    def shuffle(self) -> None:
        """Shuffle the ready handles."""
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        if self._group_of is None or len(ready) < 2:
            return
        # Other threads append to it meanwhile: what they add stays behind what is taken out here.
        taken = [ready.popleft() for _ in range(len(ready))]
        groups: dict[object, deque[asyncio.Handle]] = {}
        for handle in taken:
            groups.setdefault(self._group_of(handle), deque()).append(handle)
        turns = [group for group in groups.values() for _ in group]
        if len(groups) > 1:
            self._random.shuffle(turns)
        ready.extendleft(reversed([group.popleft() for group in turns]))

    def quiet(self) -> bool:
        """Nothing can happen before time passes. Return True if something was started."""
        self._busy_turns = 0
        return self.on_quiet is not None and self.progress.with_lock(self.on_quiet)

    def turned(self) -> None:
        """Count a turn in which something was ready."""
        self._busy_turns += 1
        if self._busy_turns > _BUSY_TURNS:
            self.quiet()

    def next_of_program(self) -> float | None:
        """Return when the program's next timer is due; those that only watch for stalls are not the program's."""
        scheduled: list[Any] = self._scheduled  # type: ignore[attr-defined]
        return min((t.when() for t in scheduled if not t.cancelled() and not is_quiet(t._callback)), default=None)

    def deadlocked(self) -> None:
        """Nothing can ever happen any more."""
        if self._on_deadlock is None:
            raise RuntimeError("deadlock: nothing is ready, no timer is set, nothing runs outside the loop")
        self._on_deadlock()


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that lets the clock of its loop jump in place of a sleep."""

    def __init__(self, loop: FakeClockLoop) -> None:
        super().__init__()
        self._loop = loop
        self._quiet_since = 0.0
        self._seen = (0, 0)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, without waiting where waiting is for nothing but time."""
        loop = self._loop
        if timeout is not None and timeout <= 0:
            events = super().select(0)
            loop.turned()
            loop.shuffle()
            return events
        events = [] if loop.executing else self._grace(GRACE_SECONDS) if loop.outside else self._wait(0)
        if events or loop.ready:
            return events
        # A thread may have begun to compute meanwhile.
        if not loop.executing:
            return [] if loop.quiet() else self._jump(timeout)
        began = monotonic()
        events = self._wait_for_threads(timeout)
        passed = monotonic() - began
        loop.now += passed if timeout is None else min(passed, timeout)
        return events

    def _grace(self, seconds: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait `seconds` of real time for sockets and threads.

        The waits are short: on busy cores each of them is late, as those threads are.
        """
        for _ in range(_GRACE_PARTS):
            events = self._wait(seconds / _GRACE_PARTS)
            if events or self._loop.ready or self._loop.executing:
                return events
            if not (self._loop.outside or self._loop.returning):
                return []
        return []

    def _wait(self, seconds: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for files, `seconds` of real time at most, and poll."""
        progress = self._loop.progress
        until = inf if seconds is None else monotonic() + seconds
        while True:
            pending = progress.pending()
            left = None if until == inf else max(0.0, until - monotonic())
            events = super().select(min(_POLL_SECONDS, inf if left is None else left) if pending else left)
            if pending:
                progress.look()
            if events or self._loop.ready or monotonic() >= until:
                return events

    def _wait_for_threads(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait as `_wait` does, while threads compute; held messages come once the threads wait for them."""
        if self._loop.on_quiet is None:
            return self._wait(timeout)
        until = monotonic() + _LAST_GRACE_SECONDS
        left = inf if timeout is None else timeout
        while left > 0 and self._loop.executing:
            part = min(left, GRACE_SECONDS)
            events = self._wait(part)
            left -= part
            if events or self._loop.ready:
                return events
            if (monotonic() > until or not thread_at_work(self._loop.progress)) and self._loop.quiet():
                return []
        return []

    def _jump(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        loop = self._loop
        due = loop.next_of_program()
        # Before the jump to a limit of the whole program: those who watch for stalls look every second.
        if due is None and (timeout is None or timeout > _QUIET_SECONDS) and loop.outside:
            events = self._grace(_LAST_GRACE_SECONDS)
            if events or loop.ready or loop.executing:
                return events
        if timeout is not None and (due is None or loop.now + timeout < due):
            given = self._give_time(timeout, due)
            if given is not None:
                return given
        if due is not None:
            loop.now = max(loop.now, due)
            return []
        self._quiet_since = loop.now
        if loop.returning:  # as above
            return self._grace(GRACE_SECONDS)
        if not self._threads_ended():
            loop.deadlocked()
        return []

    def _threads_ended(self) -> bool:
        """Wait, in real time, for threads that keep ranks from being stalled; return True if there were some.

        The watch checks again after they have ended. Return False if one of them is at work after all that time.
        """
        progress = self._loop.progress
        if not (any(self._pending()) and thread_at_work(progress)):
            return False
        until = monotonic() + _LAST_GRACE_SECONDS
        while monotonic() < until:
            self._wait(GRACE_SECONDS)
            if self._loop.ready or not thread_at_work(progress):
                return True
        return False

    def _pending(self) -> list[int]:
        """Return for each communicator the number of operations in flight."""
        return [len(dispatcher.lifetime.pending()) for dispatcher in Dispatcher.of_loop(self._loop)]

    def _give_time(self, timeout: float, due: float | None) -> list[tuple[selectors.SelectorKey, int]] | None:
        """Let those who watch for stalls look before the program's timer is due; None: they have had their time."""
        loop = self._loop
        if loop.returning:
            events = self._grace(GRACE_SECONDS)
            if events or loop.ready or loop.executing:
                return events
            self._quiet_since = loop.now  # the watchers see progress, so their time restarts
        seen = sum(dispatcher.oplog.seq for dispatcher in Dispatcher.of_loop(loop)), sum(self._pending())
        if seen != self._seen:  # some rank has got further
            self._seen, self._quiet_since = seen, loop.now
        if loop.now - self._quiet_since < _QUIET_SECONDS:
            loop.now += timeout
            return []
        if due is not None and loop.now < due - _LOOK_SECONDS:
            loop.now = due - _LOOK_SECONDS
            return []
        return None


class _OneThread(Progress):
    """Drives a loop's operations on its own thread alone, so that no other thread has a say in the order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.timers = _LoopTimers(loop)
        self.fair = False  # which awaits yield would depend on the machine's speed

    def start(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Make the call now, or after the call that is being made; another thread's call is made soon, on the loop."""
        if not self.owns_thread():
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self.start, call, *args)
            return
        self.inbox.append((call, args))
        if self._inside:
            return
        # Another thread may hold the lock for another loop: a call that did not wait would come in another order.
        if transport_lock.holder == self.thread_id or not transport_lock.acquire(True, _LOCK_SECONDS):
            polled = True
        else:
            self._inside = True
            try:
                while self.inbox:
                    made, given = self.inbox.popleft()
                    made(*given)
                polled = self.pending()
            finally:
                self._inside = False
                transport_lock.release()
        if polled:
            self._begin_polling()

    start_in_thread = start

    def look(self) -> None:
        """Make one pass over what is pending."""
        with transport_lock:
            self._inside = True
            try:
                self.poll()
            finally:
                self._inside = False

    def _begin_polling(self) -> None:
        """Poll once in the next iteration of the loop; when the loop would sleep, its selector polls."""
        if self.pace is not LoopPace.POLLING:
            self._set_pace(LoopPace.POLLING)
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Poll once: with more turns, as many as fit into some time, the machine's speed would be in the order."""
        if self.pending():
            self.look()
        if not self.pending():
            self.unpin()
        self._park()

    def _park(self) -> None:
        self._set_pace(LoopPace.IDLE)

    def spin(self, handle: _core.Handle) -> None:
        """Leave it to the loop."""


class _LoopTimers(Timers):
    """Deadlines in the loop's own time."""

    def add(self, handle: Expiring, expires: float, seconds: float) -> None:
        """Call `handle._tell_late` after `seconds` of the loop, however late the thread is in real time."""
        self._loop.call_later(max(0.0, seconds), _Deadline(handle))


class _Deadline(Quiet):
    """The deadline of one handle."""

    def __init__(self, handle: Expiring) -> None:
        self._late = ref(handle)

    def __call__(self) -> None:
        handle = self._late()
        if handle is not None and (operation := Operation.of(cast("Handle[Any]", handle))).is_pending:
            operation.expire()

    def is_quiet(self, *, closing: bool) -> bool:
        """See `Quiet`."""
        return not may_pass(self._late(), closing=closing)
