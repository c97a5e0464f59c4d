"""The pending operations of a communicator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol
from weakref import ref

from aiodist.communicator.claims import Claim
from aiodist.communicator.operation import CommunicatorOperation
from aiodist.handles import Handle


class Receive(Protocol):
    """A receive that no message has matched."""

    paused: bool
    """True while it takes no message."""

    @property
    def peer(self) -> Any:  # noqa: ANN401
        """Source and tag of the message."""

    @property
    def handle(self) -> Handle[Any] | None:
        """Its handle; None once the program has dropped that."""

    def lapse(self) -> bool:
        """Withdraw it if the program has dropped its handle; return whether it did."""


class Pending:
    """The operations of a communicator that are in flight: collectives by number, the others by handle.

    Receives without a message are apart, since only the program holds their handles: see `Receiving`.
    Any thread may read: each change is one step of a dict, and so is a copy. A list of `items()` is no single step: it
    allocates, and the garbage collector may end operations meanwhile.
    """

    def __init__(self) -> None:
        self.collectives: dict[int, Handle[Any] | CommunicatorOperation] = {}
        """Collectives in the order of all ranks, by number. The compiled core adds its handles."""
        self.others: dict[Handle[Any], CommunicatorOperation] = {}
        """Messages and named operations."""
        self.posted: dict[ref[Handle[Any]], Receive] = {}
        """Receives without a message, paused ones too, in order of issue."""

    def add(self, operation: CommunicatorOperation) -> None:
        """Enter an operation, which has a handle."""
        assert operation.handle is not None
        if operation.meets is True:
            self.collectives[operation.number] = operation
        else:
            self.others[operation.handle] = operation

    def remove(self, operation: CommunicatorOperation) -> bool:
        """Remove an operation; return False if it was not there."""
        if operation.meets is True:
            return self.collectives.pop(operation.number, None) is not None
        return operation.handle is not None and self.others.pop(operation.handle, None) is not None

    def collective(self, number: int) -> Handle[Any] | CommunicatorOperation | None:
        """Return the collective with that number: its operation, or its handle if a lane has it."""
        return self.collectives.get(number)

    def take_over(self, handle: Handle[Any], claims: Sequence[Claim] = ()) -> CommunicatorOperation | None:
        """Return the operation of a handle that a lane has, to end it in another way; None if it is done."""
        if self.collectives.get(handle.seq) is not handle:
            return None
        operation = self.collectives[handle.seq] = CommunicatorOperation(handle, claims, number=handle.seq)
        return operation

    def find(self, handle: Handle[Any]) -> CommunicatorOperation | None:
        """Return the operation of `handle`; None if a lane has it, or it is not here."""
        if (other := self.others.get(handle)) is not None:
            return other
        one = self.collectives.get(handle.seq)
        return one if isinstance(one, CommunicatorOperation) and one.handle is handle else None

    def items(self) -> list[tuple[Handle[Any], Any]]:
        """Return each handle with its counterpart: True for a collective, else a `Peer` or the use of a name."""
        found = [(_handle_of(one), True) for one in self.collectives.copy().values()]
        found += [(handle, one.meets) for handle, one in self.others.copy().items()]
        waiting = [one for one in list(self.posted.values()) if not one.paused]
        return found + [(handle, one.peer) for one in waiting if (handle := one.handle) is not None]

    def get(self, handle: Handle[Any]) -> Any:  # noqa: ANN401
        """Return the counterpart of `handle`; None if it is done or of another communicator."""
        if (other := self.others.get(handle)) is not None:
            return other.meets
        if (one := self.collectives.get(handle.seq)) is not None and _handle_of(one) is handle:
            return True
        return None if (posted := self.posted.get(ref(handle))) is None else posted.peer

    def clear(self) -> None:
        """Remove all."""
        self.collectives.clear()
        self.others.clear()
        self.posted.clear()

    def __iter__(self) -> Iterator[Handle[Any]]:
        return iter([handle for handle, _ in self.items()])

    def __contains__(self, handle: Handle[Any]) -> bool:
        return self.get(handle) is not None

    def __len__(self) -> int:
        return len(self.collectives) + len(self.others) + sum([not one.paused for one in list(self.posted.values())])


def _handle_of(one: Handle[Any] | CommunicatorOperation) -> Handle[Any]:
    if isinstance(one, Handle):
        return one
    assert one.handle is not None
    return one.handle
