"""Sources turn another library's pending objects into handles. `Done` is the callback at the end of a transfer."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from aiodist.handles.handle import Handle
from aiodist.handles.operation import Operation
from aiodist.handles.origin import Origin
from aiodist.handles.progress import Progress

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Done = Callable[[BaseException | None], None]
"""Callback at the end of a transfer, called once, with None or the error."""


def join(count: int, done: Done) -> Done:
    """Return a callback whose call number `count` calls `done` with the first error, or None.

    The calls must not overlap: one thread makes all calls, or the transport lock is held.
    """
    left = count
    first: BaseException | None = None

    def one_over(error: BaseException | None) -> None:
        nonlocal left, first
        left -= 1
        first = first or error
        if left == 0:
            done(first)

    return one_over


class Source(Protocol[T_co]):
    """A pending object of a library that needs polls. The backend of the library implements this protocol."""

    def poll(self) -> bool:
        """Return True if the object has finished, without blocking."""

    def result(self) -> T_co:
        """Return the result or raise the error. Called once, after `poll` returned True."""


class SourcePoller(Generic[T]):
    """Polls one source. A library that polls many requests in one call has a separate poller."""

    rings = False

    def __init__(self, progress: Progress, source: Source[T], operation: Operation[T]) -> None:
        self._progress = progress
        self._source = source
        self._operation = operation

    def __len__(self) -> int:
        return 0 if self._operation.handle.done() else 1

    def poll(self, until: float = 0.0) -> bool:
        """End the operation if the source has finished."""
        try:
            if not self._source.poll():
                return False
            value = self._source.result()
        except BaseException as error:  # noqa: BLE001  - the task that awaits the handle raises it
            self._settle(self._operation.reject, error)
        else:
            self._settle(self._operation.resolve, value)
        return True

    def _settle(self, settle: Callable[[Any], None], outcome: object) -> None:
        self._progress.remove_poller(self)
        if not self._operation.handle.done():
            settle(outcome)


def from_source(source: Source[T], op: str, *, origin: Origin | None = None) -> Handle[T]:
    """Return a handle that is done when `source.poll()` returns True."""
    progress = Progress.current()
    operation: Operation[T] = Operation(progress, op, origin=origin)
    operation.keep(source)
    progress.start(progress.add_poller, SourcePoller(progress, source, operation))
    return operation.handle


def from_future(future: concurrent.futures.Future[T], op: str = "future") -> Handle[T]:
    """Return a handle with the outcome of `future`. `cancel()` withdraws a future that has not begun.

    Make this call on the loop's thread. The future's own thread ends the operation, so `wait()` in a third thread needs
    no loop.
    """
    operation: Operation[T] = Operation(Progress.current(), op, origin=Origin.here(), polled=False)

    def settle(done: concurrent.futures.Future[T]) -> None:
        if done.cancelled():
            operation.cancel()
        elif (error := done.exception()) is not None:
            operation.reject(error)
        else:
            operation.resolve(done.result())

    operation.set_canceller(future.cancel)
    future.add_done_callback(settle)
    return operation.handle
