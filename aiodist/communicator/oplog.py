"""The collectives that a communicator issued, in order: number, description and calling line of each.

A record costs a fraction of a microsecond. It is looked at when ranks disagree, or wait for one another for long.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple, TypeVar

from aiodist import _core
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.handles import Origin
from aiodist.handles.origin import is_ours

LEFT = "has left"
"""The text of a close that no line of the program asked for."""


_Value = TypeVar("_Value")
_KEPT = 4096


class Latest(dict[int, _Value]):
    """What is known of the latest operations, by their numbers: late news of older ones are not expected."""

    def __setitem__(self, number: int, value: _Value) -> None:
        super().__setitem__(number, value)
        if len(self) > _KEPT:
            del self[next(iter(self))]


class Record(NamedTuple):
    """One operation of this rank's."""

    seq: int
    what: Fingerprint
    origin: tuple[CodeType, int]
    call: str = ""
    """The user's call that it is a part of, such as "net.step"; "" where the user issued it."""

    def text(self) -> str:
        """Return what was issued and where; of a close that no line of the program asked for, that the rank left."""
        if self.what.kind == "close" and is_ours(self.origin[0].co_filename):
            return LEFT
        return f"{f'{self.call} ({self.what})' if self.call else self.what} at {Origin(*self.origin)}"

    def told(self, *, pending: bool) -> dict[str, Any]:
        """Return it as JSON knows it."""
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
    """One rank's record of one communicator; written on the loop's thread, read from any."""

    awaited: dict[int, Callable[[], None]]

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple[CodeType, int], str] = {}
        """By the place of a user's call, such as of "net.step", its name: the operations it issues are its parts."""

    def name_caller(self, caller: tuple[CodeType, int], call: str) -> None:
        """Record the operations issued from now on as parts of the user's `call` at that place."""
        self.caller = caller
        self.calls[caller] = call

    def find(self, seq: int) -> Record | None:
        """Return the record of operation `seq`, or None where there is none yet, or none any more."""
        kept = self.kept(seq)
        return None if kept is None else Record(*kept, self.calls.get(kept[-1], ""))

    def last(self) -> Record | None:
        """Return the record of the last operation."""
        return self.find(self.seq - 1)

    def text(self, seq: int) -> str:
        """Return what operation `seq` is and where it was called, as words."""
        record = self.find(seq)
        return f"operation #{seq}, which is no longer kept" if record is None else record.text()
