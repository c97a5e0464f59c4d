"""Named operations, which the ranks match by name, in any order of issue.

A name gets a number once from rank 0, the *leader*, over the control channel. Operations match by this number and the
count of earlier uses of the name, in any order of issue.

    issued - the name has a number - all ranks have issued this use - they agree: the operation begins
                                                              - they differ: the operation fails on every rank

An operation sends no data and enters no lane before every rank has issued that operation. So no operation in a lane
waits for a later call of a program. The ranks compare by messages (`Dissemination`), whose tag follows from the number.
Tags repeat after 16 uses, so a failed name is held until its messages have been drained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from time import perf_counter_ns
from typing import Any, TypeVar
from weakref import ref

from aiodist.backends.base import MOST_NAMES, NAMED, Transport, again, name_in, number_of_use, tag_of
from aiodist.collectives.endpoint import Differ, Traffic
from aiodist.communicator.agreement import Comparison, Dissemination
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.operation import CommunicatorOperation, Use
from aiodist.communicator.oplog import IssueRecord
from aiodist.control import Channel
from aiodist.errors import CommunicatorError
from aiodist.handles import Handle, Progress, internals

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Named(Use):
    """A named operation of this rank."""

    traffic: Traffic = field(default_factory=Traffic)
    edition: int = 0
    """Hash of the selector's table, or 0 for the default table. Edits and named operations have no common order."""
    operation: CommunicatorOperation | None = None
    """The operation, until its end."""

    def text(self) -> str:
        """Return a description with the calling line, and the selector after an edit."""
        assert self.record is not None
        return f"{self.record.text()}{' with an edited selector' if self.edition else ''}"


@dataclass(eq=False, slots=True)
class _NameState:
    """The state of one name on this rank."""

    number: int | None = None
    issued: int = 0
    next: Named | None = None
    """Next use, from the call until the issue."""
    last: Callable[[], Handle[Any] | None] = lambda: None
    recent: tuple[Named, ...] = ()
    """Last two uses, since another rank may still run the first of them and fail."""
    waiting: Named | None = None
    """Use that waits for the number, or for held operations (lock held)."""
    held: set[int] = field(default_factory=set)
    """Numbers of failed operations that may have messages in flight (lock held)."""


class NamedOperations:
    """The named operations of one communicator on this rank (loop's thread, unless a method says otherwise)."""

    def __init__(
        self,
        comm: str,
        channel: Channel,
        ranks: Sequence[int],
        transport: Transport,
        progress: Progress,
        *,
        on_differ: Callable[[CommunicatorOperation], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        """`ranks` are the world ranks of the communicator's ranks, in order.

        `on_differ` is called with each operation on which ranks differ, `broken` with an error of the comparison. The
        transport lock is held in both calls.
        """
        self.issued = 0
        """Number of issued operations."""
        self.arrivals: deque[tuple[Named, int]] | None = None
        """Operations with the times of issue, in nanoseconds of `perf_counter_ns`, or None without a record."""
        self._comm = comm
        self._topic = f"names:{comm}"
        self._channel = channel
        self._ranks = ranks
        self._leads = ranks[0] == channel.rank
        self._progress = progress
        self._between = Dissemination(transport, range(transport.size), broken)
        self._on_differ = on_differ
        self._names: dict[str, _NameState] = {}
        self._by_number: dict[int, _NameState] = {}
        self._given: dict[str, int] = {}
        """Numbers of names, on the leader."""
        self._given_lock = Lock()
        self._undecided: set[CommunicatorOperation] = set()
        """Operations that wait for other ranks (transport lock held)."""
        self._closed: BaseException | None = None
        channel.subscribe(self._topic, self._heard)

    def unsubscribe(self) -> None:
        """Receive no more messages."""
        self._channel.unsubscribe(self._topic)

    # --- issuing ---------------------------------------------------------------------------------------------

    def next(self, name: str) -> Named:
        """Return the next use of `name`, the same object until its issue.

        Raises ValueError while the last use is in flight, and for too many names.
        """
        known = self._names.get(name)
        if known is None:
            if len(self._names) >= MOST_NAMES:
                raise ValueError(f"name={name!r}: {self._too_many()}: expected one of them")
            known = self._names[name] = _NameState()
        last = known.last()
        if last is not None and internals.is_pending(last):
            raise ValueError(f"name={name!r} is in flight: expected another name, or {last} to be finished before")
        if known.next is None:
            known.next = Named(name, known.issued)
        return known.next

    def record(self, use: Named, handle: Handle[Any], what: Fingerprint) -> None:
        """Record the issue of `use`."""
        use.record = IssueRecord(use.count, what, internals.issued_at(handle))
        known = self._names[use.name]
        known.next, known.last = None, ref(handle)
        known.recent = (*known.recent[-1:], use)
        known.issued += 1
        self.issued += 1
        if self.arrivals is not None:
            self.arrivals.append((use, perf_counter_ns()))

    # --- meeting: with the transport lock held ---------------------------------------------------------------

    def enter(self, operation: CommunicatorOperation) -> None:
        """Decide on `operation` when all ranks have issued this use of the name."""
        use: Named = operation.meets
        if self._closed is not None:
            operation.decide(again(self._closed))
            return
        operation.signature ^= use.edition
        use.operation = operation
        self._undecided.add(operation)
        known = self._names[use.name]
        known.waiting = use
        if known.number is None and self._leads:
            known.number = self._number_for(use.name)
        elif known.number is None:
            self._channel.send(self._ranks[0], self._topic, ["which", use.name, 0])
        self._start_waiting(known)

    def _numbered(self, name: str, number: int) -> None:
        known = self._names[name]
        known.number = number
        self._start_waiting(known)

    def _start_waiting(self, known: _NameState) -> None:
        """Start the comparison of the waiting use, if the name has a number and no held operation."""
        use = known.waiting
        if use is not None and known.number is not None and not known.held and self._closed is None:
            known.waiting = None
            self._compare(use, known, known.number)

    def _compare(self, use: Named, known: _NameState, number: int) -> None:
        operation = use.operation
        assert operation is not None
        if number < 0:
            known.number = None
            self._undecided.discard(operation)
            operation.decide(CommunicatorError(f"name={use.name!r}: {self._too_many()}", comm=self._comm))
            return
        self._by_number[number] = known
        use.number = operation.number = number_of_use(number, use.count)
        operation.signature ^= use.number - NAMED
        comparison = self._between.compare(tag_of(use.number), operation.signature)
        comparison.ended.wait(partial(self._compared, operation, comparison))

    def _compared(self, operation: CommunicatorOperation, comparison: Comparison, _: BaseException | None) -> None:
        """Decide on the operation after the comparison of all ranks."""
        self._undecided.discard(operation)
        if not operation.agreed.is_set:
            operation.decide(Differ(operation.number) if comparison.differs else None)
            if comparison.differs:
                self._on_differ(operation)

    def hold(self, number: int) -> None:
        """Let later uses of the name wait until `release`, since the tag of the failed operation `number` will repeat.

        The other ranks wait for this rank meanwhile, and so keep their record of that operation.
        """
        if (known := self._by_number.get(name_in(number))) is not None:
            known.held.add(number)

    def release(self, number: int) -> None:
        """Allow later uses again: the operation `number` has no messages in flight."""
        if (known := self._by_number.get(name_in(number))) is not None:
            known.held.discard(number)
            self._start_waiting(known)

    def close(self, error: BaseException) -> None:
        """Fail waiting and later uses with `error`."""
        if self._closed is None:
            self._closed = error
            undecided, self._undecided = self._undecided, set()
            for operation in undecided:
                operation.decide(again(error))

    # --- queries, from any thread ----------------------------------------------------------------------------

    def uses(self) -> dict[str, int]:
        """Return the number of operations that this rank has issued, by name."""
        return {name: known.issued for name, known in list(self._names.items())}

    def find(self, number: int) -> Named | None:
        """Return the operation with that number, or None if this rank has not issued or has forgotten the operation."""
        known = self._by_number.get(name_in(number))
        return next((use for use in (known.recent if known else ()) if use.number == number), None)

    def has_issued(self, number: int) -> bool:
        """Return True if this rank has issued the operation with that number."""
        known = self._by_number.get(name_in(number))
        return known is not None and number < number_of_use(name_in(number), known.issued)

    # --- the numbers of names --------------------------------------------------------------------------------

    def _number_for(self, name: str) -> int:
        """Return the number of `name`, or -1 for too many names (leader, any thread)."""
        with self._given_lock:
            if name not in self._given and len(self._given) == MOST_NAMES:
                return -1
            return self._given.setdefault(name, len(self._given))

    def _heard(self, world_rank: int, message: list[Any]) -> None:
        """Handle a message on the listener thread, also while the program computes on the loop's."""
        what, name, number = message
        if what == "which":
            self._channel.send(world_rank, self._topic, ["number", name, self._number_for(name)])
        else:
            numbered = partial(self._numbered, name, number)
            (self._progress.start if self._progress.owns_thread() else self._progress.start_in_thread)(numbered)

    def _too_many(self) -> str:
        return f"communicator {self._comm!r} has {MOST_NAMES} names already"
