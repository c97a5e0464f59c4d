"""Waiters of a handle on its event loop, and the order of streams after it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, cast

from aiodist import _core
from aiodist.errors import OperationTimeout
from aiodist.handles.state import unfinished

Note = Callable[[Any], None]
current_deadline: ContextVar[Note | None] = ContextVar("aiodist_deadline", default=None)
"""The innermost `aiodist.timeout` around the running code: called with each handle whose await it cancels."""


class Fence(Protocol):
    """The place on a device at which an operation ends."""

    def order(self, stream: Any, handle: Any, /) -> None:  # noqa: ANN401
        """Order `stream`, None for the current one, after the operation of `handle`."""

    def look(self) -> bool:
        """Report the end and return True if the device has reached it; with the transport lock held."""


class Waiter(Protocol):
    """A waiter for a handle on the loop: a future, a gather, a scope."""

    def wake(self, handle: Any, late: OperationTimeout | None, /) -> None:  # noqa: ANN401
        """Take the news, on the loop: `handle` is done, or its deadline has passed if there is an error `late`."""


class FutureWaiter:
    """One suspended `await`: a future of its own, so that cancelling the await leaves the handle alone."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future

    def wake(self, handle: object, late: OperationTimeout | None, /) -> None:
        """See `Waiter`."""
        if self.future.done():
            return
        if late is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(late)


@contextmanager
def shown_to_asyncio(handle: _core.Handle) -> Iterator[None]:
    """Show asyncio's tools that the running task waits for the tasks that carry out `handle`."""
    carriers, waits = handle._progress.carriers, cast("asyncio.Task[Any]", asyncio.current_task())
    tasks = [carriers[part] for part in unfinished(handle) if part in carriers]
    if sys.version_info >= (3, 14):
        for task in tasks:
            asyncio.future_add_to_awaited_by(task, waits)
    try:
        yield
    finally:
        if sys.version_info >= (3, 14):
            for task in tasks:
                asyncio.future_discard_from_awaited_by(task, waits)
