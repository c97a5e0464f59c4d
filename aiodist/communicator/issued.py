"""Finds the operations that this rank has issued, by number, for other ranks that ask after a failure."""

from __future__ import annotations

from aiodist.backends.base import NAMED
from aiodist.collectives.endpoint import Traffic
from aiodist.communicator.names import NamedOperations
from aiodist.communicator.operation import CommunicatorOperation, Pending
from aiodist.communicator.oplog import OpLog
from aiodist.handles import Handle


class Issued:
    """Record of the collectives and named operations of one communicator, by their numbers (any thread)."""

    def __init__(self, oplog: OpLog, operations: Pending, recent: dict[int, Traffic], names: NamedOperations) -> None:
        """`recent` has the messages of the communicator's operations."""
        self._names = names
        self._oplog = oplog
        self._operations = operations
        self._recent = recent

    def __contains__(self, number: int) -> bool:
        return self._names.has_issued(number) if number >= NAMED else number < self._oplog.seq

    def operation(self, number: int, *, look: bool = False) -> CommunicatorOperation | None:
        """Return the collective in flight with that number (transport lock held).

        True for `look` first lets the lane settle the handle, or pass the operation on to a program.
        """
        if number >= NAMED:
            use = self._names.find(number)
            return None if use is None else use.operation
        one = self._operations.collectives.get(number)
        if look and isinstance(one, Handle):
            one.done()  # the lane may have passed the operation to a program, which can be stopped
            one = self._operations.collectives.get(number)
        return self._operations.take_over(one) if isinstance(one, Handle) else one

    def traffic(self, number: int) -> Traffic:
        """Return the record of the operation's messages, or an empty record if there is none."""
        use = self._names.find(number)
        return (self._recent.get(number) if use is None else use.traffic) or Traffic()

    def description(self, number: int) -> tuple[str, int | None]:
        """Return text and signature of an operation."""
        use = self._names.find(number)
        record = self._oplog.find(number) if use is None else use.record
        if record is None:
            return "an operation that is no longer kept", None
        return (record.text(), record.what.word) if use is None else (use.text(), record.what.word ^ use.edition)

    def title(self, number: int) -> str:
        """Return the operation's number, or name and count, for error messages."""
        if number < NAMED:
            return f"operation #{number}"
        use = self._names.find(number)
        return "a named operation" if use is None else f"operation {use.name!r} #{use.count}"

    def last(self) -> str:
        """Return the last collective with its line, or "" before the first."""
        record = self._oplog.last()
        return "" if record is None else record.text()
