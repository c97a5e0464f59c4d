"""`Progress` drives pending operations, one per event loop; with the process's progress thread.

A transport makes progress only while somebody calls into it: an await, the loop, or the progress thread, in turns that
docs/design/handles.md tells.

[Note: transport lock] Native calls are serialised by one lock for the process. Only the progress thread holds it
for long, and nobody waits for it while holding the GIL: the loop's thread tries it, and where it is taken leaves
its call in the inbox, which the holder empties. So operations start in the order in which they were issued. To poll,
the loop's thread waits for it a moment, without the GIL: a loop that tried again at once keeps that from the holder.

[Note: no wake-up is lost] The progress thread sleeps without a time-out only where nothing is pending, and while
anything is pending it is awake or is woken: it looks at least every millisecond and polls what nobody has polled
since it looked last. So an operation can be forgotten only by a thread that sleeps. The thread says that it is about
to (`asleep`), then looks whether anything is pending, *with the transport lock*, then waits for a ring. Pending is

- what lies in the inbox. The code that puts a call there reads `asleep` afterwards, and rings. Either this side
  sees that the thread is about to sleep, or the thread sees the call;
- what pollers have, and that changes only with the lock held. Between the end of one step of an operation and the
  start of its next a poller has nothing for a while, which may be long (the next step may copy much): without the lock
  the thread would believe that nothing is pending, and sleep through the next step, which rings no doorbell. With the
  lock it sees pollers only between their passes. A pass over nothing leaves nothing, so what is pending later was
  begun by `start`, which reads `asleep` and rings, or by somebody who held the lock in a `with` block, which does the
  same.

`asleep` may be written by two: the thread, and another that wakes it. The other one writes False and then rings, so the
thread does not sleep through what the False hides from others: a ring that nobody waits for is heard by the next wait.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, ClassVar, Protocol, TypeVar
from weakref import WeakValueDictionary, ref

from aiodist import _core
from aiodist.handles.forks import part
from aiodist.handles.timers import Quiet, Timers
from aiodist.handles.tracing import tracing

T = TypeVar("T")

LARGE_BYTES = 1 << 22
"""From here on the progress thread drives a transfer: one native poll of it may last milliseconds."""

_POLL_SECONDS = 300e-6  # how long the loop polls after the last completion before it parks
_PATIENCE_SECONDS = 50e-6  # how long the loop waits for the lock, whose holder needs the GIL that a spinning loop takes
_TICK_SECONDS = 1e-3  # how often the thread looks whether the loop still polls
_LINGER_SECONDS = 0.2  # how long the thread keeps ticking with nothing to do; waking it from sleep costs 20 us
_COMPUTING_LINGER_SECONDS = 2e-3  # the same while a stream computes
_MIN_PAUSE, _MAX_PAUSE = 20e-6, 1e-3
_EAGER_SECONDS = 3e-3  # how long the thread polls a large transfer without a pause while nothing moves
_SWITCH_SECONDS = 2e-4
_FAILING_SECONDS = 0.5
_FORKED_SECONDS = 0.02  # how often the loop of a forked child looks whether a thread asks something of it
_END_SECONDS = 1.0


class _TransportLock:
    """See [Note: transport lock]; a `with` block may make operations pending that nobody else looks after."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self.acquire, self.release, self.locked = lock.acquire, lock.release, lock.locked
        self.reinit: Callable[[], None] = lock._at_fork_reinit  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
        if _thread.asleep:  # see [Note: no wake-up is lost]
            _thread.ring()


transport_lock = _TransportLock()


class Poller(Protocol):
    """All pending requests of one native library on one loop; called with the transport lock held."""

    def poll(self, until: float = 0.0) -> bool:
        """Make progress, tell the owner of each request that ended, and return whether any did.

        One pass; with `until` (seconds of `perf_counter`) it may make more of them, until then or until something
        ends: a poller that loops close to its library answers sooner.
        """

    def __len__(self) -> int:
        """Return how many requests are pending."""

    @property
    def rings(self) -> bool:
        """Return True when the doorbell that `sleep_at` was given is rung as soon as there is something to poll for."""


class Driven(Protocol):
    """Pending operations that a thread which needs no Python drives, beside those who poll."""

    @property
    def heavy(self) -> bool:
        """So much is under way that nobody else should: the loop sleeps."""

    def sleep(self) -> bool:
        """The loop will not poll: call its `resume` when something ends. False where something has ended."""


class Progress(_core.Pacer, Quiet):
    """Drives every pending operation of one event loop.

    Get it with `Progress.current()` in a coroutine. `last_ran` is when the loop last ran our callback (seconds of
    `perf_counter`), `spin_seconds` how long an await may spin; `crowded` says that ranks outnumber
    cores: a thread that spins lets others run in between. Its turns of the loop run nothing of the program's but by the
    end of an operation, and what is posted, see `busy`.

    [Note: held while pending] A parked loop does not hold it, nor need anybody hold a handle: what is dropped is a
    cycle, and a collection of garbage in the midst of a transfer would free its buffers. So `_held` has those with work
    pending, from the call that makes it so until somebody finds that nothing is; beyond the loop's end, if that comes
    first.
    """

    _of_loop: ClassVar[WeakValueDictionary[int, Progress]] = WeakValueDictionary()
    _held: ClassVar[set[Progress]] = set()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.last_ran = perf_counter()
        self.looked_in_vain = 0.0
        self.spin_seconds = 50e-6
        self.fair = True
        self.parked = False
        self.large = 0
        self.at_work = 0
        """Number of these that need no other rank: copies, and calls that the thread makes."""
        self.computing: set[int] = set()
        """The threads of host streams that compute just now, and do not wait for a handle."""
        self.offloaded = 0
        """How much work other threads and devices do, whose end is still to be told; with the transport lock held."""
        self._large_lock = threading.Lock()
        self._hurry = _Hurry()
        self.timers = Timers(loop)
        self.own_files: set[int] = set()
        """Those that the loop looks at for aiodist alone."""
        self.belongings: dict[object, Any] = {}
        """What others keep for this loop, by a key of their own: nothing of it outlives the loop."""
        self.carriers: dict[object, asyncio.Task[Any]] = {}
        """Of handles whose operations tasks of ours carry out: these tasks; empty before Python 3.14."""
        self.watched = False
        """The progress thread knows of it."""
        self.threads_waiting = 0
        """How many other threads wait for what is polled, see `thread_waits`."""
        self._forked = False
        self.thread_id = threading.get_ident()
        self._pollers: tuple[Poller, ...] = ()
        self._driven: tuple[Driven, ...] = ()
        self._pollers_lock = threading.Lock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._posted: deque[Callable[[], object]] = deque()
        self._waking = False
        self._inside = False
        """The loop's thread holds the transport lock, and polls or makes a call."""
        self._quiet_since = 0.0
        self.on_broken: list[Callable[[Exception], None]] = []
        """Told, on the loop, why a poller was given up: what it drove will not end."""
        self._failing: dict[Poller, tuple[float, float]] = {}
        """The pollers that raised: since when each does, and when it did last."""

    @classmethod
    def current(cls) -> Progress:
        """Return the running loop's, made at first use; raise `RuntimeError` where no loop runs."""
        loop = asyncio.get_running_loop()
        progress = cls._of_loop.get(id(loop))
        if progress is None:
            cls._of_loop[id(loop)] = progress = cls(loop)
            # Nothing may hold it between one await and the next. A new one each time would never find that the
            # loop has not run for long, so it stays until the loop has.
            loop.call_soon(progress._ran)
        return progress

    def own(self, key: object, make: Callable[[], T]) -> T:
        """Return what belongs to this loop by `key`, made at first use; from any thread."""
        found = self.belongings.get(key)
        if found is None:
            found = self.belongings.setdefault(key, make())
        return found  # type: ignore[no-any-return]

    def carry_out(self, handle: object, task: asyncio.Task[Any]) -> None:
        """Note that `task` carries the operation of `handle` out: `python -m asyncio pstree` shows who waits for it."""
        if sys.version_info >= (3, 14):
            self.carriers[handle] = task
            task.add_done_callback(lambda _: self.carriers.pop(handle))

    def install(self) -> None:
        """Be what `current` returns on this loop, in place of one that it would make."""
        self._of_loop[id(self.loop)] = self

    def owns_thread(self) -> bool:
        """Return True on the loop's thread."""
        return threading.get_ident() == self.thread_id

    def check_here(self, subject: str, instead: str = "") -> None:
        """Raise RuntimeError, with what to do `instead`, unless the calling thread runs this loop just now."""
        if _get_running_loop() is not self.loop:
            raise RuntimeError(
                f"{subject} belongs to another thread or event loop: call it on the loop it was opened on{instead}"
            )

    def add_poller(self, poller: Poller) -> None:
        """Poll `poller` from now on; from any thread."""
        with self._pollers_lock:
            self._pollers = (*self._pollers, poller)
        if not self.watched:
            _thread.add(self)

    def remove_poller(self, poller: Poller) -> None:
        """Stop polling `poller`; from any thread."""
        with self._pollers_lock:
            self._pollers = tuple([p for p in self._pollers if p is not poller])
        self._failing.pop(poller, None)

    def add_driven(self, driven: Driven) -> None:
        """Have `driven` wake the loop where that does not poll; on the loop's thread."""
        self._driven = (*self._driven, driven)

    def remove_driven(self, driven: Driven) -> None:
        """Forget `driven`; on the loop's thread."""
        self._driven = tuple([d for d in self._driven if d is not driven])

    # --- issuing ---------------------------------------------------------------------------------------

    def start(self, call: Callable[[], None]) -> None:
        """Make a native call that starts a transfer, now or as soon as the lock's holder gets to it.

        `call` runs with the transport lock held, and in order with the other calls. It must not raise, see `guarded`
        of `aiodist.backends.base`: what it raises is told to the loop's exception handler, and to nobody else.
        """
        self.polls += 1  # a loop that issues is alive: the thread need not take over yet
        if not self._inbox and transport_lock.acquire(False):
            self._inside = True
            try:
                call()
            except Exception as error:  # noqa: BLE001  - as in `_call`
                self._start_failed(call, error)
            finally:
                self._inside = False
                transport_lock.release()
        else:
            self._inbox.append(call)
        if not self.armed:
            self._arm()
        elif _thread.asleep:  # user code has computed for so long that the thread went to sleep
            _thread.wake(self)

    def start_from_thread(self, call: Callable[[], None]) -> None:
        """Like `start`, from any thread: beside the loop's thread the progress thread sees to what it began."""
        if self.owns_thread():
            self.start(call)
        elif not self._inbox and transport_lock.acquire(False):
            try:
                self._call(call)
                self.attend()
            finally:
                transport_lock.release()
            if _thread.asleep:  # a loop that seems to poll may stand still
                _thread.wake(self)
        else:
            self._inbox.append(call)
            self._held.add(self)
            _thread.wake(self)

    def start_in_thread(self, call: Callable[[], None]) -> None:
        """Like `start`, but the progress thread makes the call, since it takes long; the loop keeps off."""
        self.add_large(1)

        def counted() -> None:
            try:
                call()
            finally:
                self.add_large(-1)

        self._inbox.append(counted)
        self._held.add(self)
        _thread.wake(self)

    def _arm(self) -> None:
        """Have the loop poll from its next iteration on, and the thread see whether it does."""
        self._held.add(self)
        self.armed = True
        self.parked = False
        self._quiet_since = perf_counter()
        self.loop.call_soon(self._turn)
        if _thread.asleep or not self.watched:
            _thread.wake(self)

    def liven(self) -> None:
        """Something came that nobody here waits for, and more may follow: have the loop poll again; from any thread.

        Unless a stream computes: beside it the loop must not poll, and the thread goes on.
        """
        if not self.armed and not self.computing:
            self.post(self._rearm)

    def attend(self) -> None:
        """Have what is pending polled: a thread that is not the progress thread has begun with it, and not by `start`.

        With the transport lock held: for threads of transports, whose messages are what the next step waited for.
        """
        if self.pending():
            self._held.add(self)  # a loop that was closed may seem armed
            if not self.armed:
                self.parked = True
                _thread.wake(self)

    def let_go(self) -> bool:
        """Nothing is pending, and the loop will not poll: have nobody hold it; False where that is not so any more.

        From any thread; see [Note: held while pending].
        """
        self._held.discard(self)
        if not self.pending():
            return True
        self._held.add(self)  # the thread that made it pending may have added it before we discarded it
        return False

    def _rearm(self) -> None:
        if not self.armed:
            self._arm()

    def add_large(self, count: int, *, of_ranks: bool = False) -> None:
        """Count transfers and calls that only the thread may drive; from any thread.

        `of_ranks`: they may wait for other ranks.
        """
        with self._large_lock:
            self.large += count
            self.at_work += 0 if of_ranks else count
        if count > 0 or self.loop.is_closed():
            self._hurry.add(count)
        else:
            # The GIL must still come over quickly to the loop, which learns of the end just now.
            self.post(partial(self._hurry.add, count))

    def hurry(self, count: int) -> None:
        """Count what has threads hand the GIL over sooner; from any thread."""
        self._hurry.add(count)

    def counted(
        self, done: Callable[[BaseException | None], None], *, of_ranks: bool = False
    ) -> Callable[[BaseException | None], None]:
        """Have only the thread poll until the returned `done` is called; `of_ranks` as in `add_large`."""
        self.add_large(1, of_ranks=of_ranks)

        def finished(error: BaseException | None) -> None:
            self.add_large(-1, of_ranks=of_ranks)
            done(error)

        return finished

    def forget(self) -> None:
        """Drive nothing of what is pending: in a forked child, which must not touch its parent's transfers."""
        self._pollers = self._driven = ()
        self._inbox.clear()
        self._hurry = _Hurry()
        self._forked = True
        if part(self.loop) and self.owns_thread():
            self._look_again()

    def _look_again(self) -> None:
        """Have the loop of a forked child see what its threads ask of it: they wake the parent's loop.

        A timer alone does not have uvloop look.
        """
        self.loop.call_later(_FORKED_SECONDS, self.loop.call_soon, self._look_again)

    def check_not_forked(self, handle: _core.Handle) -> None:
        """Raise `RuntimeError` in a forked child, where `handle` will never be over."""
        if self._forked:
            raise RuntimeError(f"{handle} was issued before os.fork: a child cannot wait for it")

    def thread_waits(self, count: int, *, polled: bool) -> None:
        """Count the other threads that wait for handles: the GIL comes over to them, and to the thread, sooner.

        While one waits for what is `polled`, the thread does that though the loop seems to: it may stand still.
        """
        self.hurry(count)
        if polled:
            with self._large_lock:
                self.threads_waiting += count
            if count > 0:
                _thread.ring()  # it may be in a pause

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In this block the calling thread, which may be one that computes, only waits: it needs no core."""
        me = threading.get_ident()
        computes = me in self.computing
        self.computing.discard(me)
        try:
            yield
        finally:
            if computes:
                self.computing.add(me)

    @property
    def inbox(self) -> deque[Callable[[], None]]:
        """The calls that are still to be made, in order."""
        return self._inbox

    def pending(self) -> bool:
        """Return True while anything is to be driven."""
        return bool(self._inbox) or any(map(len, self._pollers))

    def busy(self) -> bool:
        """Return whether something may end that waits for no other rank: a thread's work, a device's, a transfer."""
        others = (len(poller) for poller in self._pollers if not getattr(poller, "of_ranks", False))
        return bool(self._inbox or self._posted or self.offloaded or self.at_work) or any(others)

    def rung(self) -> bool:
        """Return True when nobody need look: the doorbell rings when something that is pending may have moved."""
        return not self._inbox and all(poller.rings for poller in self._pollers if len(poller))

    # --- driving ---------------------------------------------------------------------------------------

    def poll(self, until: float = 0.0) -> bool:
        """Make one pass over everything; with the transport lock held. True when something completed.

        With `until` a poller that is alone may stay until then.
        """
        self.polls += 1
        if self._inbox:
            self._empty_inbox()
        completed = False
        pollers = self._pollers
        if len(pollers) > 1:
            pollers = tuple([poller for poller in pollers if len(poller)])
        for poller in pollers:
            try:
                if poller.poll(until if len(pollers) == 1 else 0.0):
                    completed = True
            except Exception as error:  # noqa: BLE001  - the others go on, and so does what else it drives
                self._poller_failed(poller, error)
        return completed

    def _poller_failed(self, poller: Poller, error: Exception) -> None:
        """Say so once; what drives nothing any more for `_FAILING_SECONDS` is given up, for nobody may wait for it."""
        now = perf_counter()
        since, last = self._failing.get(poller, (now, -inf))
        if now > last + _FAILING_SECONDS:  # the first time, or again after it had not for a while
            since = now
            self.report(f"{poller!r} failed, and is polled on", error)
        self._failing[poller] = (since, now)
        if now > since + _FAILING_SECONDS:
            self.remove_poller(poller)
            for tell in list(self.on_broken):
                self.post(partial(tell, error))

    def _empty_inbox(self) -> None:
        while self._inbox:
            # It stays in until it has run: a thread that found nothing pending meanwhile would go to sleep.
            try:
                self._call(self._inbox[0])
            finally:
                self._inbox.popleft()

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  - those behind it are made all the same
            self._start_failed(call, error)

    def _start_failed(self, call: Callable[[], None], error: Exception) -> None:
        self.report(f"{call!r}, which starts a transfer, failed", error)

    def called(self) -> bool:
        """Make the calls that were left for the lock's holder; True when there were any."""
        if not self._inbox:
            return False
        self._empty_inbox()
        return True

    def glance(self, patience: float = 0.0) -> bool:
        """Make one pass now, unless another thread keeps the lock for `patience` seconds; return whether it was made.

        Also for calls that issue so much that what they wait for should not wait for the loop.
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

    def exclusively(self, call: Callable[[], object]) -> None:
        """Make `call` with the transport lock held; on the loop's thread, which may hold it already.

        What waits for a handle on the loop may be told while the loop polls, and so with the lock held.
        """
        if self._inside:
            call()
            return
        with transport_lock:
            self._inside = True
            try:
                call()
            finally:
                self._inside = False

    def spin(self, handle: _core.Handle) -> None:
        """Poll until `handle` is done, for `spin_seconds` at most; on the loop's thread."""
        if not handle._polled or self.large:
            return
        for driven in self._driven:
            if driven.heavy:
                return
        self.polls += 1  # also where the thread has the lock just now: it sees that the loop is back
        if not transport_lock.acquire(False) and not transport_lock.acquire(True, self.spin_seconds):
            return
        self._inside = True
        try:
            if handle._fence is not None and handle._fence.look() and handle.done():
                return
            until = self.look_until(perf_counter())
            while True:
                moved = self.poll(0.0 if self.crowded else until)
                if handle.done():
                    return
                if perf_counter() >= until or not (moved or self.pending()):
                    self.looked_in_vain = perf_counter()
                    return
                if self.crowded:
                    os.sched_yield()
        finally:
            self._inside = False
            transport_lock.release()

    def _turn(self) -> None:
        """One iteration of the loop while something is pending."""
        now = perf_counter()
        if now - self.last_ran > _POLL_SECONDS:
            self._quiet_since = now  # the loop was busy: it has not polled in vain
        self.last_ran = now
        if not self.pending():
            self.armed = False
            if not self.let_go():  # of a thread that saw us armed just now: see `attend`
                self._park()
            return
        if self.large or any(driven.heavy for driven in self._driven):
            self._park()
            return
        self.polls += 1  # also where the thread has the lock just now: it sees that the loop is back
        self.glance(_PATIENCE_SECONDS)
        if now - self._quiet_since < _POLL_SECONDS:
            if self.crowded:
                os.sched_yield()
            self.loop.call_soon(self._turn)
        else:
            self._park()

    def _park(self) -> None:
        self._held.add(self)
        self.armed = False
        self.parked = True
        _thread.wake(self)
        self._sleep()

    def _sleep(self) -> None:
        """Have the loop woken when something ends, or at once where something has."""
        asleep = [driven.sleep() for driven in self._driven]
        if not all(asleep):
            self.loop.call_soon(self.resume)

    def resume(self) -> None:
        """Something has ended while the loop did not poll: look, and poll again; on the loop's thread.

        Beside a stream that computes the loop must not poll: it sleeps until the next end.
        """
        if not self.glance(_PATIENCE_SECONDS):  # the thread that has the lock may have looked before it happened
            self.loop.call_soon(self.resume)
            return
        if self.armed:
            return
        if not self.pending():
            self.parked = False
            self.let_go()
        elif not self.computing:
            self._arm()
        else:
            self._sleep()

    # --- handing over to the loop ------------------------------------------------------------------------

    def post(self, fn: Callable[[], object]) -> None:
        """Have the loop call `fn`, from any thread: many in a row cost one wake-up."""
        self._posted.append(fn)
        if self._waking:
            return
        self._waking = True
        try:
            if self.owns_thread():
                self.loop.call_soon(self._run_posted)
            else:
                self.loop.call_soon_threadsafe(self._run_posted)
        except RuntimeError:
            # The loop is closed: nobody is left to be told.
            self._posted.clear()
            self._waking = False

    def on_loop(self, fn: Callable[[], object]) -> None:
        """Call `fn` now on the loop's thread; have the loop call it where this is another."""
        if self.owns_thread():
            fn()
        else:
            self.post(fn)

    def report(self, message: str, error: BaseException) -> None:
        """Have the loop's exception handler hear of `error`, from any thread."""
        self.post(partial(self._report, message, error))

    def _report(self, message: str, error: BaseException) -> None:
        self.loop.call_exception_handler({"message": message, "exception": error})

    def _run_posted(self) -> None:
        self._waking = False
        self._ran()
        for _ in range(len(self._posted)):
            fn = self._posted.popleft()
            try:
                fn()
            except Exception as error:  # noqa: BLE001  - those behind it must still be told
                self._report(f"{fn} failed", error)

    def _ran(self) -> None:
        self.last_ran = perf_counter()


class _Hurry:
    """How much of one loop has threads hand the GIL over sooner; what a loop that stopped has left goes with it."""

    def __init__(self) -> None:
        self.count = 0
        self._process = os.getpid()
        self._thread = _thread

    def add(self, count: int) -> None:
        self._thread.hurry(self, count)

    def __del__(self) -> None:
        if self.count and os.getpid() == self._process:
            self._thread.hurry(self, -self.count)


class ProgressThread:
    """The one thread of the process that polls for loops that cannot or should not.

    `linger_seconds` is how long it keeps looking with nothing to do.
    """

    def __init__(self, linger_seconds: float = _LINGER_SECONDS) -> None:
        self.linger_seconds = linger_seconds
        self._members: tuple[ref[Progress], ...] = ()
        self._members_lock = threading.Lock()
        self._doorbell = _core.Doorbell()
        self._thread: threading.Thread | None = None
        self._hurry_lock = threading.RLock()  # a collection of garbage may end what hurries, in the midst of this
        self._hurried = 0
        self._switch_seconds = sys.getswitchinterval()
        self.asleep = True
        """Nothing has been pending for a while: the next operation must wake the thread."""
        self._ending = False
        self._seen: dict[int, int] = {}
        """How often each loop had been polled for when the thread looked last."""
        self._idle_since = self._busy_since = perf_counter()

    def hurry(self, loop: _Hurry, count: int) -> None:
        """Count large transfers of a loop; while there are any, threads hand the GIL over sooner.

        The thread needs the GIL after each native poll. Beside a thread of pure Python it would wait 5 ms
        each time, longer than the transfer itself.
        """
        with self._hurry_lock:
            loop.count += count
            if self._hurried == 0:
                self._switch_seconds = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_SECONDS, self._switch_seconds))
            self._hurried += count
            if self._hurried == 0:
                sys.setswitchinterval(self._switch_seconds)

    def wake(self, progress: Progress) -> None:
        """Drive a loop whose operations nobody else would look after now."""
        if not progress.watched:
            self.add(progress)
        self.ring()

    def ring(self) -> None:
        """Wake the thread."""
        self.asleep = False
        self._doorbell.ring()

    def sleep_at(self, doorbell: _core.Doorbell) -> None:
        """Sleep at a doorbell that a native library rings."""
        before, self._doorbell = self._doorbell, doorbell
        before.ring()
        doorbell.ring()  # for those who ring the one before just now, while the thread goes to sleep at this one

    def leave(self, doorbell: _core.Doorbell) -> None:
        """Sleep at a doorbell of its own again."""
        if self._doorbell is doorbell:
            self.sleep_at(_core.Doorbell())

    def add(self, progress: Progress) -> None:
        """Look after a loop from now on."""
        for other in tuple(Progress._held):
            if other.loop.is_closed() and not other.pending():  # it had no turn to find that
                other.let_go()
        with self._members_lock:
            self._members = (*[member for member in self._members if member() is not None], ref(progress))
            progress.watched = True
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="aiodist-progress", daemon=True)
        self._thread.start()

    def end(self, seconds: float | None = _END_SECONDS) -> None:
        """The interpreter ends: drive nothing any more.

        A thread that finds it gone when a call into torch returns is taken out of the midst of that, which aborts the
        process (CPython before 3.14, python/cpython#87135).
        """
        self._ending = True
        if self._thread is not None:
            self._doorbell.ring()
            self._thread.join(seconds)

    def restart(self, linger_seconds: float) -> None:
        """Continue in a new thread, for the loops that are open."""
        self.end(None)
        with self._members_lock:
            self._members = tuple(ref(progress) for progress in self._alive() if not progress.loop.is_closed())
            self.linger_seconds, self.asleep, self._ending = linger_seconds, False, False
            self._start()

    def _alive(self) -> list[Progress]:
        return [progress for member in self._members if (progress := member()) is not None]

    def _run(self) -> None:
        self._idle_since = self._busy_since = perf_counter()
        while not self._ending:
            try:
                self.pause(*self.look())
            except Exception as error:  # noqa: BLE001  - without the thread every operation would wait for ever
                for progress in self._alive():
                    progress.report("the progress thread failed, and goes on", error)
                self._doorbell.wait(_MAX_PAUSE)

    def look(self) -> tuple[float | None, bool]:
        """Drive what is left to the thread; return how long to sleep, and whether for what other processes do too.

        None is without a time-out, 0 not at all.
        """
        began = perf_counter()
        pending = [p for p in self._alive() if p.pending()]
        due = [p for p in pending if p.parked or p.large or p.threads_waiting or self._seen.get(id(p)) == p.polls]
        driven = [_drive(p) for p in due]
        completed = any(driven)
        self._seen = {id(p): p.polls for p in pending}
        large = any(p.large for p in pending)
        eager = large and not any(p.computing for p in pending)
        crowded = any(p.crowded for p in pending)
        rung = all(p.rung() and not p.threads_waiting for p in pending)
        now = perf_counter()
        if pending or completed:
            self._idle_since = now
        if completed or not due or (large and now - began > 10 * _MIN_PAUSE):
            self._busy_since = now
        left_to_us = any(p.parked or p.large for p in due)
        if completed and left_to_us:
            return 0.0, True  # there may be more at once
        vain = now - self._busy_since
        if eager and vain < _EAGER_SECONDS:
            if crowded:
                os.sched_yield()
            return 0.0, True
        computing = any(p.computing for p in self._alive())  # a tick takes the GIL from it
        if now - self._idle_since > (_COMPUTING_LINGER_SECONDS if computing else self.linger_seconds):
            return None, False
        return min(max(vain / 8, _MIN_PAUSE), _MAX_PAUSE) if driven and not rung else _TICK_SECONDS, left_to_us

    def pause(self, seconds: float | None, left_to_us: bool) -> None:
        """Sleep as `look` returned."""
        if seconds is None:
            self.asleep = True
            if self._nothing_pending():
                self._doorbell.wait(None, for_all=False)
            self.asleep = False
        elif seconds:
            # While the loop looks for itself, waking us would only take its core away.
            self._doorbell.wait(seconds, for_all=left_to_us)

    def _nothing_pending(self) -> bool:
        """Return whether nothing is; between the steps of an operation too, see [Note: no wake-up is lost]."""
        transport_lock.acquire()  # not `with`, which would wake us
        try:
            return not any(p.pending() for p in self._alive())
        finally:
            transport_lock.release()


def _drive(progress: Progress) -> bool:
    transport_lock.acquire()
    try:
        completed = progress.called() or progress.poll()
        if progress.pending():
            progress._held.add(progress)  # a loop that looked between two steps has let go of it
        else:
            progress.parked = False
            if not progress.armed or progress.loop.is_closed():
                progress.let_go()
    finally:
        transport_lock.release()
    return completed


_thread = ProgressThread()
sleep_at, leave_doorbell = _thread.sleep_at, _thread.leave


def progress_thread() -> ProgressThread:
    """Return the progress thread of the process."""
    return _thread


def _after_fork() -> None:
    """A forked child has no progress thread and may find the lock taken for ever; what is pending is its parent's."""
    _thread.__init__()  # type: ignore[misc]
    for progress in list(Progress._of_loop.values()):
        progress.forget()
    transport_lock.reinit()
    tracing.to = None  # the thread that writes is the parent's


os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _thread.end())
