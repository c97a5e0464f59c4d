"""Threads of aiodist: threads with a queue of jobs, threads without code of the program, and the waits of all threads.

docs/design.md lists the threads. A registry has the waits, so no thread must read the frames of another one.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import get_ident
from time import monotonic
from types import FrameType
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast
from weakref import WeakSet

T = TypeVar("T")
_LOOK_SECONDS = 0.5
"""Period in which an idle worker checks that its jobs are still needed."""


class OwnThread(threading.Thread):
    """A daemon thread that never runs code of the program. The check for stalled ranks ignores the thread.

    The thread affects the program only by ends of operations and by messages, which the check counts.
    """

    # debugpy stops all threads at a breakpoint except those with these flags. Other ranks need answers meanwhile.
    pydev_do_not_trace = True
    is_pydev_daemon_thread = True

    def __init__(self, name: str, run: Callable[..., object], *args: Any) -> None:  # noqa: ANN401
        super().__init__(name=name, target=run, args=args, daemon=True)


# --- waits ---------------------------------------------------------------------------------------------------


class _Wait(NamedTuple):
    """One thread's wait."""

    ready: Callable[[], object]
    """Function that returns a true value when the thread can continue."""
    limited: bool
    """True if the thread also continues after some time."""


_waits: Final[dict[int, _Wait]] = {}
"""Innermost wait of each waiting thread, by the thread's number."""
library_checks: Final[list[Callable[[int], bool]]] = []
"""Further functions that return True if the thread of a given number is idle. `aiodist.testing` adds a function."""


class Waiting:
    """A block in which the calling thread waits until `ready()` is true, or for a limited time if `limited`."""

    __slots__ = ("_before", "_me", "_now")

    def __init__(self, ready: Callable[[], object], *, limited: bool = False) -> None:
        self._now = _Wait(ready, limited)
        self._me = get_ident()

    def __enter__(self) -> None:
        self._before = _waits.get(self._me)
        _waits[self._me] = self._now

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del _waits[self._me]
        else:  # the outer wait continues after the inner one
            _waits[self._me] = self._before


def result_of(future: Future[T]) -> T:
    """Return the result of `future`, blocking this thread until the result is there."""
    with Waiting(future.done):
        return future.result()


def is_waiting(thread_id: int, *, limited: bool = False) -> bool:
    """Return True if a thread waits for another thread.

    True for `limited` also counts waits that end after some time.
    """
    wait = _waits.get(thread_id)
    if wait is None:
        return any(check(thread_id) for check in library_checks)
    return not wait.ready() and (limited or not wait.limited)


def current_frames() -> dict[int, FrameType]:
    """Return the running frame of each thread, without a garbage collection meanwhile.

    Before Python 3.12, `sys._current_frames` may collect garbage while it holds a lock of the interpreter. It then
    hangs if a finalizer, as that of a tensor, lets another thread run that needs this lock (python/cpython#106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


# --- queues --------------------------------------------------------------------------------------------------


class JobQueue(Generic[T]):
    """Jobs for one thread or several, in order.

    A thread leaves the table of waiting threads before it takes a job. So at each moment the job is in the queue, or
    its thread does not count as idle. The garbage collector may call `put`.
    """

    __slots__ = ("_jobs", "_tokens")

    def __init__(self) -> None:
        self._jobs: deque[T] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()
        """One token for each job. Threads wait for a token."""

    def put(self, job: T) -> None:
        """Add a job (any thread)."""
        self._jobs.append(job)
        self._tokens.put(None)

    def get(self, timeout: float | None = None) -> T:
        """Return the next job, blocking until there is one, or raise queue.Empty after `timeout` seconds.

        The thread counts as idle meanwhile, also with a `timeout`. So a caller may only use the timeout to check if
        more jobs can come.
        """
        with Waiting(self._jobs.__len__):
            self._tokens.get(timeout=timeout)
        return self._jobs.popleft()

    def get_nowait(self) -> T:
        """Return the next job, or raise queue.Empty if there is none."""
        self._tokens.get_nowait()
        return self._jobs.popleft()

    def empty(self) -> bool:
        """Return True if there is no job."""
        return not self._jobs


# --- workers -------------------------------------------------------------------------------------------------


class Worker(Generic[T]):
    """One daemon thread or several, which call `run(job)` for each submitted job, in order.

    | state | `refusal` | queued jobs | from |
    |---|---|---|---|
    | open | None | run | |
    | closed | "is closed" | run | open |
    | aborted | "was aborted" | dropped after the running calls | open, closed |
    | ended | unchanged | none | closed, aborted |
    | forked | "was opened by the process ..." | never run | all but ended, in a forked child |

    A worker aborts itself soon after `gone()`, such as `loop.is_closed`, returns True. At the exit of the interpreter,
    `end_workers` aborts each worker.

    A thread of the worker calls `drop(job)` for each job that an abort withdraws. The last call of the last thread is
    `finish()`, whose error becomes that of `ended`. `run` should not raise: errors belong to the code that waits for a
    job. If `run` or `drop` raises, `threading.excepthook` reports the error, and the next job runs.

    Any thread may call the methods, and the garbage collector may call `submit` and `abort`. So no method takes a lock:

    - `aborted` and `_over` change only to True, so no write is lost. `refusal` only explains why a call is refused.
    - A job that is submitted during the end is dropped: `submit` adds the job and then reads `_over`. The last thread
      sets `_over` and then empties the queue. So at least one of the two finds the job.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[T], object],
        *,
        drop: Callable[[T], object] | None = None,
        finish: Callable[[], object] | None = None,
        threads: int = 1,
        computing: set[int] | None = None,
        gone: Callable[[], bool] | None = None,
        exit_seconds: float = 5.0,
    ) -> None:
        """Start the threads. While a thread runs a job, its number is in `computing`.

        `exit_seconds` is the longest wait for the running calls at the exit of the interpreter.
        """
        self.name = name
        self.refusal: str | None = None
        """Reason to refuse jobs, or None."""
        self.ended: Future[None] = Future()
        """Done after the last call."""
        self.ended.set_running_or_notify_cancel()  # no waiter can cancel the end
        self.exit_seconds = exit_seconds
        self._queue: JobQueue[T | _End] = JobQueue()
        self._run = run
        self._drop = drop
        self._finish = finish
        self._computing: set[int] = set() if computing is None else computing
        self._gone = gone
        self.aborted = False
        self.forked = False
        """True in a forked child."""
        self._over = False
        """True after the last call of `run`."""
        self._left = list(range(threads))
        """One number for each thread that has not ended. The last thread to end takes 0."""
        names = [name] if threads == 1 else [f"{name}-{i}" for i in range(threads)]
        self.threads: Final = [threading.Thread(target=self._serve, name=each, daemon=True) for each in names]
        try:
            for thread in self.threads:
                thread.start()
        except RuntimeError:  # the system has no thread left
            self.abort()
            for thread in self.threads:
                if thread.ident is None:
                    self._leave()
            raise
        _workers.add(self)

    def submit(self, job: T) -> None:
        """Let a thread run `job` after the jobs submitted before. Raise `RuntimeError` if the worker is not open."""
        if self.refusal is not None:
            raise RuntimeError(f"{self.name} {self.refusal}")
        self._queue.put(job)
        if self._over:
            self._drop_queued()

    def close(self) -> None:
        """Let the threads run the queued jobs and end. Do not wait."""
        if self.refusal is None:
            self.refusal = "is closed"
            self._end_threads()

    def abort(self) -> None:
        """Let the threads end after the running calls, and drop the queued jobs. Do not wait."""
        if not self.aborted:
            self.aborted = True
            self.refusal = "was aborted"
            self._end_threads()

    def is_needed(self) -> bool:
        """Return False if the worker is aborted, or must abort now, so that no code waits for its jobs."""
        try:
            gone = self._gone is not None and self._gone()
        except BaseException as error:  # noqa: BLE001  - a thread that ended here would never end the worker
            _report(error)
            gone = True
        if gone:
            self.abort()
        return not self.aborted

    def join(self, seconds: float | None = None) -> bool:
        """Block until the threads have ended, for at most `seconds`. Return True if they have ended."""
        until = None if seconds is None else monotonic() + seconds
        for thread in self.threads:
            thread.join(None if until is None else max(0.0, until - monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def leave_to_parent(self) -> None:
        """Refuse jobs, and fail the waits for the end, in a forked child, which has no thread of the worker."""
        self.aborted = self.forked = True
        self.refusal = "was opened by the process that this one was forked from"
        self.ended = Future()  # another thread may hold the lock of the future at the fork
        self.ended.set_exception(RuntimeError(f"{self.name} {self.refusal}"))

    # --- the threads -----------------------------------------------------------------------------------------

    def _end_threads(self) -> None:
        for _ in self.threads:
            self._queue.put(_END)

    def _serve(self) -> None:
        me, computing, look = get_ident(), self._computing, None if self._gone is None else _LOOK_SECONDS
        while self.is_needed():
            try:
                job = self._queue.get(look)
            except Empty:
                continue
            if job is _END:
                break
            if self.aborted:
                self._drop_job(job)
                break
            computing.add(me)
            try:
                self._run(cast("T", job))
            except BaseException as error:  # noqa: BLE001  - the next jobs must run
                _report(error)
            computing.discard(me)
            del job  # the next job may come late, and this one may be the last reference to a tensor
        self._leave()

    def _leave(self) -> None:
        """End the worker if no other thread is left."""
        if self._left.pop() > 0:
            return
        self._over = True
        self._drop_queued()
        try:
            if self._finish is not None:
                self._finish()
        except BaseException as error:  # noqa: BLE001  - the error belongs to the code that waits for the end
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _drop_queued(self) -> None:
        with suppress(Empty):
            while True:
                self._drop_job(self._queue.get_nowait())

    def _drop_job(self, job: T | _End) -> None:
        if job is _END or self._drop is None:
            return
        try:
            self._drop(cast(T, job))
        except BaseException as error:  # noqa: BLE001  - the next jobs must be dropped
            _report(error)


class _End:
    """Type of the last job of each thread of a worker."""


_END: Final = _End()
_workers: Final[WeakSet[Worker[Any]]] = WeakSet()


def end_workers() -> None:
    """Abort the workers of this process, and wait for their running calls, since the interpreter ends.

    A thread inside torch's C++ that asks for the GIL of a finalized interpreter would abort the process.
    """
    workers = [worker for worker in list(_workers) if not worker.ended.done()]
    for worker in workers:
        worker.abort()
    began = monotonic()
    for worker in workers:
        worker.join(max(0.0, began + worker.exit_seconds - monotonic()))


def _report(error: BaseException) -> None:
    """Report an error as Python reports the error that ends a thread."""
    said = threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
    try:
        threading.excepthook(said)
    except BaseException:  # noqa: BLE001  - a broken hook must not end the thread
        threading.__excepthook__(said)


def _in_child() -> None:
    _waits.clear()
    for worker in list(_workers):
        if not worker.ended.done():
            worker.leave_to_parent()


os.register_at_fork(after_in_child=_in_child)
