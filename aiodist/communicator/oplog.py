"""The collectives that a communicator issued, in order, each with number, description and calling line.

A record costs a fraction of a microsecond. The log is read when ranks disagree, or wait long for one another.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple, TypeVar

from aiodist import _core
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.handles import Origin
from aiodist.handles.origin import is_ours

LEFT = "left"
"""Text of a close that no line of the program requested."""


_Value = TypeVar("_Value")
_KEPT = 4096


class Latest(dict[int, _Value]):
    """A dict by number of operation that keeps the latest 4,096 entries. No message is expected about older entries."""

    def __setitem__(self, number: int, value: _Value) -> None:
        super().__setitem__(number, value)
        if len(self) > _KEPT:
            del self[next(iter(self))]


class IssueRecord(NamedTuple):
    """One operation of this rank."""

    seq: int
    what: Fingerprint
    origin: tuple[CodeType, int]
    call: str = ""
    """The user's call with this operation as a part, such as "net.step", or "" if the user issued the operation."""

    def text(self) -> str:
        """Return the operation with its line, or `LEFT` for a close that no line of the program requested."""
        if self.what.kind == "close" and is_ours(self.origin[0].co_filename):
            return LEFT
        return f"{f'{self.call} ({self.what})' if self.call else self.what} at {Origin(*self.origin)}"

    def as_json(self, *, pending: bool) -> dict[str, Any]:
        """Return the record as values of JSON."""
        what, where = self.what, Origin(*self.origin)
        return {
            "seq": self.seq,
            "kind": what.kind,
            "dtype": what.dtype,
            "size": what.size,
            "text": self.text(),
            "place": [where.filename, where.lineno, where.code.co_qualname],
            "pending": pending,
        }


class OpLog(_core.Log):
    """One rank's log of one communicator. The loop's thread writes, and any thread reads."""

    awaited: dict[int, Callable[[], None]]

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[CodeType, int], str] = {}
        """Names of user calls such as "net.step", by place. Operations issued in such a call are parts of the call."""

    def name_caller(self, caller: tuple[CodeType, int], call: str) -> None:
        """Record the operations issued from now on as parts of the user's `call` at that place."""
        self.caller = caller
        self.calls[caller] = call

    def find(self, seq: int) -> IssueRecord | None:
        """Return the record of operation `seq`, or None before its issue and when no longer recorded."""
        kept = self.kept(seq)
        return None if kept is None else IssueRecord(*kept, self.calls.get(kept[-1], ""))

    def last(self) -> IssueRecord | None:
        """Return the record of the last operation."""
        return self.find(self.seq - 1)

    def text(self, seq: int) -> str:
        """Return operation `seq` with its line as text."""
        record = self.find(seq)
        return f"operation #{seq}, which is no longer recorded" if record is None else record.text()
