"""Defines `Handle`, which every call of aiodist returns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import nullcontext
from contextvars import Context, copy_context
from dataclasses import dataclass
from math import inf
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from aiodist import _core
from aiodist.errors import OperationTimeout
from aiodist.handles.account import Account
from aiodist.handles.origin import Origin, described
from aiodist.handles.state import (
    RETURNED,
    HandleStatus,
    Waiter,
    add_wait,
    current_deadline,
    error_of,
    expired,
    lateness,
    plight,
    shown_to_asyncio,
    waits_of,
)
from aiodist.handles.tracing import tracing
from aiodist.pauses import deadline_clock
from aiodist.threads import Waiting
from aiodist.types import check_timeout

T = TypeVar("T")
_SLEEP_SECONDS = 1.0  # longest sleep of a thread that waits for a lane, since the operation may be aborted
_LOOK_SECONDS = 0.5  # time in which a waiting thread notices that its wait is pointless, see `_block_unless`
_NOT_SHOWN = nullcontext()
_event_lock = threading.Lock()
_PENDING = HandleStatus.PENDING


@dataclass(eq=False, slots=True)
class FutureWaiter:
    """One suspended `await` with a separate future, so that a cancellation leaves the handle pending."""

    future: asyncio.Future[None]

    def wake(self, handle: object, late: OperationTimeout | None, /) -> None:
        """See `Waiter`."""
        if self.future.done():
            return
        if late is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(late)


class Handle(_core.Handle, Generic[T]):
    """An issued operation, awaited for its result.

    Any number of tasks may await a handle, also after its operation is done. Cancelling an await does not stop the
    operation. Its buffers stay in use until the end, and awaiting the handle again returns the result.

    A pending operation returns, raises or is withdrawn, exactly once.

    ```python
    handle = coll.allreduce(torch.ones(4))  # starts here
    handle.done()  # True or False
    total = await handle
    ```

    Attributes:
        op: name of the call, such as "allreduce".
        seq: number on its communicator or stream, from 0, or for a named operation the count of earlier uses of the
            name.
        nbytes: bytes of this rank's part, or on a receive the bytes that arrived.
        source: on a finished receive, the rank that sent, else None.
        tag: on a finished receive, the tag of the message, else None.
        version: on a finished read of a parameter server, the version read, else None.
    """

    __slots__ = ()

    # --- waiting on the loop -----------------------------------------------------------------------------

    if TYPE_CHECKING:  # compiled: polls for a while, then returns one of the generators below if the await must suspend

        def __await__(self) -> Generator[Any, None, T]: ...

        def done(self) -> bool:
            """Return True if the operation has returned, raised or been withdrawn (any thread).

            Reports of late ranks cover a receive that the program polls with this method, unless the handle is
            detached.
            """

    def _suspended(self) -> Generator[Any, None, T]:
        """Suspend the task until the handle is done, or raise OperationTimeout once its deadline has passed."""
        progress = self._progress
        loop = progress.loop
        if asyncio.get_running_loop() is not loop:
            raise RuntimeError(f"{self} belongs to another event loop: await it there, or use wait() in a thread")
        if self._expires is not None and (late := expired(self)) is not None:
            self._given_up = True
            self._leave()
            raise late
        began = 0.0 if tracing.to is None else perf_counter()
        hurries = self._in_lane
        waiter = FutureWaiter(loop.create_future())
        self._append_waiter(waiter)
        if hurries:  # the operation ends outside Python, and its end needs the GIL soon
            progress.hurry(1)
        try:
            with shown_to_asyncio(self) if progress.carriers else _NOT_SHOWN:
                yield from waiter.future
            progress.keep_hurrying(self.nbytes if hurries else 0)
        except GeneratorExit:  # perhaps from the garbage collector, in the middle of other code
            self._given_up = True
            progress.post(self._remove_waiter, waiter)
            raise
        except BaseException as error:  # an await that ends without the outcome retrieves nothing
            self._given_up = True
            if isinstance(error, asyncio.CancelledError):
                error.add_note(f"while awaiting {self}, which continues{plight([self])[0]}")
                if (note := current_deadline.get()) is not None:
                    note(self)
            self._remove_waiter(waiter)
            raise
        finally:
            if hurries:
                progress.hurry(-1)
            if began:
                _trace_wait(self, began, "waits")
        self._consumed = True
        return self._outcome()

    def _suspended_counted(self) -> Generator[Any, None, T]:
        """As `_suspended`, with the wait counted for metrics."""
        waits, began = waits_of(self), perf_counter()
        try:
            return (yield from self._suspended())
        finally:
            add_wait(waits, began)

    def _yielding(self) -> Generator[Any, None, T]:
        """Let the loop run once, since awaits that never suspend would starve the loop."""
        self._progress.last_ran = perf_counter()
        try:
            yield
        except GeneratorExit:  # see `_suspended`
            self._given_up = True
            self._progress.post(self._leave)
            raise
        except BaseException:
            self._given_up = True
            self._leave()
            raise
        self._consumed = True
        return self._outcome()

    def _leave(self) -> None:
        """Hook for subclasses, called when an await ends without the outcome."""

    def _add_waiter(self, waiter: Waiter) -> None:
        """Call `waiter.wake` on the loop when this handle is done or late (loop's thread)."""
        self._consumed = True
        self._append_waiter(waiter)

    def _add_observer(self, waiter: Waiter) -> None:
        """As `_add_waiter`, but the waiter does not count as a retrieval of the outcome."""
        self._append_waiter(waiter)

    def _append_waiter(self, waiter: Waiter) -> None:
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        # Another thread sets the status and then reads the waiters. This thread appends and then reads the status, so
        # at least one of the two threads sees the write of the other.
        if self._status is not _PENDING:
            self._progress.post(self._notify)
        elif self._expires is not None and self._expires <= deadline_clock.now():
            self._progress.post(self._tell_late)

    def _remove_waiter(self, waiter: Waiter) -> None:
        if self._waiters and waiter in self._waiters:
            self._waiters.remove(waiter)

    # --- asking ------------------------------------------------------------------------------------------

    def cancelled(self) -> bool:
        """Return True if `cancel()` has withdrawn the operation."""
        return self._status is HandleStatus.CANCELLED

    def result(self) -> T:
        """Return the result of a finished operation.

        Returns:
            The value that `await` returns.

        Raises:
            InvalidStateError: while the operation is pending.
            CancelledError: if `cancel()` has withdrawn the operation.
            Exception: the error of the operation.

        Example:
            ```python
            handle = coll.allreduce(torch.ones(4))
            while not handle.done():
                await asyncio.sleep(0.001)  # other work
            total = handle.result()
            ```
        """
        if self._is_pending:
            raise asyncio.InvalidStateError(f"{self} is not done: await it")
        self._consumed = True
        return self._outcome()

    def exception(self) -> BaseException | None:
        """Return the error of a finished operation, or None, or raise `InvalidStateError` for a pending one."""
        if self._is_pending:
            raise asyncio.InvalidStateError(f"{self} is not done: await it")
        self._consumed = True
        if self._status is HandleStatus.CANCELLED:
            raise asyncio.CancelledError(f"{self} was withdrawn")
        return error_of(self)

    def _outcome(self) -> T:
        if self._status is RETURNED:
            return self._value  # type: ignore[no-any-return]
        if self._status is HandleStatus.CANCELLED:
            raise asyncio.CancelledError(f"{self} was withdrawn")
        # Each raise starts from the original traceback, which would otherwise grow with every awaiter.
        raise self._value.with_traceback(self._traceback)

    def wait(self, timeout: float | None = None) -> T:
        """Block this thread until the operation is done. Return its result.

        For any thread except the one of the event loop. The loop may be blocked meanwhile, except for handles that the
        loop itself ends: those of `gather`, of a list of receives, and of a new communicator.

        Args:
            timeout: longest wait in seconds, or None. The operation's own timeout ends the wait too.

        Returns:
            The result of the operation.

        Raises:
            RuntimeError: on the event loop's thread, which would be blocked, and in a forked child.
            OperationTimeout: after either timeout. The operation continues, so another wait is possible. Exception: the
            error of the operation.

        Example:
            ```python
            handle = coll.allreduce(torch.ones(4))
            total = await asyncio.to_thread(handle.wait, 10.0)  # in a thread
            ```
        """
        if self._progress.owns_thread():
            self._consumed = True  # the error below is report enough
            raise RuntimeError(f"wait() would block the event loop: await {self} instead")
        if not self._look():
            self._progress.check_not_forked(self)
            try:
                _block(self, timeout)
            except BaseException:  # the wait ended without the outcome, like a cancelled await
                self._given_up = True
                raise
        self._consumed = True
        return self._outcome()

    def _block_for(self, timeout: float | None = None, *, looks: bool = True) -> bool:
        """Block this thread until the handle is done, for at most `timeout` seconds. Return True if the handle is done.

        Unlike `wait`, the call raises no error of the operation, and retrieves no outcome. For an operation in a lane,
        `looks` lets the thread poll for a moment before each sleep.
        """
        until = None if timeout is None else deadline_clock.now() + timeout
        with Waiting(self._offers_work, limited=until is not None):
            return self._block_until(until, looks)

    def _block_unless(self, gone: Callable[[], bool]) -> bool:
        """Block as `_block_for` does. Return False soon after `gone()` returns True.

        The calling thread counts as waiting without limit, or until the deadline of the operation.
        """
        with Waiting(self._offers_work, limited=self._expires is not None):
            while not self._block_until(monotonic() + _LOOK_SECONDS, True, monotonic):
                if gone():
                    return False
        return True

    def _offers_work(self) -> bool:
        """Return True if a blocked thread can continue, since the handle is done or its finisher waits for a thread."""
        return (
            self._status is not _PENDING
            or self._finisher is not None
            or (self._event is not None and self._event.is_set())
        )

    def _block_until(self, until: float | None, looks: bool, now: Callable[[], float] = deadline_clock.now) -> bool:
        """Block until the handle is done, or until that time of the clock `now`."""
        if not self._progress.counts_waits:
            return self._sleep_until(until, looks, now)
        waits, began = waits_of(self), perf_counter()
        try:
            return self._sleep_until(until, looks, now)
        finally:
            add_wait(waits, began)

    def _sleep_until(self, until: float | None, looks: bool, now: Callable[[], float]) -> bool:
        while self._in_lane:  # this thread polls the lane, since no other thread may be running
            nap = _SLEEP_SECONDS if until is None else min(until - now(), _SLEEP_SECONDS)
            if nap <= 0:
                return not self._is_pending
            if self._sleep(nap) if looks else self._rest(nap):
                return True
        with _event_lock:  # two threads must not each create an event
            if self._event is None:
                self._event = threading.Event()
        event = self._event  # set when the handle is done, and when a thread can run its finisher
        while self._status is _PENDING:
            if self._finisher is not None:
                event.set()  # this thread counts as running, see `_offers_work`
            finish(self)
            left = None if until is None else until - now()
            if self._status is _PENDING and left is not None and left <= 0:
                return False
            event.wait(None if left is None else deadline_clock.pause_until(left))
            event.clear()
        event.set()  # for other threads that wait for the event
        return True

    def wait_stream(self, stream: Any = None) -> None:  # noqa: ANN401
        """Order `stream` after this operation and return immediately. The host does not wait.

        `stream` is a `HostStream`, a `CudaStream` or a `torch.cuda.Stream`, or None for the current CUDA stream. The
        stream continues after a failed operation too. Only awaiting the handle raises the error. Raises `RuntimeError`
        if a pending operation has no place on a device, unless `stream` is a `HostStream`. Raises too, on the loop's
        thread, for an operation that the host has not begun completely. Cost: 2 us.
        """
        fence = self._fence
        if fence is not None:
            fence.order(stream, self)
        elif hasattr(stream, "wait_handle"):
            stream.wait_handle(self)
        elif self._status is _PENDING:
            named = "the current CUDA stream" if stream is None else stream
            raise RuntimeError(f"{self} has no CUDA stream to order {named} behind: await it, or name a HostStream")
        self._consumed = True

    # --- callbacks and cancelling ------------------------------------------------------------------------

    def add_done_callback(self, fn: Callable[[Handle[T]], object], *, context: Context | None = None) -> None:
        """Call `fn(handle)` on the loop when the handle is done, soon if done already (loop's thread)."""
        _check_thread(self, "add_done_callback()")
        self._consumed = True
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append((fn, context or copy_context()))
        if self._status is not _PENDING:
            self._progress.post(self._notify)

    def remove_done_callback(self, fn: Callable[[Handle[T]], object]) -> int:
        """Remove the callbacks equal to `fn` that have not run. Return their number."""
        kept = [entry for entry in self._callbacks or () if entry[0] != fn]
        removed = len(self._callbacks or ()) - len(kept)
        self._callbacks = kept or None
        return removed

    def cancel(self, msg: object = None) -> bool:
        """Withdraw the operation if that loses nothing, such as a receive without a message (loop's thread).

        Cancelling the task that awaits a handle does not withdraw the operation, which continues.

        Args:
            msg: ignored, for the signature of asyncio's futures.

        Returns:
            True if the operation was withdrawn and so never happened. An await of the handle then raises
            `CancelledError`. False if the operation continues.

        Raises:
            RuntimeError: on another thread.

        Example:
            ```python
            receiving = coll.recv()
            if not receiving.done():
                assert receiving.cancel()
            ```
        """
        _check_thread(self, "cancel()")
        if self._status is not _PENDING or self._canceller is None or not self._canceller():
            return False
        self._consumed = True
        return True

    def detach(self) -> Self:
        """Mark the operation as one that the program need not await. Return the handle.

        Dropping the handle then gives no warning, and no report calls the operation late. An example is a receive that
        a service keeps posted: `request = await coll.recv_object().detach()`. An error that was never retrieved is
        still reported.
        """
        self._consumed = True
        self._detached = True
        return self

    # --- settling: for `Operation` ----------------------------------------------------------------------------

    def _settle(self, status: HandleStatus, value: Any) -> bool:  # noqa: ANN401
        """End the operation. Return False, without a change, if the operation has ended already.

        One of several threads ends the operation. CPython switches threads at calls and backward jumps only, so no
        other thread runs between the check and the new status. The compiled core checks and sets the status with the
        GIL held.
        """
        if self._status is not _PENDING:
            return False
        self._value = value
        self._status = status
        self._keep = self._fence = self._parts = self._canceller = self._late = self._finisher = None
        if tracing.to is not None and self._observer is not None:
            observer, self._observer = self._observer, None
            observer(self)
        if self._waiters or self._callbacks or self._event is not None:
            self._told()
        return True

    def _told(self) -> None:
        if self._event is not None:
            self._event.set()
        if self._waiters or self._callbacks:
            if threading.get_ident() == self._progress.thread_id:
                self._notify()
            else:
                self._progress.post(self._notify)

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            waiter.wake(self, None)
        callbacks, self._callbacks = self._callbacks, None
        for fn, context in callbacks or ():
            self._progress.loop.call_soon(fn, self, context=context)

    # --- deadlines -----------------------------------------------------------------------------------------

    def _tell_late(self) -> None:
        """Wake the waiters, since the deadline has passed. Without waiters, the next wait raises (see `expired`)."""
        if self._status is not _PENDING or not self._waiters:
            return
        self._expires = None
        waiters, self._waiters = self._waiters, None
        for waiter in waiters:
            waiter.wake(self, lateness(self))

    # --- being dropped ---------------------------------------------------------------------------------------

    @property
    def origin(self) -> Origin | None:
        """Line that issued the operation, or None if unknown."""
        return None if self._origin is None else Origin(*self._origin)

    def _dropped(self) -> None:
        """Report an outcome that no code retrieved, as the finalizer of a finished or posted handle."""
        error = self._value if self._status is HandleStatus.RAISED else None
        account = self._account or Account(self._progress.loop, prompt=True)
        in_place = self._writes and not isinstance(self._value, (int, float))
        if error is None and self._given_up and (self._value is None or in_place):
            return  # no result is lost
        account.dropped(self._name or self.op, self.seq, self._origin, error, given_up=self._given_up)

    def __repr__(self) -> str:
        return f"<Handle {self} {self._status.value}>"

    def __str__(self) -> str:
        return described(self._name or self.op, self.seq, self.origin)


def _block(handle: Handle[Any], timeout: float | None) -> None:
    """Block this thread until the handle is done. Raise `OperationTimeout` after `timeout`, or at the deadline."""
    left = None if handle._expires is None else max(0.0, handle._expires - deadline_clock.now())
    if (given := check_timeout(timeout, least=-inf)) is not None:
        left = given if left is None else min(left, given)
    polled = not handle._in_lane
    began = 0.0 if tracing.to is None else perf_counter()
    handle._progress.thread_waits(1, polled=polled)
    try:
        done = handle._block_for(left)
    finally:
        handle._progress.thread_waits(-1, polled=polled)
        if began:
            _trace_wait(handle, began)
    if not done:
        raise expired(handle) or lateness(handle, timeout)


def finish(handle: Handle[Any]) -> None:
    """Make the call of `Operation.finish_with`, unless a thread has made that call."""
    with _event_lock:  # one thread makes the call
        call, handle._finisher = handle._finisher, None
    if call is not None:
        call()


def _trace_wait(handle: Handle[Any], began: float, track: str = "") -> None:
    if (trace := tracing.to) is not None:
        trace.span(f"wait for {handle._name or handle.op}", began, track=track, seq=handle.seq)


def _check_thread(handle: Handle[Any], call: str) -> None:
    if not handle._progress.owns_thread():
        seen = threading.current_thread().name
        raise RuntimeError(f"{call} of {handle} in thread {seen!r}: call it on the thread of its event loop")
