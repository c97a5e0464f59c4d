"""`Posted` handles, whose operation pauses after the last wait and then leaves messages to other receives."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar

from aiodist.handles.handle import Handle
from aiodist.handles.operation import Operation
from aiodist.handles.state import HandleStatus, Waiter, error_of

if TYPE_CHECKING:
    from aiodist.errors import OperationTimeout

T = TypeVar("T")


class Stoppable(Protocol):
    """The owner of a `Posted` handle. The owner can pause the operation."""

    paused: bool
    """True while the operation is paused."""

    def hold(self, handle: Posted[Any] | None, /) -> None:
        """Keep `handle` alive, since code waits. None releases the handle."""

    def settled(self) -> None:
        """Release the handle, which is finished."""

    def pause(self, handle: Posted[Any], /) -> None:
        """Pause the operation if nothing is lost, since the last wait ended without the outcome (any thread)."""

    def resume(self, handle: Posted[Any], /) -> None:
        """Continue the operation, since code waits for the handle again (any thread)."""


class Onlooker:
    """A waiter of the runtime, which is no sign that code of the program waits."""

    __slots__ = ("waiter",)

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter

    def wake(self, handle: Handle[Any], late: OperationTimeout | None, /) -> None:
        """See `Waiter`. Ignores deadlines."""
        if handle._is_pending:
            handle._add_observer(self.waiter)
        else:
            self.waiter.wake(handle, None)


class Posted(Handle[T]):
    """A handle that its operation keeps alive only while code waits or a message has matched, see `Stoppable`.

    Code waits by an await, `wait()`, `gather`, a callback or `detach()`. After the last wait has ended without the
    outcome, the operation is paused. The next wait, or `done()`, resumes the operation.
    """

    __slots__ = ("_owner", "_threads")
    _owner: Stoppable
    _threads: int

    @property
    def _attended(self) -> bool:
        waiters = any(not isinstance(waiter, Onlooker) for waiter in tuple(self._waiters or ()))
        return waiters or bool(self._callbacks or self._detached or self._threads)

    # --- waiting, as in `Handle` ------------------------------------------------------------------------------

    def _suspended(self) -> Generator[Any, None, T]:
        self._attend()
        return (yield from super()._suspended())

    def _attend(self) -> None:
        if self._owner.paused:
            self._owner.resume(self)
        self._owner.hold(self)
        if not self._is_pending:  # after the hold, since another thread may settle the handle meanwhile
            self._owner.hold(None)

    def _leave(self) -> None:
        """Release the handle after the last wait, and pause the operation if that wait ended early."""
        if self._attended:
            return
        self._owner.hold(None)
        if self._given_up and (self._is_pending or not self._consumed):
            self._owner.pause(self)

    def _add_waiter(self, waiter: Waiter) -> None:
        self._attend()
        super()._add_waiter(waiter)

    def _add_observer(self, waiter: Waiter) -> None:
        self._append_waiter(Onlooker(waiter))

    def _remove_waiter(self, waiter: Waiter) -> None:
        super()._remove_waiter(waiter)
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
        if self._owner.paused:
            self._owner.resume(self)
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
        if not self._attended:
            self._owner.hold(None)
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

    def _settle(self, status: Any, value: Any) -> bool:  # noqa: ANN401
        settled = super()._settle(status, value)
        if settled:
            self._owner.settled()
        return settled

    def _dropped(self) -> None:
        if not (self._is_pending and self._given_up):  # no outcome is lost with a paused operation
            super()._dropped()


def own(handle: Posted[Any], owner: Stoppable, canceller: Callable[[], bool] | None = None) -> None:
    """Let `owner` pause and continue the operation. Called once, before `handle` is returned.

    `canceller` is as in `Operation.set_canceller`.
    """
    handle._owner, handle._canceller = owner, canceller
    handle._threads = 0
    handle._posted = True


class PostedOperation(Operation[T]):
    """The producer's side of a `Posted` handle."""

    __slots__ = ()
    handle: Posted[T]
    handle_type: ClassVar[type[Handle[Any]]] = Posted

    @property
    def attended(self) -> bool:
        """True while code waits for the handle."""
        return self.handle._attended

    @property
    def consumed(self) -> bool:
        """True if the outcome was retrieved or need not be retrieved."""
        return self.handle._consumed

    @property
    def succeeded(self) -> bool:
        """True if the operation has ended with a result."""
        return self.handle._status is HandleStatus.RETURNED

    @property
    def retrieved(self) -> bool:
        """True if code of the program has or awaits the outcome."""
        return self.handle._consumed or self.handle._attended

    def revoke(self) -> None:
        """Make an operation that has ended with a result pending again. No code has seen the result."""
        handle = self.handle
        handle._status, handle._value = HandleStatus.PENDING, None
        handle._source = handle._tag = None
        handle._consumed = False

    # --- waiters that retrieve the outcome only together with others -------------------------------------------

    def join(self, waiter: Waiter) -> None:
        """Add `waiter`, which retrieves the outcome only together with other outcomes, see `peek`."""
        self.handle._attend()
        self.handle._append_waiter(waiter)

    def leave_early(self, waiter: Waiter) -> None:
        """Remove `waiter`, which ended without the outcome."""
        self.handle._given_up = True
        if self.handle._is_pending:
            self.handle._consumed = False
        self.handle._remove_waiter(waiter)

    def set_consumed(self, consumed: bool = True) -> None:
        """Record if the outcome was retrieved or need not be retrieved."""
        self.handle._consumed = consumed

    def peek(self) -> BaseException | None:
        """Return the error of the finished operation, None for a result. The outcome does not count as retrieved."""
        consumed = self.handle._consumed
        error = error_of(self.handle)
        self.handle._consumed = consumed
        return error
