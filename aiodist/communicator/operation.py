"""The record of a communicator's operation, with one state. The table of the operations in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import ref

from aiodist.backends.base import Done
from aiodist.collectives.endpoint import Traffic
from aiodist.communicator.changes import Mark
from aiodist.communicator.claims import Claim
from aiodist.communicator.oplog import IssueRecord
from aiodist.handles import Handle, Operation
from aiodist.handles.kernel import Transfer
from aiodist.types import ANY

if TYPE_CHECKING:
    from types import CodeType

    from aiodist._core import LaneOperation


class OperationState(Enum):
    """State of an operation. The transport lock is held at each change. An operation never returns to a state.

    A successful collective outside a lane has all states, in this order. An operation of a lane begins as STARTED. A
    message goes from NEW to DRAINED, as does an operation that never begins. A failed collective waits for the verdict
    of the ranks, and is DONE once its bytes are released. Three ends do not wait for the bytes: an abort, a verdict
    that names a lost rank or has a silent one, and a drain longer than the liveness bound. An error that needs no
    verdict, as of a message, does not wait either. Such an operation is DONE first, and keeps its claims until the
    transfers end.
    """

    NEW = "new"
    """Bytes claimed, number taken, line in the log written."""
    CHECKED = "checked"
    """The ranks that must agree before the start have agreed."""
    STARTED = "started"
    """Transfers may use the bytes. Operations of lanes begin here, since the lane compares the signatures."""
    DRAINED = "drained"
    """No transfer uses the bytes, which are released."""
    DONE = "done"
    """The handle has the outcome, and the operation is no longer in the table."""


class When(Enum):
    """When an operation may begin."""

    NOW = "now"
    """Immediately, since NCCL queues the operation while the ranks compare."""
    HOST = "host"
    """When the ranks of its host agree, since messages that leave the host can be drained."""
    ALL = "all"
    """When all ranks agree, since a collective of a library cannot be stopped."""


class Peer(NamedTuple):
    """The ranks at the other end of a message. A send has no `src`, and a receive no `dst` (None)."""

    src: int | None
    dst: int | None
    tag: int
    answered: bool = False
    """True if a send ends with the answer of a receive that has matched."""
    kept: bool = False
    """True if the transport completes the send only after a receive has matched."""

    def __str__(self) -> str:
        ends = []
        if self.dst is not None:
            ends.append(f"to rank {self.dst}")
        if self.src is not None:
            ends.append(f"from {'any rank' if self.src == ANY else f'rank {self.src}'}")
        return f"{', '.join(ends)} with {'any tag' if self.tag == ANY else f'tag {self.tag}'}"


@dataclass(eq=False, slots=True)
class Use:
    """One use of a name, by which operations of the ranks match."""

    name: str
    count: int
    """Count of earlier uses of the name."""
    came: set[int] = field(default_factory=set)
    """Other ranks known to have issued this use."""
    number: int = -1
    """Number of the operation (see `number_of_use`), or -1 until the name has a number."""
    record: IssueRecord | None = None
    """The operation with its line."""

    def text(self) -> str:
        """Return the operation with its line."""
        assert self.record is not None
        return self.record.text()


class Event:
    """An event that is set once, with an error or with None. A program awaits it as `transfer(event.wait)`."""

    is_set: bool = False
    error: BaseException | None = None
    _waiting: tuple[Done, ...] = ()

    def wait(self, done: Done) -> None:
        """Call `done` with the error or with None, now if the event is set, else later."""
        if self.is_set:
            done(self.error)
        else:
            self._waiting = (*self._waiting, done)

    def set(self, error: BaseException | None = None) -> None:
        """Set the event. Only the first call counts."""
        if not self.is_set:
            self.is_set, self.error = True, error
            waiting, self._waiting = self._waiting, ()
            for done in waiting:
                done(error)


@dataclass(eq=False)
class CommunicatorOperation(Operation[Any]):
    """An operation of a communicator. The user awaits `handle`."""

    handle: Handle[Any] | None = None  # type: ignore[assignment]
    """The handle to settle, or None before the issue and for a receive without a message."""
    claims: Sequence[Claim] = ()
    """Bytes that the operation reads or writes until DRAINED."""
    convert: Callable[[Any], Any] | None = None
    """Function that makes the result, on the thread of the loop or on a waiting thread, or None.

    May run code of the user.
    """
    _: KW_ONLY
    meets: Any = True
    """True for a collective in the order of all ranks, else the `Peer` of a message or the use of a name."""
    number: int = -1
    """Number, equal on all ranks, or -1 for a message and for an operation whose name has no number yet."""
    signature: int = 0
    """Hash of the number and of the facts that must be equal on all ranks, or 0 for a message and in a lane."""
    when: When = When.HOST
    traffic: Traffic | None = None
    """Record of the messages between hosts, or None."""
    marks: Sequence[Mark] = ()
    """State of the tensors at the call, compared at DRAINED."""
    large: bool = False
    """True if only the progress thread may start the operation."""
    state: OperationState = OperationState.NEW
    admitted: Event = field(default_factory=Event, init=False)
    """Set when the operation may begin, or with the error that prevents the start."""
    agreed: Event = field(default_factory=Event, init=False)
    """Set when all ranks agree, or with the reason why the operation does not count."""
    compared: LaneOperation | None = field(default=None, init=False)
    """Comparison within the host, or None."""
    given_back: Callable[[Any, BaseException | None], None] | None = field(default=None, init=False)
    """Callback for the end of the transfer, in place of `handle`, if the message is for another receive now."""
    reported: bool = field(default=False, init=False)
    """True if `convert` reports a change of the program."""
    error: BaseException | None = field(default=None, init=False)
    """Error of this rank's part, or `Differ` after a failure on another rank. Then no result ends the operation."""
    verdict: BaseException | None = field(default=None, init=False)
    """Error on which the ranks agree, raised after the release of the bytes."""

    def decide(self, error: BaseException | None) -> None:
        """Note that the ranks agree, or end the operation with `error` as soon as its transfers allow."""
        self.error = self.error or error
        if self.admitted.is_set:
            if error is not None and self.traffic is not None:
                self.traffic.stopped_by = error
        else:
            if error is None and self.state is OperationState.NEW:
                self.state = OperationState.CHECKED
            self.admitted.set(error)
        if self.traffic is not None:
            self.traffic.comparison, self.traffic.difference, self.traffic.rooms = None, error, None
        self.agreed.set(error)

    def admit(self) -> None:
        """Allow the operation to begin before all ranks agree."""
        if self.state is OperationState.NEW:
            self.state = OperationState.CHECKED
        self.admitted.set()


class NativeCall(NamedTuple):
    """One call of a library in place of a program, made when all ranks agree (`When.ALL`)."""

    call: Transfer
    result: object


class Receive(Protocol):
    """A receive that no message has matched."""

    paused: bool
    """True while the receive takes no message."""

    @property
    def peer(self) -> Any:  # noqa: ANN401
        """Source and tag of the message."""

    @property
    def handle(self) -> Handle[Any] | None:
        """Handle, or None after the program has dropped the handle."""

    def take(self) -> bool:
        """Hold the handle from now on, as a separate operation. Return False if the program has dropped the handle."""

    def own(self, handle: Handle[Any], origin: tuple[CodeType, int]) -> None:
        """Own the claims of the operation of `handle`, issued at `origin`, without keeping the handle alive."""

    def lapse(self) -> bool:
        """Withdraw the receive if the program has dropped its handle. Return True if the receive was withdrawn."""


class Pending:
    """The operations of a communicator that are in flight: collectives by number, the others by handle.

    Receives without a message are in a separate dict, since only the program holds their handles: see `Receiving`. Any
    thread may read: changes and copies of a dict are atomic. A list of `items()` is not atomic: while memory is
    allocated for the list, the garbage collector may end operations.
    """

    def __init__(self) -> None:
        self.collectives: dict[int, Handle[Any] | CommunicatorOperation] = {}
        """Collectives in the order of all ranks, by number. The compiled core adds handles of lanes."""
        self.others: dict[Handle[Any], CommunicatorOperation] = {}
        """Messages and named operations."""
        self.posted: dict[ref[Handle[Any]], Receive] = {}
        """Receives without a message, paused ones too, in order of issue."""

    def remove(self, operation: CommunicatorOperation) -> None:
        """Remove an operation, if it is there."""
        if operation.meets is True:
            self.collectives.pop(operation.number, None)
        elif operation.handle is not None:
            self.others.pop(operation.handle, None)

    def take_over(self, handle: Handle[Any], claims: Sequence[Claim] = ()) -> CommunicatorOperation | None:
        """Return the operation of a lane's handle, or make the operation first. None if the handle is done."""
        if (operation := self.find(handle)) is not None:
            operation.claims = claims or operation.claims
            return operation
        if self.collectives.get(handle.seq) is not handle:
            return None
        operation = CommunicatorOperation(handle, claims, number=handle.seq, state=OperationState.STARTED)
        self.collectives[handle.seq] = operation
        if operation.is_pending:
            return operation
        self.collectives.pop(handle.seq, None)  # a waiting thread has ended the operation before it was in the table
        return None

    def in_flight(self) -> list[CommunicatorOperation]:
        """Return all operations, those of lanes and of receives without a message too."""
        for receive in list(self.posted.values()):
            if not receive.paused:
                receive.take()
        found = [self.take_over(_handle_of(one)) for one in self.collectives.copy().values()]
        return [operation for operation in (*found, *self.others.copy().values()) if operation is not None]

    def find(self, handle: Handle[Any]) -> CommunicatorOperation | None:
        """Return the operation of `handle`, or None in a lane and for an unknown handle."""
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
        """Return the counterpart of `handle`, or None for a finished handle or one of another communicator."""
        if (other := self.others.get(handle)) is not None:
            return other.meets
        if (one := self.collectives.get(handle.seq)) is not None and _handle_of(one) is handle:
            return True
        return None if (posted := self.posted.get(ref(handle))) is None else posted.peer

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
