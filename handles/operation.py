"""Defines `Operation`, the producer's side of a handle, which alone can settle the handle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from aiodist.handles.handle import Handle, finish
from aiodist.handles.internals import reject_pending
from aiodist.handles.state import HandleFence, HandleStatus
from aiodist.handles.tracing import Ended, rank_of_task, tracing
from aiodist.pauses import deadline_clock
from aiodist.types import check_timeout

if TYPE_CHECKING:
    from types import CodeType

    from aiodist.handles.account import Account
    from aiodist.handles.progress import Progress

T = TypeVar("T")


class Operation(Generic[T]):
    """The producer's side of a `Handle`. The owner of an operation keeps this object, and returns `handle` to the user.

    `resolve`, `reject` or `cancel` ends the operation, once. Any thread may call these methods, one thread at a time.

    Attributes:
        handle: the user's side.
    """

    __slots__ = ("handle",)

    handle_type: ClassVar[type[Handle[Any]]] = Handle
    """Class of the created handles."""

    def __init__(
        self,
        progress: Progress,
        op: str,
        seq: int = 0,
        nbytes: int = 0,
        origin: tuple[CodeType, int] | None = None,
        account: Account | None = None,
        *,
        polled: bool = True,
    ) -> None:
        """If `polled` is False, an await does not poll transports, since a task or a thread ends the operation."""
        self.handle: Handle[T] = self.handle_type(progress, op, seq, nbytes, origin, account)
        self.handle._polled = polled

    @classmethod
    def of(cls, handle: Handle[T]) -> Self:
        """Return the producer's side of `handle`, such as one that the compiled core made."""
        operation = cls.__new__(cls)
        operation.handle = handle
        return operation

    def __str__(self) -> str:
        return str(self.handle)

    @property
    def is_pending(self) -> bool:
        """True until the operation has ended. Unlike `Handle.done`, a read is no sign that the program waits."""
        return self.handle._is_pending

    # --- the end ---------------------------------------------------------------------------------------------

    def resolve(self, value: T) -> None:
        """End the operation with the result `value`. Raise `InvalidStateError` if the operation has ended already."""
        if not self.handle._settle(HandleStatus.RETURNED, value):
            raise self._ended()

    def reject(self, error: BaseException) -> None:
        """End the operation with `error`. Raise `InvalidStateError` if the operation has ended already."""
        if not reject_pending(self.handle, error):
            raise self._ended()

    def cancel(self) -> None:
        """End the operation as withdrawn before its start.

        Raise `InvalidStateError` if the operation has ended already.
        """
        if not self.handle._settle(HandleStatus.CANCELLED, None):
            raise self._ended()

    def _ended(self) -> asyncio.InvalidStateError:
        return asyncio.InvalidStateError(f"{self} is done already")

    def finish_with(self, call: Callable[[], object]) -> None:
        """Let the loop's thread or a waiting thread end the operation by `call` (any thread may call this method)."""
        handle = self.handle
        handle._finisher = call
        handle._progress.post(finish, handle)
        if handle._event is not None:
            handle._event.set()

    def finish(self) -> None:
        """Make the call of `finish_with` now, unless a thread has made that call."""
        finish(self.handle)

    def set_canceller(self, canceller: Callable[[], bool]) -> None:
        """Let `Handle.cancel` call `canceller`, which withdraws the operation and returns True, or returns False."""
        self.handle._canceller = canceller

    # --- deadlines -------------------------------------------------------------------------------------------

    def set_deadline(self, seconds: float, late: Callable[[], dict[int, str]] | None = None) -> None:
        """Raise `OperationTimeout` in all waits `seconds` from now, or else in the next wait.

        `late` is as in `set_late`.
        """
        check_timeout(seconds)
        seconds = float(seconds)  # a number of numpy may have fewer digits than the sum needs
        handle = self.handle
        handle._expires = deadline_clock.now() + seconds
        if late is not None:
            handle._late = late
        handle._progress.on_loop(handle._progress.timers.add, handle, handle._expires, seconds)

    def set_late(self, late: Callable[[], dict[int, str]]) -> None:
        """Let `late` return the ranks for which the operation waits, each with its place in the program."""
        self.handle._late = late

    def expire(self) -> None:
        """Let the deadline pass now. All waits raise `OperationTimeout`, or the next wait if no code waits now."""
        self.handle._expires = 0.0
        self.handle._tell_late()

    # --- facts for the user and for reports ------------------------------------------------------------------

    def keep(self, *objects: object) -> None:
        """Keep `objects` alive until the operation has ended. Release the objects of an earlier call."""
        self.handle._keep = objects

    def set_fence(self, fence: HandleFence) -> None:
        """Let `fence` order streams of a device after the operation."""
        self.handle._fence = fence

    def set_parts(self, parts: Iterable[Handle[Any]]) -> None:
        """Let reports name the handles `parts` in place of this operation, unless `parts` is empty."""
        self.handle._parts = tuple(parts) or None

    def set_name(self, name: str) -> None:
        """Set the name of the operation in messages. The default is its `op`."""
        self.handle._name = name

    def set_op(self, op: str) -> None:
        """Change the name of the call that issued the operation."""
        self.handle._op = op

    def set_message(self, source: int, tag: int, nbytes: int) -> None:
        """Record source, tag and size of the received message."""
        handle = self.handle
        handle._source, handle._tag, handle._nbytes = source, tag, nbytes

    def set_version(self, version: int | None) -> None:
        """Record the version that was read from a parameter server."""
        self.handle._version = version

    def mark_retrieved(self) -> None:
        """Report nothing when the handle is dropped, as if the outcome had been retrieved."""
        self.handle._consumed = True

    # --- traces ----------------------------------------------------------------------------------------------

    def observe(self, observer: Ended) -> None:
        """Call `observer(handle)` in the thread that ends the operation, if a trace is recorded then."""
        self.handle._observer = observer

    def follow(self, track: str) -> None:
        """Show the time from now to the end of the operation in a trace, on `track`."""
        if tracing.to is not None:
            self.observe(partial(_trace, perf_counter(), track, rank_of_task.get()))


def _trace(began: float, track: str, rank: int | None, handle: Handle[Any]) -> None:
    if (trace := tracing.to) is not None:
        trace.span(handle.op, began, track=track, of_rank=rank, bytes=handle.nbytes)
