"""The states of a handle, its error, and the operations and ranks that a pending one waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import Enum
from time import monotonic

from aiodist import _core
from aiodist.errors import OperationTimeout
from aiodist.handles.account import Account, Witness

_SHOWN_OPERATIONS, _SHOWN_RANKS = 8, 16


class Status(Enum):
    """PENDING is followed by exactly one of the others, which is final."""

    PENDING = "pending"
    RETURNED = "returned"
    RAISED = "raised"
    CANCELLED = "cancelled"


_core.set_statuses(Status.PENDING, Status.RETURNED)


def unfinished(handle: _core.Handle) -> list[_core.Handle]:
    """Return the pending operations that it waits for: those of its parts, or itself."""
    if handle._status is not Status.PENDING:
        return []
    return [one for part in handle._parts or () for one in unfinished(part)] or [handle]


def late_ranks(handle: _core.Handle) -> dict[int, str]:
    """Return the ranks that this pending operation is known to wait for, each with its line."""
    if handle._status is not Status.PENDING:
        return {}
    if handle._parts is not None:
        return {rank: line for part in handle._parts for rank, line in late_ranks(part).items()}
    if handle._late is not None:
        return handle._late()
    witness = _witness_of(handle)
    return {} if witness is None else witness.late(handle)


def details(handle: _core.Handle) -> str:
    """Return other reasons why this pending operation has not finished; "" without any."""
    witness = _witness_of(handle)
    return "" if witness is None or handle._status is not Status.PENDING else witness.details(handle)


def _witness_of(handle: _core.Handle) -> Witness | None:
    account: Account | None = handle._account
    return None if account is None else account.witness


def plight(handles: Sequence[_core.Handle]) -> tuple[str, dict[int, str]]:
    """Return why they have not finished, as text to follow their names, and the late ranks."""
    parts = [part for handle in handles for part in unfinished(handle)][:_SHOWN_OPERATIONS]
    late = {rank: line for part in parts for rank, line in late_ranks(part).items()}
    words = list(dict.fromkeys(filter(None, (details(part) for part in parts))))
    if late:
        shown = [f"rank {rank} ({line})" for rank, line in sorted(late.items())]
        more = f" and {len(shown) - _SHOWN_RANKS} more" if len(shown) > _SHOWN_RANKS else ""
        words.append(f"late: {', '.join(shown[:_SHOWN_RANKS])}{more}")
    return "".join(f"; {word}" for word in words), late


def lateness(handle: _core.Handle, seconds: float | None = None) -> OperationTimeout:
    """Return the error of a wait of `seconds` for `handle`, None for its own deadline."""
    known, late = plight([handle])
    within = "in time" if seconds is None else f"within {seconds:g} s"
    return OperationTimeout(f"{handle} was not done {within} and continues{known}", late=late, op=handle.op)


def error_of(handle: _core.Handle) -> BaseException | None:
    """Return the error that awaiting this finished handle raises, a `CancelledError` too; None for a result."""
    handle._consumed = True
    if handle._status is Status.CANCELLED:
        return asyncio.CancelledError(f"{handle} was withdrawn")
    error: BaseException | None = handle._value if handle._status is Status.RAISED else None
    return error


def expired(handle: _core.Handle) -> OperationTimeout | None:
    """Return the error of a deadline that has passed, only once: the next wait continues without a deadline."""
    if handle._expires is None or monotonic() < handle._expires:
        return None
    handle._expires = None
    return lateness(handle)
