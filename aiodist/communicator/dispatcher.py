"""Issues and tracks the operations of a communicator: claims, order, deadlines, completion, failure."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar
from weakref import WeakSet

from torch import Tensor

from aiodist import _core
from aiodist.backends.base import Transport, again
from aiodist.collectives.implementations import Repertoire
from aiodist.collectives.mailbox import Mailbox
from aiodist.collectives.traffic import Traffic
from aiodist.collectives.wrappers import nothing
from aiodist.communicator.agreement import Agreement
from aiodist.communicator.claims import Claim, acquire
from aiodist.communicator.conversation import LIVENESS_SECONDS
from aiodist.communicator.failures import Failures
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.issuing import Issuing
from aiodist.communicator.names import Named, Names
from aiodist.communicator.operation import CommunicatorOperation, NativeCall, Peer, Pending, When
from aiodist.communicator.oplog import OpLog
from aiodist.communicator.settlement import Settlement
from aiodist.communicator.watchdog import Watch, Watchdog
from aiodist.control import Channel, Exit
from aiodist.errors import (
    AiodistError,
    BackendError,
    CommunicatorAborted,
    CommunicatorClosed,
    CommunicatorError,
    MismatchAborted,
    MismatchError,
    OperationTimeout,
    PeerError,
)
from aiodist.handles import LARGE_BYTES, Account, Handle, Operation, Progress, internals, listed
from aiodist.handles.combinators import all_over
from aiodist.handles.kernel import Program, prepare
from aiodist.handles.origin import whence
from aiodist.handles.polling import transport_lock
from aiodist.handles.state import plight
from aiodist.handles.tracing import Ended

OnDiffer = Callable[[CommunicatorOperation], None]
T = TypeVar("T")
H = TypeVar("H", bound=Handle[Any])

_FORK_SECONDS = 1.0
_MOST_RECENT = 1024
_ELSEWHERE = (
    ". Other threads, with or without a loop, call what `await coll.dup(thread=True)` returns, and wait() for its "
    "handles"
)


class OperationObserver(Protocol):
    """Watches the operations of one communicator."""

    def issued(self, handle: Handle[Any], meets: Peer | Named | None = None, /) -> Ended:
        """Return a callback for the end of `handle`, in any thread; `meets` is the peer of a message or a named use.

        It is called with the handle, and with the name of the implementation if a lane has run the operation.
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
        """`ranks` are world ranks, in order; `agree` makes the agreement, None for a single rank.

        It takes the callbacks for an operation on which ranks differ, and for an error that ends the comparisons.
        `thread`: threads other than the loop's may issue too.
        """
        self.name = name
        self.repertoire = repertoire or Repertoire(transport)
        self.ranks = tuple(ranks)
        self.transport = transport
        self.progress = Progress.current()
        self.mailbox = Mailbox(transport)
        self.oplog = OpLog()
        self.issuing = Issuing(name) if thread else None
        """Guard of the issuing thread; None if only the loop's thread may issue."""
        self._start = self.progress.start_from_thread if thread else self.progress.start
        self.operations = Pending()
        """Pending operations."""
        self.recent: dict[int, Traffic] = {}
        """Messages of the last operations that leave this host."""
        self.failures = Failures(name, channel, ranks, transport, self.oplog, self.operations, self.recent)
        self.names = Names(
            name, channel, self.ranks, transport, self.progress, on_differ=self.failures.differ, broken=self._broken
        )
        self.agreement = None if agree is None else agree(self.failures.differ, self._broken)
        self.timeout: float | None = None
        self.large_bytes = LARGE_BYTES
        """Smallest operation, in bytes, whose native calls the progress thread makes."""
        self._rooms: list[Tensor] | None = [] if transport.capabilities().overruns else None
        self._refusal: AiodistError | RuntimeError | None = None
        self.settlement = Settlement(
            (name, transport.rank), self.progress, self.operations, self.failures.ends_alone, threads=thread
        )
        self.failures.names, self.failures.settlement = self.names, self.settlement
        self.failures.within, self.failures.abort_here = self.repertoire.within, self.abort
        self._watch = Watch.of(self.progress, channel)
        self._watchdog = Watchdog(name, self.operations, self.oplog, self.ranks, self.mailbox, self._watch)
        self._watchdog.uses = self.names.uses
        self._watchdog.abort = self.abort_everywhere
        self.account = Account(self.progress.loop, prompt=True, witness=self._watchdog)
        self._observer: OperationObserver | None = None
        self.on_receive: Callable[[Handle[Any], int], None] | None = None
        """Callback at the issue of each receive from one rank."""
        self.on_lost: list[Callable[[int, AiodistError], None]] = []
        """Callbacks, on the loop, for each lost rank of this communicator; -1 if the control channel is lost."""
        self.on_abort: list[Callable[[AiodistError], None]] = []
        """Callbacks, on the loop, at the abort; after the loss of a rank again, if another rank aborts it."""
        self.issuer: _core.Issuer | None = None
        """The core's fast path; None if the ranks do not share memory."""
        self._alive.add(self)

    @property
    def watch(self) -> Watch:
        """The watch over the pending operations of this rank."""
        return self._watch

    @classmethod
    def of_loop(cls, loop: asyncio.AbstractEventLoop) -> list[Dispatcher]:
        """Return the dispatchers of the communicators of `loop`."""
        return [dispatcher for dispatcher in cls._alive if dispatcher.progress.loop is loop]

    @classmethod
    def refusing(cls, name: str, transport: Transport, channel: Channel, error: CommunicatorError) -> Dispatcher:
        """Return a dispatcher that refuses every call, for a rank outside the group."""
        dispatcher = cls(f"{name} (outside)", transport, channel, [channel.rank])
        dispatcher._watchdog.close()
        dispatcher.unsubscribe()
        dispatcher._refuse(error)
        return dispatcher

    # --- watching ------------------------------------------------------------------------------------------

    def observe(self, observer: OperationObserver | None) -> None:
        """Notify `observer` of each later operation; on the loop's thread."""
        with self.undisturbed():
            self._observer = observer
            if self.issuer is not None:
                self.issuer.observer = None if observer is None else observer.issued

    def way_of(self, handle: Handle[Any]) -> str:
        """Return the name of the implementation that ran a collective, or "" if it is not known."""
        traffic = self.recent.get(handle.seq)
        return "" if traffic is None else traffic.way

    # --- issuing -------------------------------------------------------------------------------------------

    def waits_unseen(self, waits: Callable[[], bool]) -> None:
        """Register a wait for other ranks outside of operations: one exists while `waits` returns True."""
        self._watchdog.unseen.append(waits)

    def check_usable(self) -> None:
        """Raise the error of a call that is refused: closed, aborted, wrong thread or loop."""
        if self._refusal is not None:  # first: in a forked child asyncio reports that no loop runs
            raise self._refusal.with_traceback(None)
        if self.issuing is None or self.progress.owns_thread():
            self.check_loop()

    def check_loop(self) -> None:
        """Raise RuntimeError unless the calling thread runs the loop that this communicator was opened on."""
        self.progress.check_here(f"communicator {self.name!r}", _ELSEWHERE)

    def check_on_loop(self, call: str) -> None:
        """Raise the errors of `check_usable`, and `RuntimeError` in another thread even if it may issue."""
        self.check_usable()
        if not self.progress.owns_thread():
            seen = threading.current_thread().name
            raise RuntimeError(f"{call} of communicator {self.name!r} in thread {seen!r}: call it on the loop's thread")

    def undisturbed(self) -> AbstractContextManager[object]:
        """Return a context manager that keeps other threads from issuing, for changes by the loop."""
        return nullcontext() if self.issuing is None else self.issuing

    def traffic(self, seq: int | None = None) -> Traffic | None:
        """Return the record of the messages of operation `seq`, of the next one if None.

        It is None for a communicator of one rank.
        """
        if self.agreement is None:
            return None
        number = self.oplog.seq if seq is None else seq
        traffic = self.recent.get(number)
        if traffic is None:
            traffic = self.recent[number] = Traffic(self._rooms if self.agreement.several else None)
            while (oldest := next(iter(self.recent))) <= self.oplog.seq - _MOST_RECENT:
                del self.recent[oldest]
        return traffic

    def issue(
        self,
        what: Fingerprint,
        program: Program[Any],
        claims: Sequence[Claim] = (),
        *,
        nbytes: int = 0,
        timeout: float | None = None,
        convert: Callable[[Any], Any] | None = None,
        when: When | Named = When.HOST,
        queues: bool = False,
    ) -> Handle[Any]:
        """Issue `program` as a collective: check, claim, number, log, and start.

        Its number is the next one in the order of all ranks, and it begins `when` they agree on it. If `when` is a use
        of a name, it has no number in that order, and begins when every rank has issued the same use. `queues` is True
        if it only queues work on a device. `convert` makes the result, and may run code of the user. Raises, with
        nothing changed, if the communicator refuses calls or bytes are in flight.
        """
        operation = self.prepare(what, claims, nbytes, timeout, when, convert=convert)
        return self.launch(operation, program, 0 if queues else nbytes)

    def prepare(
        self,
        what: Fingerprint,
        claims: Sequence[Claim],
        nbytes: int,
        timeout: float | None,
        when: When | Named = When.HOST,
        *,
        convert: Callable[[Any], Any] | None = None,
        messages: bool = True,
    ) -> CommunicatorOperation:
        """Return a collective that is checked, claimed, numbered and logged; it must be launched next.

        `messages` is False if it sends none of its own, as one call of a library.
        """
        if isinstance(when, Named):
            named = self.new_handle(Handle, what.kind, nbytes, timeout, when.count)
            operation = CommunicatorOperation(
                named, claims, convert, meets=when, signature=what.word, when=When.ALL, traffic=when.traffic
            )
            operation.set_name(f"{what.kind} {when.name!r}")
            self.enter(operation)
            self.names.record(when, named, what)
            self._watchdog.use_issued(when)
        else:
            handle = self.new_handle(Handle, what.kind, nbytes, timeout)
            number = handle.seq
            operation = CommunicatorOperation(
                handle,
                claims,
                convert,
                number=number,
                signature=what.word ^ number,
                when=when,
                traffic=self.traffic(number) if messages or self._observer is not None else None,
            )
            self.enter(operation)
            self.oplog.record(what, internals.issued_at(handle))
        return operation

    def launch(
        self, operation: CommunicatorOperation, work: Program[Any] | NativeCall, work_bytes: int = 0
    ) -> Handle[Any]:
        """Start a collective that was prepared; `work_bytes` are the bytes that this rank copies or reduces."""
        assert operation.handle is not None
        begin = partial(self._begin, operation, work)
        operation.large = work_bytes >= self.large_bytes
        if operation.large:
            self.progress.start_in_thread(begin)
        else:
            self._start(begin)
        return operation.handle

    def _begin(self, operation: CommunicatorOperation, work: Program[Any] | NativeCall) -> None:
        """Run it, and let the ranks compare it: the work waits until it may begin. The transport lock is held."""
        if self.agreement is None:
            operation.decide(None)
        elif operation.meets is True:
            self.failures.join(operation)
        self.settlement.run(operation, work)
        if isinstance(operation.meets, Named):
            if self.agreement is not None:
                self.names.enter(operation.meets, operation)
        elif self.agreement is not None:
            self.agreement.enter(operation)

    def barrier(self, timeout: float | None, kind: str = "barrier") -> Handle[None]:
        """Issue a barrier: an operation without data, which ends when the ranks agree on it."""
        with self.undisturbed():
            return self.issue(Fingerprint(kind), prepare(nothing, None), timeout=timeout, when=When.ALL)

    def count_message(self) -> None:
        """Count an operation of messages, for the watchdog."""
        self._watchdog.messages += 1

    def start(self, call: Callable[[], None], nbytes: int) -> None:
        """Make a call with the transport lock held; a large operation runs in the progress thread."""
        if nbytes >= self.large_bytes:
            self.progress.start_in_thread(call)
        else:
            self._start(call)

    def enter(self, operation: CommunicatorOperation) -> None:
        """Claim its bytes and enter it in the table."""
        handle = operation.handle
        assert handle is not None
        acquire(operation.claims, handle)
        if (claims := operation.claims) and (claims[0].writes or claims[-1].writes):  # those of one kind follow another
            operation.set_in_place(True)
        if operation.traffic is not None:
            operation.traffic.agreed = operation.agreed.wait
        self.operations.add(operation)
        if self._observer is not None or not self._watch.watching:
            self.watch_over(handle, None if operation.meets is True else operation.meets)

    def new_handle(self, kind: type[H], op: str, nbytes: int, timeout: float | None, number: int | None = None) -> H:
        """Return the handle of an operation; raise if the communicator refuses calls."""
        if self._refusal is not None or _get_running_loop() is not self.progress.loop:
            self.check_usable()
        origin = self.oplog.caller or whence(4)
        handle = kind(self.progress, op, self.oplog.seq if number is None else number, nbytes, origin, self.account)
        if timeout is not None or self.timeout is not None:
            self._set_deadline(handle, timeout)
        return handle

    def watch_over(self, handle: Handle[Any], meets: Peer | Named | None) -> None:
        """Notify the observer of an operation, and start the watchdog."""
        if self._observer is not None:
            Operation.of(handle).observe(self._observer.issued(handle, meets))
        if not self._watch.watching:
            self._watch.keep_watch()

    def set_deadline(self, handle: Handle[Any], timeout: float | None) -> None:
        """Set the deadline of a handle: `timeout` seconds, or the communicator's default; none if both are None."""
        if (timeout is not None or self.timeout is not None) and internals.is_pending(handle):
            self._set_deadline(handle, timeout)

    def _set_deadline(self, handle: Handle[Any], timeout: float | None) -> None:
        seconds = self.timeout if timeout is None else timeout
        assert seconds is not None
        Operation.of(handle).set_deadline(seconds)
        self._watchdog.expect(seconds)

    def _broken(self, error: BaseException) -> None:
        """Abort the communicator after an error of the comparisons, unless a rank is lost."""
        wrapped = BackendError(f"the ranks of communicator {self.name!r} cannot be compared: {error}")
        wrapped.__cause__ = error
        abort = partial(self.abort_everywhere, wrapped)
        self.failures.inquire(wrapped, lambda _: self.progress.post(abort))

    # --- the end -------------------------------------------------------------------------------------------

    @property
    def pending_more(self) -> bool:
        """True if several operations are pending."""
        return len(self.operations) > 1

    def pending(self) -> list[Handle[Any]]:
        """Return the pending operations, in order of issue."""
        return [handle for handle in self.operations if internals.is_pending(handle)]

    def pending_collectives(self) -> list[Handle[Any]]:
        """Return the pending collectives."""
        return [handle for handle, meets in self.operations.items() if meets is True and internals.is_pending(handle)]

    def cancel_receives(self) -> None:
        """Withdraw every unmatched receive, and warn of each: RuntimeWarning if it was never awaited."""
        for handle in self.pending():
            forgotten = not (internals.is_retrieved(handle) or internals.is_awaited(handle))
            if handle.op.startswith("recv") and handle.cancel() and (where := handle.origin) is not None:
                message = f"{handle} was never matched{' nor awaited' * forgotten}, and withdrawn at close"
                kind = RuntimeWarning if forgotten else ResourceWarning
                warnings.warn_explicit(message, kind, where.filename, where.lineno)

    async def drain(self, seconds: float) -> None:
        """Wait until no operation is pending; after `seconds` raise `OperationTimeout` with the pending ones."""
        pending = self.pending()
        if pending and self._refusal is None:
            await asyncio.wait([all_over(pending, self.progress.loop)], timeout=seconds)
            left = [handle for handle in pending if not handle.done()]
            if left:
                known, late = plight(left)
                text = f"still pending after {round(seconds, 1):g} s: {listed(left)}{known}"
                raise OperationTimeout(text, late=late, comm=self.name)

    def peer_lost(self, exit: Exit) -> None:
        """Abort the communicator after the loss of a rank: pending operations and later calls raise its error."""
        error = exit.error()
        self.failures.leave(exit)
        self.abort(error)
        for tell in list(self.on_lost):
            tell(self.ranks.index(exit.rank) if exit.rank in self.ranks else -1, error)

    async def settled(self) -> None:
        """Wait until all issued collectives have ended."""
        if pending := [handle for handle in self.pending_collectives() if not internals.is_detached(handle)]:
            await all_over(pending, self.progress.loop)

    def supersede(self, error: CommunicatorAborted) -> None:
        """Abort it on all ranks, unless it is aborted; later calls raise `error` in place of the first reason."""
        aborted = self._refusal is not None
        self.abort_everywhere(error)
        with self.undisturbed():
            self._refuse(error)
        if aborted:  # as after the loss of a rank
            self._notify_abort(error)
            self.failures.tell_abort(str(error))

    def abort_everywhere(self, error: AiodistError) -> None:
        """Abort it on all ranks, unless that was done."""
        if self._refusal is None:
            # First, so that no rank reports lost messages as the cause.
            self.failures.tell_abort(f"rank {self.transport.rank}: {error}")
            self.abort(error)

    def abort_soon(self, error: AiodistError, *, tell: bool) -> None:
        """Abort it here now, and later on the other ranks, unless they have aborted it for their own reasons."""
        if self._refusal is None:
            self.abort(error)
            if tell:
                text = f"rank {self.transport.rank}: {error}"
                self.progress.loop.call_later(LIVENESS_SECONDS, self.failures.tell_abort, text)

    def abort(self, error: AiodistError) -> None:
        """Reject pending operations and refuse later calls; transfers that never end keep their buffers."""
        if self._refusal is not None:
            if isinstance(error, CommunicatorAborted):
                self._notify_abort(error)
            return
        with self.undisturbed():
            self._refuse(self._aborted(error))
        self._watchdog.close()
        self.progress.with_lock(partial(self._fail_all, error))
        self._notify_abort(error)

    def _notify_abort(self, error: AiodistError) -> None:
        for tell in list(self.on_abort):
            tell(error)

    def _fail_all(self, error: AiodistError) -> None:
        waiting = []
        for handle in self.pending():
            operation = self.operations.find(handle)
            if isinstance(error, PeerError) and operation is not None and self.failures.is_open(operation):
                waiting.append(operation)  # the verdict may be that the ranks differ
            else:
                self.settlement.fail(handle, (operation and operation.verdict) or again(error))
        self.operations.clear()
        for operation in waiting:
            self.operations.add(operation)
        self.failures.abort(error)
        self.mailbox.abort(error)
        self.names.close(error)
        if self.agreement is not None:
            self.agreement.close(error)
        if self.repertoire.within is not None:
            self.repertoire.within.abort(error)

    def _aborted(self, error: AiodistError) -> AiodistError:
        if not isinstance(error, MismatchError) or isinstance(error, MismatchAborted):
            return error
        aborted = MismatchAborted(f"communicator {self.name!r} was aborted: {error}", comm=self.name)
        aborted.__cause__ = error
        return aborted

    def close(self) -> None:
        """Refuse every later call."""
        self._watchdog.close()
        self.unsubscribe()
        if self._refusal is None:
            with self.undisturbed():
                self._refuse(CommunicatorClosed(f"communicator {self.name!r} is closed", comm=self.name))
        self.account.judge()

    def unsubscribe(self) -> None:
        """Receive no more messages of other ranks."""
        self.failures.close()
        self.names.unsubscribe()

    @property
    def refusal(self) -> AiodistError | RuntimeError | None:
        """Error of refused calls; None if calls are accepted."""
        return self._refusal

    def forked(self) -> None:
        """Refuse all calls in a forked child."""
        self.issuing = None  # a thread that does not exist here may have begun
        self._watch.members.clear()  # its timer may still fire here
        self._refuse(RuntimeError(f"communicator {self.name!r} was opened before os.fork: a child cannot use it"))

    def _refuse(self, why: AiodistError | RuntimeError) -> None:
        self._refusal = why
        if self.issuer is not None:
            self.issuer.open = False


def _after_fork() -> None:
    _held_over_fork.clear()
    for dispatcher in list(Dispatcher._alive):
        dispatcher.forked()


_held_over_fork: list[bool] = []


def _before_fork() -> None:
    """Fork while no other thread is in native calls: a lock held there would never be released in the child."""
    _held_over_fork.append(transport_lock.acquire(timeout=_FORK_SECONDS))


def _after_fork_in_parent() -> None:
    if _held_over_fork.pop():
        transport_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
