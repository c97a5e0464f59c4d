"""Sources turn another library's pending objects into handles; with the callback at the end of a transfer."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from aiodist.handles.handle import Handle
from aiodist.handles.origin import Origin
from aiodist.handles.progress import Progress

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Done = Callable[[BaseException | None], None]
"""Called once, when the transfer is over: with None, or with its error."""


def join(count: int, done: Done) -> Done:
    """Return a callback that calls `done` when it was called `count` times, with the first error.

    The calls must not overlap: they are made on one thread, or with the transport lock held.
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
    """One pending thing that has to be asked whether it is done; the owner of its library implements it."""

    def poll(self) -> bool:
        """Return True when it is over; never blocks."""

    def result(self) -> T_co:
        """Return its result or raise its error; called once, after `poll` returned True."""


class SourcePoller(Generic[T]):
    """Asks one source; what a library can ask in bulk has a poller of its own."""

    rings = False

    def __init__(self, progress: Progress, source: Source[T], handle: Handle[T]) -> None:
        self._progress = progress
        self._source = source
        self._handle = handle

    def __len__(self) -> int:
        return 0 if self._handle.done() else 1

    def poll(self, until: float = 0.0) -> bool:
        """Settle the handle when the source is over."""
        try:
            if not self._source.poll():
                return False
            value = self._source.result()
        except BaseException as error:  # noqa: BLE001  - it belongs to the task that awaits the handle
            self._settle(self._handle.reject, error)
        else:
            self._settle(self._handle.resolve, value)
        return True

    def _settle(self, settle: Callable[[Any], None], outcome: object) -> None:
        self._progress.remove_poller(self)
        if not self._handle.done():
            settle(outcome)


def from_source(source: Source[T], op: str, *, origin: Origin | None = None) -> Handle[T]:
    """Return a handle that is done when `source.poll()` says so."""
    progress = Progress.current()
    handle: Handle[T] = Handle(progress, op, origin=origin)
    handle.keep = source
    progress.start(lambda: progress.add_poller(SourcePoller(progress, source, handle)))
    return handle


def from_future(future: concurrent.futures.Future[T], op: str = "future") -> Handle[T]:
    """Return a handle with the outcome of `future`; `cancel()` withdraws it if it has not begun.

    Call it on the loop's thread. The future's own thread settles the handle, so `wait()` in a third
    thread needs no loop.
    """
    progress = Progress.current()
    handle: Handle[T] = Handle(progress, op, origin=Origin.here())
    handle.polled = False

    def settle(done: concurrent.futures.Future[T]) -> None:
        if done.cancelled():
            handle.set_cancelled()
        elif (error := done.exception()) is not None:
            handle.reject(error)
        else:
            handle.resolve(done.result())

    handle.set_canceller(future.cancel)
    future.add_done_callback(settle)
    return handle
