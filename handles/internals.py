"""Functions of the runtime on handles, hidden from users, to wait in further ways and to report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiodist.handles.account import Account
from aiodist.handles.handle import Handle
from aiodist.handles.state import HandleFence, HandleStatus, Waiter, details, error_of, late_ranks, plight, unfinished
from aiodist.pauses import deadline_clock

if TYPE_CHECKING:
    from types import CodeType

    from aiodist.handles.progress import Progress

__all__ = [
    "add_observer",
    "add_waiter",
    "block",
    "block_unless",
    "check_loop",
    "details",
    "error_of",
    "fence_of",
    "is_awaited",
    "is_detached",
    "is_pending",
    "is_retrieved",
    "is_strict",
    "issued_at",
    "late_ranks",
    "name_of",
    "plight",
    "reject_pending",
    "remove_waiter",
    "seconds_left",
    "unfinished",
    "warn",
    "was_looked_at",
]


def is_pending(handle: Handle[Any]) -> bool:
    """Return True until `handle` is done. Unlike `Handle.done`, the call is no sign that the program waits."""
    return handle._is_pending


def fence_of(handle: Handle[Any]) -> HandleFence | None:
    """Return the fence of a pending `handle`, or None if the operation is done or has no place on a device."""
    fence: HandleFence | None = handle._fence
    return fence


def issued_at(handle: Handle[Any]) -> tuple[CodeType, int]:
    """Return the code and the instruction that issued `handle`."""
    assert handle._origin is not None
    return handle._origin


def is_strict(handle: Handle[Any]) -> bool:
    """Return True if a change of a tensor of `handle` in flight is an error."""
    return handle._account is not None and handle._account.strict


def warn(handle: Handle[Any], what: str) -> None:
    """Warn, once for each line, that the operation of `handle` `what`."""
    account = handle._account or Account(handle._progress.loop)
    account.warn(name_of(handle), handle.origin, what)


def name_of(handle: Handle[Any]) -> str:
    """Return the name of `handle` in messages, without its number."""
    return handle._name or handle.op


def check_loop(handle: Handle[Any], progress: Progress) -> None:
    """Raise `RuntimeError` unless `handle` belongs to the loop of `progress`."""
    if handle._progress is not progress:
        raise RuntimeError(f"{handle} belongs to another event loop: await it there, or use wait() in a thread")


def reject_pending(handle: Handle[Any], error: BaseException) -> bool:
    """End the operation of `handle` with `error`. Return False, without a change, if the operation has ended already.

    For an operation that the compiled core may end meanwhile, in another thread.
    """
    if handle._status is HandleStatus.PENDING:
        handle._traceback = error.__traceback__
    return handle._settle(HandleStatus.RAISED, error)


# --- waiting -------------------------------------------------------------------------------------------------


def add_waiter(handle: Handle[Any], waiter: Waiter) -> None:
    """Call `waiter.wake` on the loop when `handle` is done or late (loop's thread)."""
    handle._add_waiter(waiter)


def add_observer(handle: Handle[Any], waiter: Waiter) -> None:
    """Call `waiter.wake` as after `add_waiter`, without a retrieval of the outcome."""
    handle._add_observer(waiter)


def remove_waiter(handle: Handle[Any], waiter: Waiter) -> None:
    """Remove `waiter`, unless the waiter was woken or removed already."""
    handle._remove_waiter(waiter)


def block(handle: Handle[Any], timeout: float | None = None, *, looks: bool = True) -> bool:
    """Block this thread until `handle` is done, for at most `timeout` seconds. Return True if the handle is done.

    Unlike `Handle.wait`, the call raises no error of the operation, and retrieves no outcome. For an operation in a
    lane, `looks` lets the thread poll for a moment before each sleep.
    """
    return handle._block_for(timeout, looks=looks)


def block_unless(handle: Handle[Any], gone: Callable[[], bool]) -> bool:
    """Block as `block` does. Return False soon after `gone()`, such as `loop.is_closed`, returns True."""
    return handle._block_unless(gone)


# --- facts for reports ---------------------------------------------------------------------------------------


def is_awaited(handle: Handle[Any]) -> bool:
    """Return True if `handle` has a waiter, or a thread has waited, and False if `handle` is detached."""
    return bool(handle._waiters or handle._event) and not handle._detached


def is_detached(handle: Handle[Any]) -> bool:
    """Return True if `handle` was detached."""
    return handle._detached


def is_retrieved(handle: Handle[Any]) -> bool:
    """Return True if code has retrieved or asked for the outcome, so that dropping `handle` is no loss."""
    return handle._consumed


def was_looked_at(handle: Handle[Any]) -> bool:
    """Return True if `Handle.done` has returned False since the last call of this function."""
    looked_at, handle._looked_at = handle._looked_at, False
    return looked_at


def seconds_left(handle: Handle[Any]) -> float | None:
    """Return the seconds until the handle's own deadline, or None if no deadline is to come."""
    return None if handle._expires is None else handle._expires - deadline_clock.now()
