"""Who answers for handles that nobody looked at (H7)."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from aiodist.handles.origin import Origin, described

if TYPE_CHECKING:
    from types import CodeType

    from aiodist.handles.handle import Handle

__all__ = ["Account"]


class _Dropped(NamedTuple):
    op: str
    seq: int
    whence: tuple[CodeType, int] | None
    error: BaseException | None

    @property
    def origin(self) -> Origin | None:
        """The line that issued it, worked out only when somebody is told: most are covered."""
        return None if self.whence is None else Origin(*self.whence)

    @property
    def text(self) -> str:
        """What the handle called itself."""
        return described(self.op, self.seq, self.origin)


class Account:
    """The handles of one communicator or stream that were dropped unconsumed.

    A later `sync` or `barrier` covers those that went well; an error is reported then, once. What is never
    covered is judged at close, with a `ResourceWarning` that points at the line that issued it; what is dropped
    after that, or was `closed` from the start, soon after it is dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, closed: bool = False) -> None:
        self._loop = loop
        self._closed = closed
        self._dropped: deque[_Dropped] = deque()
        self._covered = -1

    def dropped(self, handle: Handle[Any]) -> None:
        """Take note of a finished handle; called by the garbage collector, on any thread, so it only appends."""
        error = handle._value if isinstance(handle._value, BaseException) else None
        if error is not None or handle.seq > self._covered:
            self._dropped.append(_Dropped(handle.op, handle.seq, handle._origin, error))
            if self._closed:
                self._judge_soon()

    def cover(self, seq: int) -> None:
        """A sync saw all operations up to `seq` through: report the errors among them, forget the rest."""
        self._covered = max(self._covered, seq)
        for entry in self._take(seq):
            self._report(entry)

    def judge(self) -> None:
        """Close: report what is left, errors to the loop's handler, the others as warnings."""
        self._closed = True
        for entry in self._take(None):
            if not self._report(entry):
                self._warn(entry)

    def _judge_soon(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self.judge)
        except RuntimeError:  # the loop is closed: say it here, where nothing may be raised
            with contextlib.suppress(Warning):
                self.judge()

    def _take(self, upto: int | None) -> list[_Dropped]:
        entries = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self._dropped.extend(e for e in entries if upto is not None and e.seq > upto)
        return [e for e in entries if upto is None or e.seq <= upto]

    def _report(self, entry: _Dropped) -> bool:
        if entry.error is None or isinstance(entry.error, asyncio.CancelledError):
            return False
        message = f"{entry.text} raised, and nobody awaited it"
        self._loop.call_exception_handler({"message": message, "exception": entry.error})
        return True

    @staticmethod
    def _warn(entry: _Dropped) -> None:
        message = f"{entry.text} was never awaited, nor covered by a barrier"
        if entry.origin is None:
            warnings.warn(message, ResourceWarning, stacklevel=2)
        else:
            warnings.warn_explicit(message, ResourceWarning, entry.origin.filename, entry.origin.lineno)
