"""Issues the operations of a communicator, and connects the parts that compare, end and watch operations."""

from __future__ import annotations

import asyncio
import os
import threading
from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any, ClassVar, Literal, Protocol, TypeVarTuple
from weakref import WeakSet

from aiodist.backends.base import Transport
from aiodist.collectives.endpoint import RecentTraffic
from aiodist.collectives.implementations import Repertoire
from aiodist.collectives.mailbox import Mailbox
from aiodist.collectives.operations import nothing
from aiodist.communicator.agreement import Agreement
from aiodist.communicator.changes import marks_of
from aiodist.communicator.claims import claim, note_write
from aiodist.communicator.counts import Counts
from aiodist.communicator.failures import Failures
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.issued import Issued
from aiodist.communicator.issuing import Issuing
from aiodist.communicator.lifetime import Lifetime
from aiodist.communicator.names import Named, NamedOperations
from aiodist.communicator.operation import CommunicatorOperation, NativeCall, Peer, Pending, Receive, When
from aiodist.communicator.oplog import OpLog
from aiodist.communicator.settlement import Settlement
from aiodist.communicator.watchdog import Watch, Watchdog
from aiodist.control import Channel
from aiodist.errors import CommunicatorError
from aiodist.handles import LARGE_BYTES, Account, Handle, Operation, Posted, Progress, in_flight, internals
from aiodist.handles.kernel import Program
from aiodist.handles.origin import whence
from aiodist.handles.tracing import Ended
from aiodist.types import ANY, check_timeout

OnDiffer = Callable[[CommunicatorOperation], None]
Ts = TypeVarTuple("Ts")

_ELSEWHERE = (
    ". Other threads, with or without a loop, call what `await coll.dup(thread=True)` returns, and wait() for its "
    "handles"
)


class OperationObserver(Protocol):
    """Watches the operations of one communicator."""

    def issued(self, handle: Handle[Any], meets: Peer | Named | None = None, /) -> Ended:
        """Return a callback for the end of `handle`, in any thread. `meets` is a message's peer, a named use, or None.

        The callback takes the handle, with the name of the implementation if a lane has run the operation.
        """


class Dispatcher:
    """Issues the operations of one communicator and tracks them until their end."""

    _alive: ClassVar[WeakSet[Dispatcher]] = WeakSet()

    def __init__(
        self,
        name: str,
        transport: Transport,
        channel: Channel,
        ranks: Sequence[int],
        *,
        repertoire: Repertoire | None = None,
        agree: Callable[[OnDiffer, Callable[[BaseException], None]], Agreement] | None = None,
        thread: bool = False,
    ) -> None:
        """`ranks` are world ranks, in order. `agree` makes the agreement of several ranks.

        `agree` takes two callbacks: one for an operation on which ranks differ, one for an error that ends the
        comparisons. `thread` is True if threads other than the loop's may issue too.
        """
        self.name = name
        self.repertoire = repertoire or Repertoire(transport)
        self.ranks = tuple(ranks)
        self.transport = transport
        self.progress = Progress.current()
        self.mailbox = Mailbox(transport)
        self.oplog = OpLog()
        self.operations = Pending()
        """Pending operations."""
        self.timeout: float | None = None
        self.large_bytes = LARGE_BYTES
        """Smallest operation, in bytes, whose native calls the progress thread makes."""
        self.counts: Counts | None = None
        """Counts by kind, or None without metrics."""
        self._observer: OperationObserver | None = None
        place, progress, within = (name, transport.rank), self.progress, self.repertoire.within
        failures = self.failures = Failures(name, channel, ranks, transport, within)
        on_differ, broken = failures.differ, failures.break_off
        self.names = NamedOperations(name, channel, self.ranks, transport, progress, on_differ=on_differ, broken=broken)
        alone = partial(Agreement, progress, None, None, None, several=False, on_differ=on_differ)
        self.agreement = alone() if agree is None else agree(on_differ, broken)
        overruns = self.agreement.several and transport.capabilities().overruns
        self.recent = RecentTraffic([] if overruns else None)
        """Records of the last operations' messages to and from other hosts."""
        self.settlement = Settlement(place, progress, self.operations, failures.ends_alone, threads=thread)
        watch, uses = Watch.of(progress, channel), self.names.uses
        self.watchdog = Watchdog(name, self.operations, self.oplog, self.ranks, self.mailbox, watch, uses)
        self.account = Account(progress.loop, prompt=True, late=self.watchdog.late, details=self.watchdog.details)
        issuing = Issuing(name) if thread else None
        self.lifetime = Lifetime(
            place, self.ranks, progress, self.operations, self.settlement, failures, self.watchdog, issuing
        )
        self.lifetime.subscriptions += [failures.close, self.names.unsubscribe]
        self.lifetime.stops += [self.mailbox.abort, self.names.close, self.agreement.close]
        if within is not None:
            self.lifetime.stops.append(within.abort)
        # These parts and the lifetime use one another.
        self.watchdog.abort = self.lifetime.abort_everywhere
        issued = Issued(self.oplog, self.operations, self.recent, self.names)
        failures.connect(issued, self.names, self.settlement, self.lifetime.abort, self.lifetime.abort_everywhere)
        self._alive.add(self)

    @property
    def watch(self) -> Watch:
        """The watch over the pending operations of this rank."""
        return self.watchdog.watch

    @classmethod
    def of_loop(cls, loop: asyncio.AbstractEventLoop) -> list[Dispatcher]:
        """Return the dispatchers of the communicators of `loop`."""
        return [dispatcher for dispatcher in cls._alive if dispatcher.progress.loop is loop]

    @classmethod
    def refusing(cls, name: str, transport: Transport, channel: Channel, error: CommunicatorError) -> Dispatcher:
        """Return a dispatcher that refuses every call, for a rank outside the group."""
        dispatcher = cls(f"{name} (outside)", transport, channel, [channel.rank])
        dispatcher.watchdog.close()
        dispatcher.lifetime.unsubscribe()
        dispatcher.lifetime.refuse(error)
        return dispatcher

    # --- watching ------------------------------------------------------------------------------------------

    def observe(self, observer: OperationObserver | None) -> None:
        """Notify `observer` of each later operation (loop's thread)."""
        with self.lifetime.undisturbed():
            self._observer = observer
            if self.lifetime.issuer is not None:
                self.lifetime.issuer.observer = None if observer is None else observer.issued

    def count(self) -> Counts:
        """Count the operations, bytes and waits from now on, and return the counts (loop's thread)."""
        if self.counts is None:
            self.counts = self.settlement.counts = Counts(self.oplog, self.account)
            self.progress.counts_waits = True
        return self.counts

    def way_of(self, handle: Handle[Any]) -> str:
        """Return the name of the implementation that ran a collective, or "" if the name is not known."""
        traffic = self.recent.get(handle.seq)
        return "" if traffic is None else traffic.way

    # --- issuing -------------------------------------------------------------------------------------------

    @property
    def strict(self) -> bool:
        """True compares the bytes that operations read, and makes a change of a tensor in flight an error."""
        return self.account.strict

    def check_usable(self) -> None:
        """Raise if the communicator was closed or aborted, or if the calling thread or loop is wrong."""
        if self.lifetime.refusal is not None:  # first, since in a forked child asyncio finds no running loop
            raise self.lifetime.refusal.with_traceback(None)
        if self.lifetime.issuing is None or self.progress.owns_thread():
            self.check_loop()

    def check_loop(self) -> None:
        """Raise RuntimeError unless the calling thread runs the loop that this communicator was opened on."""
        self.progress.check_here(f"communicator {self.name!r}", _ELSEWHERE)

    def check_on_loop(self, call: str) -> None:
        """Raise the errors of `check_usable`, or `RuntimeError` in another thread even if that thread may issue."""
        self.check_usable()
        if not self.progress.owns_thread():
            seen = threading.current_thread().name
            raise RuntimeError(f"{call} of communicator {self.name!r} in thread {seen!r}: call it on the loop's thread")

    def issue(
        self,
        operation: CommunicatorOperation,
        what: Fingerprint,
        make: Callable[[CommunicatorOperation], Any],
        *,
        nbytes: int = 0,
        timeout: float | None = None,
        work_bytes: int | None = None,
        messages: bool = True,
        receive: Receive | None = None,
    ) -> Handle[Any]:
        """Check, claim, number, log and start a new operation. `core/issue.c` does the same for the lanes.

        `make` returns the work of the numbered operation: a program, a `NativeCall` or a `MailboxReceive`. `nbytes` are
        the bytes of the tensors. `work_bytes` are the bytes that this rank copies or reduces, by default `nbytes`.
        `messages` is False if a library carries all messages of a collective. `receive` owns the claims of a receive,
        whose handle only the program holds.

        Raises, with nothing changed, if the communicator refuses calls, `timeout` is no deadline, bytes are in flight,
        or `make` raises.
        """
        if self.lifetime.refusal is not None or _get_running_loop() is not self.progress.loop:
            self.check_usable()
        if timeout is not None:
            check_timeout(timeout)
        meets = operation.meets
        origin = self.oplog.caller or whence(3)
        number = meets.count if isinstance(meets, Named) else self.oplog.seq
        handle: Handle[Any]
        if receive is None:
            writes = True in [one.writes for one in operation.claims]
            handle = Handle(self.progress, what.kind, number, nbytes, origin, self.account, writes)
        else:
            handle = Posted(self.progress, what.kind, number, nbytes, origin, self.account)
            receive.own(handle, origin)
        operation.handle = handle
        work = self._claim(operation, handle, what, make, receive, messages or self._observer is not None)
        if timeout is not None or self.timeout is not None:
            self._set_deadline(handle, timeout)
        self._log(handle, meets, what, origin)
        work_bytes = nbytes if work_bytes is None else work_bytes
        operation.large = work_bytes >= self.large_bytes
        if receive is not None:
            if self.watchdog.on_receive is not None and receive.peer.src != ANY:
                self.watchdog.on_receive(handle, receive.peer.src)
            self.start(work_bytes, self.mailbox.receive, work)
        elif isinstance(meets, Peer):
            self.start(work_bytes, self.settlement.begin, operation, work)
        else:
            self.start(work_bytes, self._begin, operation, work)
        return handle

    def _claim(
        self,
        operation: CommunicatorOperation,
        handle: Handle[Any],
        what: Fingerprint,
        make: Callable[[CommunicatorOperation], Any],
        receive: Receive | None,
        messages: bool,
    ) -> Any:  # noqa: ANN401
        """Claim the bytes, sign a collective, make the work, and enter the operation in the table. Return the work.

        `messages` is False if no record of the messages of a collective is needed.
        """
        claims, meets = operation.claims, operation.meets
        try:
            claim(claims, handle if receive is None else receive)
            try:
                if meets is True:
                    operation.number = number = handle.seq
                    operation.signature = what.word ^ number
                    if messages and self.transport.size > 1:
                        operation.traffic = self.recent.enter(number)
                elif isinstance(meets, Named):
                    operation.set_name(f"{what.kind} {meets.name!r}")
                    operation.signature, operation.when, operation.traffic = what.word, When.ALL, meets.traffic
                if operation.traffic is not None:
                    operation.traffic.comparison = operation.agreed.wait
                work = make(operation)
            except BaseException:
                in_flight.release_all(claims)
                self.recent.pop(operation.number, None)
                raise
        except BaseException:
            Operation.of(handle).mark_retrieved()  # the operation was never issued
            raise
        note_write(claims)
        operation.marks = marks_of(operation.claims, strict=self.strict)
        if meets is True:
            self.operations.collectives[operation.number] = operation
        elif receive is None:
            self.operations.others[handle] = operation
        return work

    def _log(
        self, handle: Handle[Any], meets: Literal[True] | Named | Peer, what: Fingerprint, origin: tuple[CodeType, int]
    ) -> None:
        """Record an operation in the log, for the observer and for the watchdog."""
        if self._observer is not None:
            Operation.of(handle).observe(self._observer.issued(handle, None if meets is True else meets))
        if not self.watchdog.watch.watching:
            self.watchdog.watch.keep_watch()
        if meets is True:
            self.oplog.record(what, origin, handle.nbytes)
        elif isinstance(meets, Named):
            self.names.record(meets, handle, what)
            self.watchdog.use_issued(meets)
        else:
            self.watchdog.messages += 1
        if self.counts is not None and meets is not True:
            self.counts.issued[what.kind] += 1
            if isinstance(meets, Named) or meets.src is None:  # the bytes of a receive count when they have arrived
                self.counts.nbytes[what.kind] += handle.nbytes

    def _begin(self, operation: CommunicatorOperation, work: Program[Any] | NativeCall) -> None:
        """Run the work after the ranks have agreed on the operation. The transport lock is held."""
        if self.failures.failed:
            self.failures.join(operation)
        operation.admitted.wait(partial(self.settlement.begin, operation, work))
        meeting = self.agreement if operation.meets is True else self.names
        meeting.enter(operation)

    def barrier(self, timeout: float | None, kind: str = "barrier") -> Handle[None]:
        """Issue a barrier, an operation without data that ends when the ranks agree."""
        with self.lifetime.undisturbed():
            return self.issue(CommunicatorOperation(when=When.ALL), Fingerprint(kind), nothing, timeout=timeout)

    def start(self, nbytes: int, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Make a call with the transport lock held, in the progress thread from `large_bytes` on."""
        if nbytes >= self.large_bytes:
            self.progress.start_in_thread(call, *args)
        elif self.lifetime.issuing is None:
            self.progress.start(call, *args)
        else:
            self.progress.start_from_thread(call, *args)

    def set_deadline(self, handle: Handle[Any], timeout: float | None = None) -> None:
        """Set the deadline of a handle: `timeout` seconds, or the communicator's default."""
        if (timeout is not None or self.timeout is not None) and internals.is_pending(handle):
            self._set_deadline(handle, timeout)

    def _set_deadline(self, handle: Handle[Any], timeout: float | None) -> None:
        seconds = self.timeout if timeout is None else timeout
        assert seconds is not None
        Operation.of(handle).set_deadline(seconds)
        self.watchdog.expect(seconds)


def _after_fork() -> None:
    for dispatcher in list(Dispatcher._alive):
        dispatcher.lifetime.forked()


os.register_at_fork(after_in_child=_after_fork)
