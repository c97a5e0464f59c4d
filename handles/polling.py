"""The transport lock, and the pending work of one loop, polled with that lock held.

[Note: transport lock] One lock of the process serialises native calls. Only the progress thread holds the lock for
long. A call on the loop's thread only tries to take the lock. If another thread has the lock, the call goes into the
inbox. The holder empties the inbox before each poll, so operations start in the order of issue. To poll, the loop's
thread waits for the lock for a moment, without the GIL, since a loop that retried in Python would keep the GIL from the
holder.

[Note: no wake-up is lost] The progress thread sleeps without a timeout only if nothing is pending. While work is
pending, the thread looks at least every millisecond, and polls each loop that has not polled since the last look. So
only a sleeping thread can forget an operation. Before a sleep, the thread sets `alarm.asleep`, then checks *with the
transport lock* that nothing is pending, then waits for a ring. Two kinds of work are pending:

- Calls in the inbox. A thread that adds a call reads `asleep` afterwards, and rings if `asleep` is True. So either this
thread sees that the progress thread is about to sleep, or the progress thread sees the call.
- Requests of pollers, which change only with the lock held. Between two steps of an operation a poller has no request,
  perhaps for long, since the next step may copy much data. Without the lock, the progress thread could sleep through
  the next step, which rings no doorbell. With the lock, the thread sees pollers only between two passes. A pass over no
  requests adds no request, so later requests come from `Progress.start`, which reads `asleep` and rings, or from the
  holder of the lock in a `with` block, whose end does the same.

Two threads write `asleep`: the progress thread and a waking thread. The waking thread writes False and then rings. If
the progress thread does not wait at that moment, its next wait returns immediately.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from time import perf_counter
from typing import Any, ClassVar, Final, Protocol, TypeVarTuple

from aiodist import _core
from aiodist.handles.gil import Hurry

Ts = TypeVarTuple("Ts")

_LARGE_BYTES = 256 << 10
_LINGER_SECONDS = 1e-2


class CallbackFailed(Exception):
    """Raised by a poller, which is sound, from the error of a callback that the poller has made."""


class Alarm:
    """Wakes the progress thread from its sleep."""

    def __init__(self) -> None:
        self.asleep = True
        """True if the thread sleeps, or is about to sleep, without a timeout. The next operation must then ring."""
        self._doorbell = _core.Doorbell()

    def ring(self) -> None:
        """Wake the thread (any thread)."""
        self.asleep = False
        self._doorbell.ring()

    def sleep(self, seconds: float | None, *, for_all: bool, times: int = 1, rest: float = 0.0) -> None:
        """Sleep until a ring, or for `seconds`, up to `times` times while a loop sleeps and nothing wakes it.

        True for `for_all` lets other processes wake the thread too. The thread then sleeps `rest` seconds more while
        the loop sleeps, or until `seconds` after the loop was woken.
        """
        self._doorbell.wait(seconds, for_all, times, rest)

    def loop_polls(self) -> None:
        """Let messages wake the thread again, and not a loop, since the loop polls (loop's thread)."""
        self._doorbell.set_loop_waits(False)

    def sleep_at(self, doorbell: _core.Doorbell) -> None:
        """Let the thread sleep at a doorbell that a native library rings."""
        before, self._doorbell = self._doorbell, doorbell
        before.ring()
        doorbell.ring()  # another thread may have rung only the old doorbell

    def leave(self, doorbell: _core.Doorbell) -> None:
        """Let the thread sleep at its own doorbell again."""
        if self._doorbell is doorbell:
            self.sleep_at(_core.Doorbell())


alarm: Final = Alarm()


class TransportLock:
    """See [Note: transport lock].

    The end of a `with` block wakes a sleeping progress thread, since the block may have made requests.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self.acquire, self.release, self.locked = lock.acquire, lock.release, lock.locked
        self.reinit: Callable[[], None] = lock._at_fork_reinit  # type: ignore[attr-defined]
        self.holder = 0
        """Number of the thread in a `with` block, or 0 without one."""

    def __enter__(self) -> None:
        self.acquire()
        self.holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.holder = 0
        self.release()
        if alarm.asleep:  # see [Note: no wake-up is lost]
            alarm.ring()


transport_lock: Final = TransportLock()


class Poller(Protocol):
    """All pending requests of one native library on one loop. Only `poll` needs the transport lock."""

    def poll(self, until: float = 0.0) -> bool:
        """Make progress, end the operations of finished requests, and return True if any finished.

        The call makes one pass. With `until`, in seconds of `perf_counter`, the call may make more passes until a
        request ends, since a loop inside the poller is faster than repeated calls.
        """

    def __len__(self) -> int:
        """Return the number of pending requests."""

    @property
    def rings(self) -> bool:
        """True if the library rings the doorbell of `Alarm.sleep_at` when a request may have progressed."""


class LoopPace(Enum):
    """The thread that polls the pending work of a loop.

    | from | to | thread | when |
    |---|---|---|---|
    | IDLE, PARKED | POLLING | the loop's | an operation is issued; `Progress.resume` finds pending work |
    | POLLING | IDLE | the loop's | a turn finds nothing pending |
    | POLLING | PARKED | the loop's | 300 us without progress, or work that the progress thread must poll |
    | PARKED | IDLE | the loop's | `Progress.resume` finds nothing pending |
    | PARKED | IDLE | the progress thread | a pass leaves nothing pending |
    | IDLE | PARKED | a thread of a transport | the thread has made requests (`LoopWork.ensure_polled`) |
    """

    IDLE = "nothing is pending"
    POLLING = "each iteration of the loop polls"
    PARKED = "the progress thread polls"


_IDLE, _POLLING, _PARKED = LoopPace.IDLE, LoopPace.POLLING, LoopPace.PARKED


class LoopWork(_core.Pacer):
    """The pending work of one event loop, with methods for any thread. `Progress` adds the loop's own methods.

    Writers of its attributes:

    - A thread that holds `_lock` writes `pace`, `large`, `at_work`, `threads_waiting` and the tuple of pollers.
    - A thread that holds the transport lock writes `offloaded` and `_running_calls`, and takes calls from `inbox`. Any
      thread appends to `inbox`.
    - Each thread adds and removes its own number in `computing`.
    - `polls` and `last_ran` are hints, since a lost update only delays a check by the progress thread.

    `last_ran` is the time of aiodist's last callback on the loop, in seconds of `perf_counter`. True for `crowded`
    means that ranks outnumber cores. A spinning thread then lets other threads run in between.

    [Note: held while pending] The program may drop its handles, and a parked loop does not hold this object. The object
    is part of a reference cycle, and its collection in the middle of a transfer would free the buffers. So `held` has
    each object with pending work. A call that makes work pending adds the object. A thread that finds nothing pending
    removes the object, perhaps after the end of the loop.
    """

    held: ClassVar[set[LoopWork]] = set()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.last_ran = perf_counter()
        self.thread_id = threading.get_ident()
        self.computing: set[int] = set()
        """Numbers of the threads of host streams that compute now.

        A thread that waits for a handle does not compute.
        """
        self.pace = _IDLE
        self.inbox: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        """Calls to be made with the transport lock held, in order."""
        self.large = 0
        """Number of transfers and calls that the progress thread drives."""
        self.at_work = 0
        """Number of transfers and calls in `large` that need no other rank, such as copies."""
        self.offloaded = 0
        """Number of jobs on other threads and devices whose end is not reported yet."""
        self.threads_waiting = 0
        """Number of other threads that wait for polled work, see `thread_waits`."""
        self.watched = False
        """True if the progress thread knows this object."""
        self.on_broken: list[Callable[[Exception], None]] = []
        """Functions that the loop calls with the error of a removed poller, whose requests never end."""
        self._pollers: tuple[Poller, ...] = ()
        self._running_calls = 0
        """Number of calls at the front of the inbox that run now, one inside the other."""
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._waking = False
        """True if the loop has been woken for posted calls that have not run yet."""
        self._lock = threading.RLock()  # the garbage collector may call `Progress.start` inside
        self._hurry = Hurry()

    def owns_thread(self) -> bool:
        """Return True on the loop's thread."""
        return threading.get_ident() == self.thread_id

    def check_here(self, subject: object, instead: str = "") -> None:
        """Raise RuntimeError, with the advice `instead`, unless the calling thread runs this loop now."""
        if _get_running_loop() is not self.loop:
            raise RuntimeError(
                f"{subject} belongs to another thread or event loop: call it on the loop it was opened on{instead}"
            )

    # --- what is pending -----------------------------------------------------------------------------------

    def pending(self) -> bool:
        """Return True while a call or a request is pending."""
        return bool(self.inbox) or any(map(len, self._pollers))

    def busy(self) -> bool:
        """Return True if pending work may end without another rank, such as a posted call, a copy or a job."""
        others = (len(poller) for poller in self._pollers if not getattr(poller, "of_ranks", False))
        return bool(self.inbox or self._posted or self.offloaded or self.at_work) or any(others)

    def rings(self) -> bool:
        """Return True if the doorbell rings for all pending work."""
        return not self.inbox and all(poller.rings for poller in self._pollers if len(poller))

    def remove_poller(self, poller: Poller) -> None:
        """Stop polling `poller` (any thread)."""
        with self._lock:
            self._pollers = tuple([p for p in self._pollers if p is not poller])

    def ensure_polled(self) -> None:
        """Ensure that a thread polls the requests that the caller, a thread of a transport, has made.

        The caller holds the transport lock. `Progress.start` does the same for the requests of its calls.
        """
        if self.pending():
            self.held.add(self)  # the pace of a closed loop may be POLLING
            if self.pace is not _POLLING:
                self._change_pace(_IDLE, _PARKED)
                alarm.ring()

    def stir(self) -> None:
        """Let libraries make progress for a moment without a request, since another rank may need that progress."""
        if transport_lock.acquire(False):  # else another thread polls now
            try:
                for poller in self._pollers:
                    if (stir := getattr(poller, "stir", None)) is not None:
                        stir()
                self.ensure_polled()
            finally:
                transport_lock.release()

    def unpin(self) -> bool:
        """Remove this object from `held`, since nothing is pending. Return False if work is pending again.

        From any thread. See [Note: held while pending].
        """
        self.held.discard(self)
        if not self.pending():
            return True
        self.held.add(self)  # the thread with the new work may have added the object before the removal
        return False

    def _set_pace(self, pace: LoopPace) -> None:
        with self._lock:
            self.pace = pace

    def _change_pace(self, before: LoopPace, after: LoopPace) -> None:
        """Change the pace, unless another thread has changed the pace from `before`."""
        with self._lock:
            if self.pace is before:
                self.pace = after

    # --- counts ----------------------------------------------------------------------------------------------

    def add_large(self, count: int, *, of_ranks: bool = False) -> None:
        """Add `count`, also negative, to the transfers and calls that only the progress thread drives (any thread).

        True for `of_ranks` means that these transfers may wait for other ranks.
        """
        with self._lock:
            self.large += count
            self.at_work += 0 if of_ranks else count
        if count > 0 or self.loop.is_closed():
            self._hurry.add(count)
        else:
            # The loop needs the GIL soon, to learn of the end.
            self.post(self._hurry.add, count)

    def counted(
        self, done: Callable[[BaseException | None], None], *, of_ranks: bool = False
    ) -> Callable[[BaseException | None], None]:
        """Count a large transfer until the returned callback calls `done`. `of_ranks` is as in `add_large`."""
        self.add_large(1, of_ranks=of_ranks)

        def finished(error: BaseException | None) -> None:
            self.add_large(-1, of_ranks=of_ranks)
            done(error)

        return finished

    def hurry(self, count: int) -> None:
        """Add `count`, also negative, to the operations whose end needs the GIL soon (any thread)."""
        self._hurry.add(count)

    def keep_hurrying(self, nbytes: int) -> None:
        """Add a reason for 10 ms after the await of a large operation (loop's thread).

        Another one may follow, and meanwhile each call of torch releases the GIL.
        """
        if nbytes >= _LARGE_BYTES:
            self.hurry(1)
            self.loop.call_later(_LINGER_SECONDS, self.hurry, -1)

    def thread_waits(self, count: int, *, polled: bool) -> None:
        """Add `count`, also negative, to the threads that wait for handles. These threads then get the GIL sooner.

        True for `polled` means that these threads wait for polled work. The progress thread then polls, since the loop
        may be blocked.
        """
        self.hurry(count)
        if polled:
            with self._lock:
                self.threads_waiting += count
            if count > 0:
                alarm.ring()  # the progress thread may be in a pause

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a block in which the calling thread does not count as computing."""
        me = threading.get_ident()
        computes = me in self.computing
        self.computing.discard(me)
        try:
            yield
        finally:
            if computes:
                self.computing.add(me)

    # --- polling, with the transport lock held -----------------------------------------------------------------

    def poll(self, until: float = 0.0) -> bool:
        """Make one pass over all pollers. Return True if an operation ended.

        With `until`, in seconds of `perf_counter`, the only poller with requests may poll until that time.
        """
        self.polls += 1
        if self.inbox:
            self.make_calls()
        completed = False
        pollers = self._pollers
        if len(pollers) > 1:
            pollers = tuple([poller for poller in pollers if len(poller)])
        for poller in pollers:
            try:
                if poller.poll(until if len(pollers) == 1 else 0.0):
                    completed = True
            except CallbackFailed as failed:
                self.report("a callback at the end of a transfer failed", failed.__cause__ or failed)
                completed = True
            except Exception as error:  # noqa: BLE001  - the other pollers continue
                self._poller_failed(poller, error)
        return completed

    def make_calls(self) -> bool:
        """Make the calls of the inbox, which may call this method too. Return True if there were any."""
        made = False
        while len(self.inbox) > self._running_calls:
            made = True
            # A running call stays in the inbox, so that the work counts as pending and the progress thread does not
            # sleep.
            self._running_calls += 1
            try:
                self._call(*self.inbox[self._running_calls - 1])
            finally:
                self._running_calls -= 1
                del self.inbox[self._running_calls]
        return made

    def drive(self) -> bool:
        """Make the calls of the inbox, or one pass if there are none.

        Return True if a call was made or an operation ended.
        """
        transport_lock.acquire()  # not `with`, which would ring
        try:
            completed = self.make_calls() or self.poll()
            if self.pending():
                self.held.add(self)  # the loop may have removed this object between two steps
            else:
                self._change_pace(_PARKED, _IDLE)
                if self.pace is not _POLLING or self.loop.is_closed():
                    self.unpin()
        finally:
            transport_lock.release()
        return completed

    def _call(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001  - later calls are still made
            self._start_failed(call, error)

    def _start_failed(self, call: Callable[..., object], error: Exception) -> None:
        self.report(f"{call!r}, which starts a transfer, failed", error)

    def _poller_failed(self, poller: Poller, error: Exception) -> None:
        """Remove a poller that raises: a poller reports errors of requests, so its other requests may never end."""
        self.report(f"{poller!r} failed, and its requests never end", error)
        self.remove_poller(poller)
        for notify in list(self.on_broken):
            self.post(notify, error)

    # --- calls on the loop -------------------------------------------------------------------------------------

    def post(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        """Let the loop call `fn` (any thread). Several posts cost one wake-up of the loop."""
        self._posted.append((fn, args))
        if self._waking:
            return
        self._waking = True
        try:
            if self.owns_thread():
                self.loop.call_soon(self._run_posted)
            else:
                self.loop.call_soon_threadsafe(self._run_posted)
        except RuntimeError:  # the loop is closed
            self._posted.clear()
            self._waking = False

    def on_loop(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call `fn` now on the loop's thread, or let the loop call `fn` on another thread."""
        if threading.get_ident() == self.thread_id:
            fn(*args)
        else:
            self.post(fn, *args)

    def report(self, message: str, error: BaseException) -> None:
        """Pass `error` to the loop's exception handler (any thread)."""
        self.post(self._report, message, error)

    def _report(self, message: str, error: BaseException) -> None:
        self.loop.call_exception_handler({"message": message, "exception": error})

    def _run_posted(self) -> None:
        self._waking = False
        self.last_ran = perf_counter()
        for _ in range(len(self._posted)):
            fn, args = self._posted.popleft()
            try:
                fn(*args)
            except Exception as error:  # noqa: BLE001  - later calls are still made
                self._report(f"{fn} failed", error)
