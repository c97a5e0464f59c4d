"""`aiodist.timeout`: a deadline over a block that says what it waited for (H8)."""

from __future__ import annotations

import asyncio
from contextvars import Token
from types import TracebackType
from typing import Any, Self

from aiodist.errors import OperationTimeout
from aiodist.handles.handle import Handle, current_deadline, describe_late

__all__ = ["Deadline", "timeout"]


class Deadline:
    """`asyncio.timeout` whose error names the operations that were pending inside and the ranks that are late."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)
        self._token: Token[Deadline | None] | None = None
        self._outer: Deadline | None = None
        self._seen: list[Handle[Any]] = []

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._outer = current_deadline.get()
        self._token = current_deadline.set(self)
        return self

    def note(self, handle: Handle[Any]) -> None:
        """An await of `handle` inside the block, by its task or one that it started, was cancelled."""
        self._seen.append(handle)
        if self._outer is not None:
            self._outer.note(handle)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            current_deadline.reset(self._token)
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as caught:
            raise self._error() from caught

    def _error(self) -> OperationTimeout:
        # One await may have been given up long ago, and its operation may be over.
        waited_for = [part for handle in self._seen for part in handle.unfinished()]
        late = {rank: where for handle in waited_for for rank, where in handle.late().items()}
        pending = ", ".join(dict.fromkeys(map(str, waited_for))) or "no operation"
        who = f"; late: {describe_late(late)}" if late else ""
        return OperationTimeout(f"not done within {self._seconds:g} s; pending: {pending}{who}", late=late)


def timeout(seconds: float | None) -> Deadline:
    """Return an async context manager that raises `OperationTimeout` when its block takes longer.

    The operations inside go on: awaiting their handles again returns their results. `None` never expires.
    The error names the operations that were awaited inside and, where it is known, the ranks that are late.
    """
    return Deadline(seconds)
