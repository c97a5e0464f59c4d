"""The states, errors and waiters of a handle, and the operations and ranks for which a handle waits."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from threading import get_ident
from time import perf_counter
from typing import Any, Final, Protocol, cast

from aiodist import _core
from aiodist.errors import OperationTimeout
from aiodist.handles.account import Account
from aiodist.pauses import deadline_clock

_SHOWN_OPERATIONS, _SHOWN_RANKS = 8, 16


class HandleStatus(Enum):
    """PENDING is followed by exactly one of the other states. Only `PostedOperation.revoke` returns to PENDING."""

    PENDING = "pending"
    RETURNED = "returned"
    RAISED = "raised"
    CANCELLED = "cancelled"


RETURNED: Final = HandleStatus.RETURNED
"""`HandleStatus.RETURNED`, as a global for speed, since each outcome is compared with this state."""
_core.set_statuses(HandleStatus.PENDING, RETURNED)


def unfinished(handle: _core.Handle) -> list[_core.Handle]:
    """Return the pending parts of a pending `handle`, or the handle itself if no part is pending."""
    if handle._status is not HandleStatus.PENDING:
        return []
    return [one for part in handle._parts or () for one in unfinished(part)] or [handle]


def late_ranks(handle: _core.Handle) -> dict[int, str]:
    """Return the ranks that this pending operation is known to wait for, each with its place in the program."""
    if handle._status is not HandleStatus.PENDING:
        return {}
    if handle._parts is not None:
        return {rank: line for part in handle._parts for rank, line in late_ranks(part).items()}
    if handle._late is not None:
        return handle._late()
    account: Account | None = handle._account
    return {} if account is None or account.late is None else account.late(handle)


def details(handle: _core.Handle) -> str:
    """Return other reasons why this pending operation has not finished, or "" if there are none."""
    account: Account | None = handle._account
    if account is None or account.details is None or handle._status is not HandleStatus.PENDING:
        return ""
    return account.details(handle)


def plight(handles: Sequence[_core.Handle]) -> tuple[str, dict[int, str]]:
    """Return a text on why `handles` have not finished, to follow their names, and the late ranks."""
    parts = [part for handle in handles for part in unfinished(handle)][:_SHOWN_OPERATIONS]
    late = {rank: line for part in parts for rank, line in late_ranks(part).items()}
    words = list(dict.fromkeys(filter(None, (details(part) for part in parts))))
    if late:
        shown = [f"rank {rank} ({line})" for rank, line in sorted(late.items())]
        more = f" and {len(shown) - _SHOWN_RANKS} more" if len(shown) > _SHOWN_RANKS else ""
        words.append(f"late: {', '.join(shown[:_SHOWN_RANKS])}{more}")
    return "".join(f"; {word}" for word in words), late


def lateness(handle: _core.Handle, seconds: float | None = None) -> OperationTimeout:
    """Return the error of a wait of `seconds` for `handle`, or of the handle's deadline for None."""
    known, late = plight([handle])
    within = "in time" if seconds is None else f"within {seconds:g} s"
    return OperationTimeout(f"{handle} was not done {within} and continues{known}", late=late, op=handle.op)


def error_of(handle: _core.Handle) -> BaseException | None:
    """Return the error that awaiting this finished handle raises, or None for a result. This retrieves the outcome."""
    handle._consumed = True
    if handle._status is RETURNED:
        return None
    if handle._status is HandleStatus.CANCELLED:
        return asyncio.CancelledError(f"{handle} was withdrawn")
    error: BaseException | None = handle._value if handle._status is HandleStatus.RAISED else None
    return error


def expired(handle: _core.Handle) -> OperationTimeout | None:
    """Return the error if the deadline has passed, and remove the deadline, so that the next wait has none."""
    if handle._expires is None or deadline_clock.now() < handle._expires:
        return None
    handle._expires = None
    return lateness(handle)


# --- waits, for metrics --------------------------------------------------------------------------------------


Waits = tuple[dict[tuple[str, int], float], str]
"""Seconds of the waits of a communicator, by call and thread, with the call of an operation."""


def waits_of(handle: _core.Handle) -> Waits | None:
    """Return the waits of the communicator of `handle`, with the call, or None if metrics do not count them.

    The wait for a group counts as one for its first pending operation.
    """
    while handle._parts:
        handle = next((part for part in handle._parts if part._status is HandleStatus.PENDING), handle._parts[0])
    account: Account | None = handle._account
    return None if account is None or account.waits is None else (account.waits, handle.op)


def add_wait(waits: Waits | None, began: float) -> None:
    """Add the time since `began`, in seconds of `perf_counter`, to the waits of this thread."""
    if waits is not None:
        seconds, op = waits
        key = op, get_ident()  # one writer for each entry
        seconds[key] = seconds.get(key, 0.0) + perf_counter() - began


# --- waiters -------------------------------------------------------------------------------------------------

Note = Callable[[Any], None]
current_deadline: ContextVar[Note | None] = ContextVar("aiodist_deadline", default=None)
"""Callback of the innermost `aiodist.timeout` around the running code, called with the handle of a cancelled await."""


class HandleFence(Protocol):
    """The place on a device at which an operation ends."""

    def order(self, stream: Any, handle: Any, /) -> None:  # noqa: ANN401
        """Order `stream`, or the current stream for None, after the operation of `handle`."""

    def look(self) -> bool:
        """If the device has reached this place, report the end and return True (transport lock held)."""


class Waiter(Protocol):
    """A waiter for a handle on the loop, such as a future, a gather or a scope."""

    def wake(self, handle: Any, late: OperationTimeout | None, /) -> None:  # noqa: ANN401
        """Called on the loop when `handle` is done, or, with the error `late`, when its deadline has passed."""


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
