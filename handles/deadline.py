"""`aiodist.timeout` sets a deadline for a block. The error names the pending operations."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextvars import Token
from math import inf
from types import TracebackType
from typing import Any, Protocol, Self
from weakref import WeakSet

from aiodist.errors import OperationTimeout
from aiodist.handles.handle import Handle
from aiodist.handles.origin import listed
from aiodist.handles.progress import Progress
from aiodist.handles.state import Note, current_deadline, plight, unfinished
from aiodist.pauses import deadline_clock
from aiodist.types import check_timeout

SHORT_SECONDS = 0.6
"""Shortest timeout of a block, in seconds, that a watchdog with ten checks a second notices in time."""


class Watcher(Protocol):
    """A watchdog, which asks late ranks for their current lines."""

    def hurry(self) -> None:
        """Ask now, since the wait for a pending operation ends soon."""


class Scopes:
    """The open blocks of `aiodist.timeout` on one loop.

    Watchdogs read the ends of the blocks, to ask late ranks in time.
    """

    def __init__(self) -> None:
        self.ends: dict[Deadline, tuple[float, float]] = {}
        """Begin and end of each block, by `loop_time`."""
        self.watchers: WeakSet[Watcher] = WeakSet()

    @classmethod
    def of(cls, progress: Progress) -> Scopes:
        """Return the open blocks of the loop that `progress` drives."""
        return progress.own(cls, cls)

    def hurry(self) -> None:
        """Let all watchdogs ask now."""
        for watcher in list(self.watchers):
            watcher.hurry()


def loop_time(loop: asyncio.AbstractEventLoop) -> float:
    """Return the loop's time without pauses, in seconds: the time of deadlines and reports (any thread)."""
    return loop.time() - deadline_clock.paused()


async def wait_within(futures: Collection[asyncio.Future[Any]], seconds: float) -> None:
    """Wait until all `futures` are done, but at most `seconds`, without pauses."""
    loop = asyncio.get_running_loop()
    left, ends = seconds, loop_time(loop) + seconds
    while True:
        await asyncio.wait(futures, timeout=deadline_clock.pause_until(left))
        left = ends - loop_time(loop)
        if left <= 0 or all(future.done() for future in futures):
            return


class Deadline:
    """`asyncio.timeout` whose error names the operations pending inside and the late ranks."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = check_timeout(seconds, least=-inf)  # a negative number ends the block immediately
        self._timeout = asyncio.timeout(None)
        self._ends = inf
        self._timer: asyncio.TimerHandle | None = None
        self._token: Token[Note | None] | None = None
        self._outer: Note | None = None
        self._seen: list[Handle[Any]] = []
        self._scopes: Scopes | None = None
        self._halfway: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._outer = current_deadline.get()
        self._token = current_deadline.set(self._note)
        if self._seconds is not None:
            self._announce(self._seconds)
        return self

    def _announce(self, seconds: float) -> None:
        scopes = self._scopes = Scopes.of(Progress.current())
        loop = asyncio.get_running_loop()
        now = loop_time(loop)
        self._ends = now + seconds
        scopes.ends[self] = (now, self._ends)
        if seconds > 0:
            self._timer = loop.call_later(seconds, self._check)
        else:
            self._check()
        if seconds < SHORT_SECONDS and scopes.watchers:
            self._halfway = loop.call_later(seconds / 2, scopes.hurry)

    def _check(self) -> None:
        """End the block if its time has passed, or check again then."""
        loop = asyncio.get_running_loop()
        left = self._ends - loop_time(loop)
        if left > 0:
            self._timer = loop.call_later(deadline_clock.pause_until(left), self._check)
        else:
            self._timeout.reschedule(loop.time())

    def _note(self, handle: Handle[Any]) -> None:
        self._seen.append(handle)
        if self._outer is not None:
            self._outer(handle)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            current_deadline.reset(self._token)
        if self._scopes is not None:
            self._scopes.ends.pop(self, None)
        for timer in (self._halfway, self._timer):
            if timer is not None:
                timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as caught:
            raise self._error() from caught

    def _error(self) -> OperationTimeout:
        # An await inside may have been cancelled long ago, with its operation finished.
        waited_for = list(dict.fromkeys(part for handle in self._seen for part in unfinished(handle)))
        pending = listed(waited_for) or "no operation"
        known, late = plight(waited_for)
        return OperationTimeout(f"not done within {self._seconds:g} s; pending: {pending}{known}", late=late)


def timeout(seconds: float | None) -> Deadline:
    """Return an async context manager that raises `OperationTimeout` if the block takes longer.

    The operations inside continue. Awaiting their handles again returns their results.

    Args:
        seconds: limit of the block, or None for no limit.

    Returns:
        An async context manager.

    Raises:
        OperationTimeout: at the end of the block. The error names the pending operations that were awaited inside, and
        the late ranks, each with its line.

    Example:
        ```python
        async with aiodist.timeout(30):
            total = await coll.allreduce(1.0)
        ```
    """
    return Deadline(seconds)
