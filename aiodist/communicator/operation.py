"""An operation of a communicator, from its issue to its end: one record, with one state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from aiodist.backends.base import Done
from aiodist.collectives.traffic import Traffic
from aiodist.communicator.claims import Claim
from aiodist.handles import Handle, Operation
from aiodist.handles.kernel import Program, resume, transfers

if TYPE_CHECKING:
    from aiodist._core import LaneOperation

T = TypeVar("T")


class State(Enum):
    """State of an operation; each change is made with the transport lock held, and none goes back."""

    NEW = "new"
    """Its bytes are claimed, its number is taken, and it is in the log."""
    CHECKED = "checked"
    """The ranks that must agree before it begins have agreed."""
    STARTED = "started"
    """Transfers may use its bytes."""
    DRAINED = "drained"
    """No transfer uses its bytes: they are given back."""
    DONE = "done"
    """Its handle has the outcome."""


class When(Enum):
    """When an operation may begin."""

    NOW = "now"
    """Immediately: its library queues it, and the ranks compare meanwhile (NCCL)."""
    HOST = "host"
    """When the ranks of its host agree: what leaves the host goes by own messages, which can be drained."""
    ALL = "all"
    """When all ranks agree: a collective of a library cannot be recalled."""


class Event:
    """A one-time event with an error or none; a program awaits it as `transfers([event.wait])`."""

    __slots__ = ("_waiting", "error", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self.error: BaseException | None = None
        self._waiting: list[Done] = []

    def wait(self, done: Done) -> None:
        """Call `done` with the error, or with None, when it is set; now if it is."""
        if self.is_set:
            done(self.error)
        else:
            self._waiting.append(done)

    def set(self, error: BaseException | None = None) -> None:
        """Set it; only the first call counts."""
        if not self.is_set:
            self.is_set, self.error = True, error
            waiting, self._waiting = self._waiting, []
            for done in waiting:
                done(error)


@dataclass(eq=False, slots=True)
class CommunicatorOperation(Operation[Any]):
    """An operation of a communicator; its `handle` is the user's side."""

    handle: Handle[Any] | None  # type: ignore[assignment]
    """The handle to settle; None for a receive without a message."""
    claims: Sequence[Claim] = ()
    """Bytes that it reads or writes until it is drained."""
    convert: Callable[[Any], Any] | None = None
    """Makes the result, on the thread of the loop or on one that waits: it may run code of the user."""
    _: KW_ONLY
    meets: Any = True
    """True for a collective in the order of all ranks; else the `Peer` of a message, or the use of a name."""
    number: int = -1
    """Number that all ranks give it; -1 of a message, and of a named operation until its name has a number."""
    signature: int = 0
    """Hash of all that the ranks must have in common, with its number."""
    when: When = When.HOST
    traffic: Traffic | None = None
    """Messages that it sends to other hosts and asks for."""
    large: bool = False
    """True if only the progress thread may start it."""
    state: State = field(default=State.NEW, init=False)
    admitted: Event = field(default_factory=Event, init=False)
    """Set when it may begin, or with the reason why it will not."""
    agreed: Event = field(default_factory=Event, init=False)
    """Set when all ranks agree on it, or with the reason why it does not count."""
    compared: LaneOperation | None = field(default=None, init=False)
    """Its comparison within the host."""
    given_back: Callable[[Any, BaseException | None], None] | None = field(default=None, init=False)
    """Callback in place of `handle` after another receive was given the message."""
    error: BaseException | None = field(default=None, init=False)
    """Error of this rank's part."""
    verdict: BaseException | None = field(default=None, init=False)
    """Error on which the ranks agree, for when its bytes are free."""

    def decide(self, error: BaseException | None) -> None:
        """The ranks agree on it, or it ends with `error` as soon as its transfers allow."""
        if self.admitted.is_set:
            if error is not None and self.traffic is not None:
                self.traffic.refuse(error)
        else:
            self.admit(error)
        if self.traffic is not None:
            self.traffic.decided(error)
        self.agreed.set(error)

    def admit(self, error: BaseException | None = None) -> None:
        """Let it begin, or not."""
        if error is None and self.state is State.NEW:
            self.state = State.CHECKED
        self.admitted.set(error)


async def carry_out(operation: CommunicatorOperation, program: Program[T]) -> T:
    """Run `program` when the ranks that must agree before it begins have agreed; its result counts when all have."""
    try:
        if not operation.admitted.is_set or operation.admitted.error is not None:
            await transfers([operation.admitted.wait])
    except BaseException:
        program.close()
        raise
    operation.state = State.STARTED
    result = await resume(program)
    if not operation.agreed.is_set or operation.agreed.error is not None:
        await transfers([operation.agreed.wait])
    return result
