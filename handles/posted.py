"""`Posted` handles: an operation runs only while code waits for its handle; else it leaves messages to others."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from aiodist.handles.handle import Handle, Status, Waiter

if TYPE_CHECKING:
    from aiodist.errors import OperationTimeout

T = TypeVar("T")


class Stoppable(Protocol):
    """The operation of a `Posted` handle."""

    paused: bool
    """True while it is stopped."""

    def hold(self, handle: Posted[Any] | None, /) -> None:
        """Keep the handle alive, since code waits for it; None releases it to the program."""

    def settled(self) -> None:
        """Release the handle, which is finished."""

    def pause(self, handle: Posted[Any], /) -> None:
        """Stop it if that loses nothing, since the last wait ended without the outcome; from any thread."""

    def resume(self, handle: Posted[Any], /) -> None:
        """Continue it, since code waits for it again; from any thread."""


class Onlooker:
    """A waiter on behalf of the runtime: it is no sign that code of the program waits."""

    __slots__ = ("waiter",)

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter

    def wake(self, handle: Handle[Any], late: OperationTimeout | None, /) -> None:
        """See `Waiter`; a deadline that passes is none of its business."""
        if handle.is_pending:
            handle.add_observer(self.waiter)
        else:
            self.waiter.wake(handle, None)


class Posted(Handle[T]):
    """A handle that its operation keeps only while code waits for it, see `Stoppable`.

    An await, a `wait()`, a member of a `gather`, a callback or `detach()` is such code. When the last wait ended
    without the outcome the operation is paused; the next wait, or `done()`, resumes it.
    """

    __slots__ = ("_operation", "_threads")

    def belong(self, operation: Stoppable) -> None:
        """Make it the handle of `operation`."""
        self._operation = operation
        self._threads = 0
        self._posted = True

    @property
    def attended(self) -> bool:
        """Whether code waits for it."""
        waiters = any(not isinstance(waiter, Onlooker) for waiter in tuple(self._waiters or ()))
        return waiters or bool(self._callbacks or self._detached or self._threads)

    @property
    def is_good(self) -> bool:
        """Whether it returned a result."""
        return self._status is Status.RETURNED

    @property
    def retrieved(self) -> bool:
        """Whether code of the program may know its outcome."""
        return self._consumed or self.attended

    def revoke(self) -> None:
        """Return from RETURNED to PENDING; no code has seen the result."""
        self._status, self._value = Status.PENDING, None
        self.source = self.tag = None
        self._consumed = False

    # --- waiting: as of `Handle` ------------------------------------------------------------------------------

    def _suspend(self) -> Generator[Any, None, None]:
        self._attend()
        yield from super()._suspend()

    def _attend(self) -> None:
        if self._operation.paused:
            self._operation.resume(self)
        self._operation.hold(self if self.is_pending else None)

    def _leave(self) -> None:
        """Release the handle after the last wait; pause the operation if that wait ended early."""
        if self.attended:
            return
        self._operation.hold(None)
        if self._given_up and (self.is_pending or not self._consumed):
            self._operation.pause(self)

    def leave_early(self, waiter: Waiter) -> None:
        """Forget `waiter`, which ended without the outcome."""
        self._given_up = True
        if self.is_pending:
            self._consumed = False
        self.remove_waiter(waiter)

    def join(self, waiter: Waiter) -> None:
        """Add a waiter that retrieves the outcome only together with others, see `peek`."""
        self._attend()
        self._add_waiter(waiter)

    def consume(self, retrieved: bool = True) -> None:
        """Know whether its outcome is retrieved, or need not be."""
        self._consumed = retrieved

    def peek(self) -> BaseException | None:
        """Return what `outcome_error` does, and retrieve nothing."""
        consumed = self._consumed
        error = self.outcome_error()
        self._consumed = consumed
        return error

    def add_waiter(self, waiter: Waiter) -> None:
        """See `Handle`."""
        self._attend()
        super().add_waiter(waiter)

    def add_observer(self, waiter: Waiter) -> None:
        """See `Handle`."""
        self._add_waiter(Onlooker(waiter))

    def remove_waiter(self, waiter: Waiter) -> None:
        """See `Handle`."""
        super().remove_waiter(waiter)
        self._leave()

    def wait(self, timeout: float | None = None) -> T:
        """See `Handle`."""
        self._threads += 1
        try:
            self._attend()
            return super().wait(timeout)
        finally:
            self._threads -= 1
            self._leave()

    def done(self) -> bool:
        """See `Handle`."""
        if self._operation.paused:
            self._operation.resume(self)
        if not super().done():
            return False
        self._given_up = False  # the program has seen the outcome
        return True

    def add_done_callback(self, fn: Callable[[Handle[T]], object], *, context: Context | None = None) -> None:
        """See `Handle`."""
        super().add_done_callback(fn, context=context)
        self._attend()

    def remove_done_callback(self, fn: Callable[[Handle[T]], object]) -> int:
        """See `Handle`."""
        removed = super().remove_done_callback(fn)
        if not self.attended:
            self._operation.hold(None)
        return removed

    def wait_stream(self, stream: Any = None) -> None:  # noqa: ANN401
        """See `Handle`."""
        self._attend()
        super().wait_stream(stream)
        self._detached = True  # the stream waits, also after the handle is dropped

    def detach(self) -> Self:
        """See `Handle`."""
        super().detach()
        self._attend()
        return self

    def _settle(self, status: Any, value: Any) -> None:  # noqa: ANN401
        super()._settle(status, value)
        self._operation.settled()

    def _dropped(self) -> None:
        if not (self.is_pending and self._given_up):  # it was withdrawn
            super()._dropped()
