"""The pending operations of a communicator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol
from weakref import ref

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
    """Handles of operations, each with its counterpart: True for collectives, else a `Peer` or the `Use` of a name.

    It holds all of them except those of receives that no message has matched, which only the program holds: see
    `Receiving`.
    Any thread may look: each change is one step of a dict, and so is a copy. A list of `items()` is none: it allocates,
    and the garbage collector may end operations meanwhile.
    """

    def __init__(self) -> None:
        self.issued: dict[Handle[Any], Any] = {}
        """In order of issue. The compiled core adds to it."""
        self.posted: dict[ref[Handle[Any]], Receive] = {}
        """Receives that no message has matched, paused ones too, in order of issue."""

    def items(self) -> list[tuple[Handle[Any], Any]]:
        """Return each handle with its counterpart."""
        waiting = [one for one in list(self.posted.values()) if not one.paused]
        posted = [(handle, one.peer) for one in waiting if (handle := one.handle) is not None]
        return [*self.issued.copy().items(), *posted]

    def get(self, handle: Handle[Any]) -> Any:  # noqa: ANN401
        """Return the counterpart of `handle`; None if it is finished or of another communicator."""
        meets = self.issued.get(handle)
        if meets is None and (one := self.posted.get(ref(handle))) is not None:
            return one.peer
        return meets

    def pop(self, handle: Handle[Any]) -> None:
        """Forget `handle`, which is finished."""
        if self.issued.pop(handle, None) is None:
            self.posted.pop(ref(handle), None)

    def clear(self) -> None:
        """Forget all."""
        self.issued.clear()
        self.posted.clear()

    def __iter__(self) -> Iterator[Handle[Any]]:
        return iter([handle for handle, _ in self.items()])

    def __contains__(self, handle: Handle[Any]) -> bool:
        return handle in self.issued or ref(handle) in self.posted

    def __len__(self) -> int:
        return len(self.issued) + sum([not one.paused for one in list(self.posted.values())])
