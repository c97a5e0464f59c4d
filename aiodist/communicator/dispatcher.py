"""Issues and tracks the operations of a communicator: claims, order, deadlines, completion, failure."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from asyncio import _get_running_loop
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from aiodist import _core
from aiodist.backends.base import NAMED, Begin, Done, Refused, Transport, again, key_of, once, ours
from aiodist.collectives.cuda.queued import Queue
from aiodist.collectives.implementations import Repertoire
from aiodist.collectives.mailbox import Arrived, Mailbox
from aiodist.collectives.traffic import Differ, Traffic
from aiodist.collectives.wrappers import nothing
from aiodist.communicator.claims import Claim, acquire, release
from aiodist.communicator.completion import Completion, through_gate
from aiodist.communicator.disputes import Disputes
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.gate import Entry, Gate, When
from aiodist.communicator.issuing import Issuing
from aiodist.communicator.names import Named, Names
from aiodist.communicator.oplog import OpLog
from aiodist.communicator.pending import Pending
from aiodist.communicator.receiving import Receiving, Reception
from aiodist.communicator.watchdog import Peer, Use, Watch, Watchdog
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
from aiodist.handles import LARGE_BYTES, Account, Handle, Operation, Posted, Progress, in_flight, internals, listed
from aiodist.handles.combinators import all_over
from aiodist.handles.kernel import Program, prepare
from aiodist.handles.origin import known_files, whence
from aiodist.handles.progress import transport_lock
from aiodist.handles.state import plight
from aiodist.handles.tracing import Ended
from aiodist.streams.events import device_error
from aiodist.streams.writes import increment_version
from aiodist.types import ANY

T = TypeVar("T")
H = TypeVar("H", bound=Handle[Any])

_FORK_SECONDS = 1.0
_ANSWER_SECONDS = 0.5  # for what made an operation fail to be told by others: that ranks differ, or that one is gone
_MOST_RECENT = 1024
_ELSEWHERE = (
    ". Other threads, with or without a loop, call what `await coll.dup(thread=True)` returns, and wait() for its "
    "handles"
)
_KNOWN = (MismatchError, CommunicatorError, PeerError, asyncio.CancelledError)
"""Errors of a collective that the other ranks find, or are told of, by themselves."""


class ReductionPlan(NamedTuple):
    """How to reduce tensors of one kind with a single native call, worked out at the first of them."""

    what: Fingerprint
    nbytes: int
    way: str
    start: Begin


class QueuePlan(NamedTuple):
    """The same for tensors on a device, where a call only queues."""

    what: Fingerprint
    nbytes: int
    way: str
    queue: Queue
    stream: Callable[[], torch.cuda.Stream]
    """Returns the caller's current one of the device; raises RuntimeError while it captures a graph."""


class OperationObserver(Protocol):
    """Watches the operations of one communicator."""

    def issued(self, handle: Handle[Any], meets: Peer | Named | None = None, /) -> Ended:
        """Return what is to be called, in any thread, when `handle` is over; `meets` is what has no place in the order.

        It is called with the handle, and with the name of the implementation where a lane has done it.
        """


class Dispatcher:
    """Issues the operations of one communicator and answers for them until they are over."""

    _alive: ClassVar[WeakSet[Dispatcher]] = WeakSet()

    def __init__(
        self,
        name: str,
        transport: Transport,
        channel: Channel,
        ranks: Sequence[int],
        *,
        repertoire: Repertoire | None = None,
        gate: Callable[[Callable[[Entry], None], Callable[[BaseException], None]], Gate] | None = None,
        thread: bool = False,
    ) -> None:
        """`ranks` are the world ranks of the communicator's, in order; `gate` makes its gate, None where one is alone.

        A gate is given what it calls with each operation that ranks differ on, and with what keeps it from comparing.
        `thread`: other threads may issue beside the loop's.
        """
        self.name = name
        self.repertoire = repertoire or Repertoire(transport)
        self.ranks = tuple(ranks)
        self.transport = transport
        self.progress = Progress.current()
        self.mailbox = Mailbox(transport)
        self.oplog = OpLog()
        self.issuing = Issuing(name) if thread else None
        """Who issues just now, where several threads may; None where only the loop's thread does."""
        self._start = self.progress.start_from_thread if thread else self.progress.start
        self.disputes = Disputes(name, channel, ranks, transport, self, self.progress)
        self.names = Names(
            name, channel, self.ranks, transport, self.progress, on_differ=self.disputes.begin, broken=self._broken
        )
        self.gate = None if gate is None else gate(self.disputes.begin, self._broken)
        self.timeout: float | None = None
        self.large_bytes = LARGE_BYTES
        """From here on the progress thread makes the native calls."""
        self.failing: dict[int, BaseException] = {}
        """Collectives that cannot go on here, while others are heard on why."""
        self._freed: set[int] = set()
        """Those that failed, or will, and whose memory nothing uses any more."""
        self._rejected: dict[int, BaseException] = {}
        """Those that are rejected as soon as that is so."""
        self.recent: dict[int, Traffic] = {}
        """Of the last operations that leave this host."""
        self._rooms: list[Tensor] | None = [] if transport.capabilities().overruns else None
        self.operations = Pending()
        """Pending operations."""
        self._refusal: AiodistError | RuntimeError | None = None
        self._watch = Watch.of(self.progress, channel)
        self._watchdog = Watchdog(name, self.operations, self.oplog, self.ranks, self.mailbox, self._watch)
        self._watchdog.uses = self.names.uses
        self._watchdog.give_up = self.abort_everywhere
        self.account = Account(self.progress.loop, prompt=True, witness=self._watchdog)
        self._observer: OperationObserver | None = None
        self.on_receive: Callable[[Handle[Any], int], None] | None = None
        """Told of each receive from a certain rank, when it is issued."""
        self.on_lost: list[Callable[[int, AiodistError], None]] = []
        """Told, on the loop, of each rank of this communicator that is gone; -1 when nothing can be known any more."""
        self.on_abort: list[Callable[[AiodistError], None]] = []
        """Told, on the loop, when it is given up, for any reason; after a loss again when a rank has given it up."""
        self.issuer = self._make_issuer()
        """What issues allreduces that a lane does; None where no lane does."""
        self._alive.add(self)

    def _make_issuer(self) -> _core.Issuer | None:
        within = self.repertoire.within
        if within is None or self.gate is None or self.gate.several:
            return None
        near = within.ordered.near
        issuer = _core.Issuer(
            within.ordered.core,
            in_flight,
            self.oplog,
            self.progress,
            near.arena.addresses,
            self.account,
            self.operations.issued,
            self.progress.inbox,
            self.disputes.to_fail,
            known_files,
            self._watch,
            near.publish,
            self._failed_in_lane,
            Handle,
            Tensor,
            Parameter,
            increment_version,
            torch.is_grad_enabled,
        )
        issuer.threads = self.issuing is not None
        return issuer

    @property
    def watch(self) -> Watch:
        """The watch over the pending operations of this rank."""
        return self._watch

    @classmethod
    def of_loop(cls, loop: asyncio.AbstractEventLoop) -> list[Dispatcher]:
        """Return those of the communicators that live on `loop`."""
        return [dispatcher for dispatcher in cls._alive if dispatcher.progress.loop is loop]

    @classmethod
    def refusing(cls, name: str, transport: Transport, channel: Channel, error: CommunicatorError) -> Dispatcher:
        """Return one that refuses every call, for a rank outside the group."""
        dispatcher = cls(f"{name} (outside)", transport, channel, [channel.rank])
        dispatcher._watchdog.close()
        dispatcher.unsubscribe()
        dispatcher._refuse(error)
        return dispatcher

    # --- watching ------------------------------------------------------------------------------------------

    def observe(self, observer: OperationObserver | None) -> None:
        """Have `observer` told of each operation from now on; on the loop's thread."""
        with self.undisturbed():
            self._observer = observer
            if self.issuer is not None:
                self.issuer.observer = None if observer is None else observer.issued

    def way_of(self, handle: Handle[Any]) -> str:
        """Return the name of the implementation that ran a collective in the order, "" where there was none."""
        traffic = self.recent.get(handle.seq)
        return "" if traffic is None else traffic.way

    # --- issuing -------------------------------------------------------------------------------------------

    def waits_unseen(self, waits: Callable[[], bool]) -> None:
        """While `waits` returns True, something waits for other ranks by a way of its own, not by an operation."""
        self._watchdog.unseen.append(waits)

    def check_usable(self) -> None:
        """Raise what a call must raise: closed, aborted, wrong thread or loop."""
        if self._refusal is not None:  # before all else: in a forked child asyncio says that no loop runs
            raise self._refusal.with_traceback(None)
        if self.issuing is None or self.progress.owns_thread():
            self.check_loop()

    def check_loop(self) -> None:
        """Raise RuntimeError unless the calling thread runs the loop that this communicator was opened on."""
        self.progress.check_here(f"communicator {self.name!r}", _ELSEWHERE)

    def check_on_loop(self, call: str) -> None:
        """Raise what `check_usable` does, and `RuntimeError` in another thread though it may issue otherwise."""
        self.check_usable()
        if not self.progress.owns_thread():
            seen = threading.current_thread().name
            raise RuntimeError(f"{call} of communicator {self.name!r} in thread {seen!r}: call it on the loop's thread")

    def undisturbed(self) -> AbstractContextManager[object]:
        """Have no thread issue meanwhile, for what the loop does to this communicator."""
        return nullcontext() if self.issuing is None else self.issuing

    def traffic(self, seq: int | None = None) -> Traffic | None:
        """Return what takes note of the messages of operation `seq`, of the next one where that is None.

        None where there is nobody to send any to.
        """
        if self.gate is None:
            return None
        number = self.oplog.seq if seq is None else seq
        traffic = self.recent.get(number)
        if traffic is None:
            traffic = self.recent[number] = Traffic(self._rooms if self.gate.several else None)
            while (oldest := next(iter(self.recent))) <= self.oplog.seq - _MOST_RECENT:
                del self.recent[oldest]
        return traffic

    def collective(
        self,
        what: Fingerprint,
        program: Program[T],
        claims: Sequence[Claim] = (),
        *,
        nbytes: int = 0,
        timeout: float | None = None,
        convert: Callable[[Any], Any] | None = None,
        when: When | Named = When.HOST,
        queues: bool = False,
    ) -> Handle[Any]:
        """Issue `program` as an operation that all ranks take part in.

        It is the next one in their order, and begins `when` they are known to agree on it; or it is that use of a name:
        it has no number in the order, and begins when every rank has issued the same as that. With `queues` it only
        queues its work on a device, which takes no time. `convert` makes the result of what the program returns, on
        the loop's thread: it may run the user's code.
        """
        if isinstance(when, Named):
            handle = self._handle(what.kind, nbytes, claims, timeout, when)
            self.names.record(when, handle, what)
            self._watchdog.came(when)
        else:
            traffic = self.traffic()
            handle = self._handle(what.kind, nbytes, claims, timeout, what=what)
        completion = Completion(self, handle, claims, convert)
        work_bytes = 0 if queues else nbytes
        large = work_bytes >= self.large_bytes
        if self.gate is None:
            self.start(partial(completion.run, program), work_bytes)
            return handle
        refuse = partial(completion.refuse, program)
        if isinstance(when, Named):
            begin = partial(self._begin_named, partial(completion.run, program), large)
            self.names.meet(when, what.word, (begin, refuse))
            return handle
        entry = Entry(handle.seq, what.word ^ handle.seq, when, traffic, large=large)
        failure = self.disputes.refuse(handle.seq)
        start = partial(completion.run, program, entry)
        entry.calls = (start if failure is None else partial(refuse, failure)), refuse
        self.start(partial(self.gate.enter, entry), work_bytes)
        return handle

    def _begin_named(self, run: Callable[[], None], large: bool) -> None:
        """All ranks have come; what is large leaves the loop's thread alone."""
        if large and self.progress.owns_thread():
            self.progress.start_in_thread(run)
        else:
            run()

    def finish(self, handle: Handle[Any], call: Callable[[], object]) -> None:
        """See `Owner`."""
        if self.issuing is None:
            self.progress.post(call)
        else:
            Operation.of(handle).finish_with(call)

    def later(self, call: Callable[[], object]) -> None:
        """See `Owner`."""
        self.progress.post(lambda: self.progress.loop.call_later(_ANSWER_SECONDS, call))

    def locked(self, call: Callable[[], object]) -> None:
        """See `Owner`; on the loop's thread, which may hold the lock already, too."""
        if self.progress.owns_thread():
            self.progress.exclusively(call)
        else:
            with transport_lock:
                call()

    def receive(self, op: str, asked: Reception, timeout: float | None) -> tuple[Posted[Any], Receiving]:
        """Issue a receive; return its handle, held only by the program until a message matches, and its operation."""
        handle: Posted[Any] = self._new_handle(Posted, op, asked.nbytes, timeout)
        receiving = Receiving(self, handle, asked)
        try:
            acquire(asked.claims, receiving)
            try:
                post = receiving.post(handle)
            except BaseException:
                release(asked.claims)
                raise
        except BaseException:
            Operation.of(handle).mark_retrieved()  # it was never issued
            raise
        self._watch_over(handle, asked.peer)
        self._took_note(handle, asked.peer)
        self.start(post, 0)
        return handle, receiving

    def dropped(self, gone: ref[Handle[Any]]) -> None:
        """Withdraw, soon, the receive whose handle the program has dropped; the garbage collector may call this."""
        if (receiving := self.operations.posted.get(gone)) is not None:
            self.progress.post(receiving.lapse)

    def stand_in(self, handle: Handle[Any]) -> Handle[Any]:
        """Return a new, detached handle for a part of the operation of `handle`."""
        return Handle(self.progress, handle.op, handle.seq, 0, internals.issued_at(handle), self.account).detach()

    def cancel_receiving(self, receives: Sequence[Receiving], together: Handle[Any] | None = None) -> bool:
        """Withdraw them all, and first their handle `together`; return False and withdraw none if one has matched."""
        withdrawn = False

        def now() -> None:
            nonlocal withdrawn
            self.progress.called()  # the receives themselves may still be to be made
            withdrawn = all(receiving.waits() for receiving in receives)
            if withdrawn and together is not None:
                Operation.of(together).cancel()
            for receiving in receives if withdrawn else ():
                receiving.cancel_posted()

        self.progress.exclusively(now)
        return withdrawn

    def quick(self, plan: ReductionPlan, t: Tensor, timeout: float | None) -> Handle[Tensor]:
        """Issue one native call that works on `t` in place: `collective` without what it does not need."""
        handle, over = self._quick_handle(plan, t, timeout)
        done, t = once(over), t.detach()  # as it is now: it may be given other memory before the call
        if plan.nbytes >= self.large_bytes:
            then = self.progress.counted(done) if plan.nbytes < LARGE_BYTES else done
            self.progress.start_in_thread(self._quickly(plan, t, handle.seq, then, large=True))
        else:
            self._start(self._quickly(plan, t, handle.seq, done, large=False))
        return handle

    def queue(self, plan: QueuePlan, t: Tensor, timeout: float | None) -> Handle[Tensor]:
        """Have a device's queue take one that works on `t`; how it ends counts when the ranks are known to agree."""
        if self.issuing is not None:
            self.check_on_loop("an operation on CUDA tensors")
        stream, gate = plan.stream(), self.gate
        handle, then = self._quick_handle(plan, t, timeout)
        if gate is not None:
            entry = Entry(handle.seq, plan.what.word ^ handle.seq, When.NOW)
            then = partial(through_gate, self, entry, partial(_told, then), None)
        try:
            queued = plan.queue(t, stream, then)
        except RuntimeError as raised:
            self.progress.start(partial(then, device_error(raised)))
        else:
            Operation.of(handle).set_fence(queued)
            self.progress.start(queued.start)
        if gate is not None:
            self.progress.start(partial(gate.enter, entry))
        return handle

    def _quick_handle(
        self, plan: ReductionPlan | QueuePlan, t: Tensor, timeout: float | None
    ) -> tuple[Handle[Tensor], Done]:
        """Return the handle of an allreduce of `t`, and what to call once when it is over."""
        claim = Claim(t.data_ptr(), plan.nbytes, True, t.untyped_storage(), t)
        handle: Handle[Tensor] = self._handle("allreduce", plan.nbytes, (claim,), timeout, what=plan.what)
        if self._observer is not None and (traffic := self.traffic(handle.seq)) is not None:
            traffic.way = plan.way
        return handle, partial(self._quick_done, handle, claim, t)

    def _quick_done(self, handle: Handle[Tensor], claim: Claim, t: Tensor, error: BaseException | None) -> None:
        release((claim,))
        if error is None:
            self.over(handle, t, None)
        else:
            self.freed(handle)
            self.fell_out(handle, error)

    def _failed_in_lane(self, handle: Handle[Any], error: AiodistError) -> None:
        """The lane that did it has ended it with `error`; its memory is free."""
        self.progress.post(partial(self.progress.exclusively, partial(self._conclude_in_lane, handle, error)))

    def _conclude_in_lane(self, handle: Handle[Any], error: AiodistError) -> None:
        if handle not in self.operations:
            return
        self.freed(handle)
        if isinstance(error, MismatchError):
            # Each rank finds that by itself, since each is unlike one of two that differ.
            entry = Entry(handle.seq, 0, When.ALL)
            entry.refused = True
            entry.settle(differs=True)
            self.disputes.begin(entry)
        else:
            self.fell_out(handle, error)

    def go_on(self, handle: Handle[Any], make: Callable[[], Program[Any]], claims: Sequence[Claim]) -> None:
        """The ranks agree on a collective that no lane has done: the program of `make` does it; from any thread."""
        self.traffic(handle.seq)  # from now on it can be refused
        self.progress.start_from_thread(partial(self._go_on, handle, make, claims))

    def _go_on(self, handle: Handle[Any], make: Callable[[], Program[Any]], claims: Sequence[Claim]) -> None:
        if handle not in self.operations:
            release(claims)
            return
        completion = Completion(self, handle, claims)
        entry = Entry(handle.seq, 0, traffic=self.traffic(handle.seq))
        program = prepare(make)
        entry.calls = partial(completion.run, program, entry), partial(completion.refuse, program)
        entry.settle(differs=False)

    def _quickly(self, plan: ReductionPlan, t: Tensor, seq: int, done: Done, *, large: bool) -> Callable[[], None]:
        """Return the call that takes the operation to the gate."""
        assert self.gate is not None
        start: Callable[[], None] = partial(_begin, plan.start, t, seq, done)
        if self.disputes.to_fail and (failure := self.disputes.refuse(seq)) is not None:
            start = partial(done, failure)
        return partial(self.gate.enter, Entry(seq, plan.what.word ^ seq, When.ALL, calls=(start, done), large=large))

    def barrier(self, timeout: float | None, kind: str = "barrier") -> Handle[None]:
        """Issue a barrier: an operation that moves nothing, and so is over when the ranks are known to agree on it."""
        with self.undisturbed():
            return self.collective(Fingerprint(kind), prepare(nothing, None), timeout=timeout, when=When.ALL)

    def message(
        self,
        op: str,
        nbytes: int,
        claims: Sequence[Claim],
        timeout: float | None,
        peer: Peer,
        convert: Callable[[Any], Any] | None = None,
    ) -> tuple[Handle[Any], Completion]:
        """Return the handle of a point-to-point operation with `peer`, and what to call when it is over."""
        handle: Handle[Any] = self._handle(op, nbytes, claims, timeout, peer)
        self._took_note(handle, peer)
        return handle, Completion(self, handle, claims, convert)

    def _took_note(self, handle: Handle[Any], peer: Peer) -> None:
        self._watchdog.messages += 1
        if self.on_receive is not None and peer.src is not None and peer.src != ANY and handle.op != "aclose":
            self.on_receive(handle, peer.src)

    def start(self, call: Callable[[], None], nbytes: int) -> None:
        """Make a call with the transport lock held; what copies or reduces a lot leaves the loop alone."""
        if nbytes >= self.large_bytes:
            self.progress.start_in_thread(call)
        else:
            self._start(call)

    def _handle(
        self,
        op: str,
        nbytes: int,
        claims: Sequence[Claim],
        timeout: float | None,
        meets: Peer | Named | None = None,
        what: Fingerprint | None = None,
    ) -> Handle[Any]:
        """`what` it is, where it is the next in the order of all ranks."""
        number = meets.count if isinstance(meets, Named) else None
        handle: Handle[Any] = self._new_handle(Handle, op, nbytes, timeout, number)
        operation = Operation.of(handle)
        if isinstance(meets, Named):
            operation.set_name(f"{op} {meets.name!r}")
        acquire(claims, handle)
        operation.set_in_place(any(claim.writes for claim in claims))
        self.operations.issued[handle] = meets or True
        self._watch_over(handle, meets)
        if what is not None:
            self.oplog.record(what, internals.issued_at(handle))
        return handle

    def _new_handle(self, kind: type[H], op: str, nbytes: int, timeout: float | None, number: int | None = None) -> H:
        if self._refusal is not None or _get_running_loop() is not self.progress.loop:
            self.check_usable()
        origin = self.oplog.caller or whence(4)
        handle = kind(self.progress, op, self.oplog.seq if number is None else number, nbytes, origin, self.account)
        if timeout is not None or self.timeout is not None:
            self._set_deadline(handle, timeout)
        return handle

    def _watch_over(self, handle: Handle[Any], meets: Peer | Named | None) -> None:
        if self._observer is not None:
            Operation.of(handle).observe(self._observer.issued(handle, meets))
        if not self._watch.watching:
            self._watch.keep_watch()

    def set_deadline(self, handle: Handle[Any], timeout: float | None) -> None:
        """Have it be over within `timeout` seconds, or those of the communicator, if either has a number."""
        if (timeout is not None or self.timeout is not None) and internals.is_pending(handle):
            self._set_deadline(handle, timeout)

    def _set_deadline(self, handle: Handle[Any], timeout: float | None) -> None:
        seconds = self.timeout if timeout is None else timeout
        assert seconds is not None
        Operation.of(handle).set_deadline(seconds)
        self._watchdog.expect(seconds)

    # --- completion: with the transport lock held --------------------------------------------------------------

    def over(self, handle: Handle[Any], result: object, error: BaseException | None) -> None:
        """See `Owner`."""
        number = self._number(handle) if self._rejected or error is not None else -1
        self.operations.pop(handle)
        if self._rejected:
            error = self._rejected.pop(number, error)  # it ended with zeros, which others sent in place of theirs
        if error is not None:
            self._freed.discard(number)
            self._failed(handle, error)
        elif not handle.done():
            operation = Operation.of(handle)
            if isinstance(result, Arrived):
                operation.set_message(result.source, result.tag, result.nbytes)
                result = result.data
            operation.resolve(result)

    def _number(self, handle: Handle[Any]) -> int:
        """Return the number that the ranks give a pending collective; -1 of what is none, or over."""
        meets = self.operations.issued.get(handle)
        return handle.seq if meets is True else meets.number if isinstance(meets, Use) else -1

    def _failed(self, handle: Handle[Any], error: BaseException) -> None:
        if handle.done():
            return
        if isinstance(error, asyncio.CancelledError):
            Operation.of(handle).cancel()
            return
        if isinstance(error, AiodistError):
            error.located(rank=self.transport.rank, comm=self.name, op=str(handle))
        else:
            with suppress(Exception):  # it may be of the user's class
                error.add_note(f"raised in {handle}, communicator {self.name}, rank {self.transport.rank}")
        with suppress(asyncio.InvalidStateError):  # a thread that waits has just found it done
            Operation.of(handle).reject(error)

    # --- what goes wrong in a collective ---------------------------------------------------------------------

    def fell_out(self, handle: Handle[Any], error: BaseException) -> None:
        """See `Owner`. The other ranks, which may wait for this one, are told why.

        Where ranks differ on it, or another one refuses it, `Disputes` concludes. What a library says may follow from
        what is heard of only then: that ranks differ, or that one of them is gone.
        """
        number = self._number(handle)
        if isinstance(error, _KNOWN):
            self.over(handle, None, error)
            if number >= 0 and isinstance(error, MismatchError) and self._refusal is None:  # a program found it
                self.later(partial(self.disputes.tell_failed, number, error))
            return
        if isinstance(error, (Differ, Refused)):
            return
        if number < 0:
            over = partial(self.over, handle, None, error)
            if isinstance(error, BackendError):
                self.later(partial(self.progress.exclusively, over))
            else:
                over()
            return

        def conclude() -> None:
            self.failing.pop(number, None)
            if handle in self.operations and not handle.done():
                self.reject(number, error)
                self.disputes.tell_failed(number, error)

        self.failing[number] = error
        if isinstance(error, BackendError):
            self.later(conclude)
        else:
            self.progress.post(conclude)

    def called(self, number: int) -> str:
        """See `Judge`."""
        if number < NAMED:
            return f"operation #{number}"
        use = self.names.find(number)
        return "a named operation" if use is None else f"operation {use.name!r} #{use.count}"

    def text(self, number: int) -> str:
        """See `Judge`."""
        if number < NAMED:
            return self.oplog.text(number)
        use = self.names.find(number)
        return "an operation that is no longer kept" if use is None else use.text()

    def has_issued(self, number: int) -> bool:
        """See `Judge`."""
        return number < self.oplog.seq if number < NAMED else self.names.has_issued(number)

    def reject(self, seq: int, error: BaseException) -> None:
        """See `Judge`."""
        self.progress.exclusively(partial(self._reject, seq, error))

    def _reject(self, seq: int, error: BaseException) -> None:
        """As soon as its memory is free, for who is told may use it again, or when it is not free soon."""
        if (handle := self._collective_of(seq)) is None:
            return
        self._rejected.setdefault(seq, error)
        if seq in self._freed:
            self._reject_now(handle)
        else:
            self.later(partial(self.progress.exclusively, partial(self._reject_now, handle)))

    def _reject_now(self, handle: Handle[Any]) -> None:
        number = self._number(handle)
        error = self._rejected.pop(number, None)
        self._freed.discard(number)
        if error is not None and self.operations.issued.pop(handle, None) is not None:
            self._failed(handle, error)

    def freed(self, handle: Handle[Any]) -> None:
        """See `Owner`."""
        if (number := self._number(handle)) >= 0:
            self._freed.add(number)
            if number in self._rejected:
                self._reject_now(handle)

    def _collective_of(self, seq: int) -> Handle[Any] | None:
        """Return the handle of collective `seq` while it is pending."""
        return next((handle for handle in list(self.operations.issued) if self._number(handle) == seq), None)

    def doubt(self, seq: int) -> None:
        """See `Judge`."""
        if self.gate is not None:
            self.progress.exclusively(partial(self.gate.doubt, seq))

    def refuse(self, seq: int, error: AiodistError | None) -> Traffic | None:
        """See `Judge`."""
        use = self.names.find(seq)
        if (handle := self._collective_of(seq)) is not None:
            handle.done()  # a lane may have left it to a program, which can be refused
        traffic = self.recent.get(seq) if use is None else use.traffic
        self.progress.exclusively(partial(self.names.hold, seq))
        if traffic is not None:
            self.progress.exclusively(partial(self._refuse_steps, seq, traffic, error or Differ(seq)))
        if error is not None:
            if traffic is None or traffic.native:
                # What has begun in a library cannot be stopped; it may be about to end, or to fail here too.
                self.later(partial(self._abort_unless_over, seq, error))
            else:
                self.reject(seq, self.failing.get(seq, error))
        return traffic

    def cleared(self, number: int) -> None:
        """See `Judge`."""
        self.progress.exclusively(partial(self.names.release, number))

    def _refuse_steps(self, seq: int, traffic: Traffic, error: BaseException) -> None:
        traffic.refuse(error)
        if self.repertoire.within is not None:
            self.repertoire.within.refuse(key_of(seq))

    def _broken(self, error: BaseException) -> None:
        """Hosts cannot be compared any more. That a rank is gone may be known only after what follows from it."""

        def conclude() -> None:
            wrapped = BackendError(f"the ranks of communicator {self.name!r} cannot be compared: {error}")
            wrapped.__cause__ = error
            self.abort_everywhere(wrapped)

        self.later(conclude)

    def _abort_unless_over(self, seq: int, error: AiodistError) -> None:
        if self._collective_of(seq) is not None:
            self.reject(seq, error)
            self.abort(CommunicatorAborted(f"communicator {self.name!r} was aborted: {error}", comm=self.name))
            self.disputes.tell_abort(f"communicator {self.name!r} was aborted: {error}")

    # --- the end -------------------------------------------------------------------------------------------

    @property
    def pending_more(self) -> bool:
        """Whether several operations are not over."""
        return len(self.operations) > 1

    def pending(self) -> list[Handle[Any]]:
        """Return what is not over, in order of issue."""
        return [handle for handle in self.operations if internals.is_pending(handle)]

    def pending_collectives(self) -> list[Handle[Any]]:
        """Return those of them that all ranks take part in."""
        collectives = [handle for handle, what in self.operations.issued.copy().items() if what is True]
        return [handle for handle in collectives if internals.is_pending(handle)]

    def cancel_receives(self) -> None:
        """Withdraw every receive that nothing matched, and warn of each: of one that nobody awaited for all to see."""
        for handle in self.pending():
            forgotten = not (internals.is_retrieved(handle) or internals.is_awaited(handle))
            if handle.op.startswith("recv") and handle.cancel() and (where := handle.origin) is not None:
                message = f"{handle} was never matched{' nor awaited' * forgotten}, and withdrawn at close"
                kind = RuntimeWarning if forgotten else ResourceWarning
                warnings.warn_explicit(message, kind, where.filename, where.lineno)

    async def drain(self, seconds: float) -> None:
        """Wait until nothing is pending; raise `OperationTimeout` naming what still is after `seconds`."""
        pending = self.pending()
        if pending and self._refusal is None:
            await asyncio.wait([all_over(pending, self.progress.loop)], timeout=seconds)
            left = [handle for handle in pending if not handle.done()]
            if left:
                known, late = plight(left)
                text = f"still pending after {round(seconds, 1):g} s: {listed(left)}{known}"
                raise OperationTimeout(text, late=late, comm=self.name)

    async def part(self, seconds: float) -> None:
        """Hear what was sent to this rank and never received; once all ranks have issued what they will."""
        rank, size = self.transport.rank, self.transport.size
        if size > 1 and self._refusal is None:
            handle, finish = self.message("aclose", 0, (), seconds, Peer((rank - 1) % size, None, 0))
            self.start(partial(self.mailbox.part, partial(finish, None)), 0)
            await handle

    def peer_lost(self, exit: Exit) -> None:
        """A rank of this communicator is gone: what is pending and every later call raise that."""
        error = exit.error()
        self.abort(error)
        for tell in list(self.on_lost):
            tell(self.ranks.index(exit.rank) if exit.rank in self.ranks else -1, error)

    async def settled(self) -> None:
        """Wait until all collectives that were issued are over."""
        if pending := [handle for handle in self.pending_collectives() if not internals.is_detached(handle)]:
            await all_over(pending, self.progress.loop)

    def supersede(self, error: CommunicatorAborted) -> None:
        """Abort it on all ranks, unless that was done, and raise `error` from now on in place of what it raised."""
        given_up = self._refusal is not None
        self.abort_everywhere(error)
        with self.undisturbed():
            self._refuse(error)
        if given_up:  # as after a loss, which not all heed
            self._tell_given_up(error)
            self.disputes.tell_abort(str(error))

    def abort_everywhere(self, error: AiodistError) -> None:
        """Abort it on all ranks, unless that was done."""
        if self._refusal is None:
            self.abort(error)
            self.disputes.tell_abort(f"rank {self.transport.rank}: {error}")

    def abort_soon(self, error: AiodistError, *, tell: bool) -> None:
        """Abort it here at once, and on the other ranks soon, unless they have causes of their own by then."""
        if self._refusal is None:
            self.abort(error)
            if tell:
                self.later(partial(self.disputes.tell_abort, f"rank {self.transport.rank}: {error}"))

    def abort(self, error: AiodistError) -> None:
        """Reject what is pending and refuse what comes; buffers stay owned by transfers that never end."""
        if self._refusal is not None:
            if isinstance(error, CommunicatorAborted):
                self._tell_given_up(error)
            return
        with self.undisturbed():
            self._refuse(self._aborted(error))
        self._watchdog.close()
        self.progress.exclusively(partial(self._fail_all, error))
        self._tell_given_up(error)

    def _tell_given_up(self, error: AiodistError) -> None:
        for tell in list(self.on_abort):
            tell(error)

    def _fail_all(self, error: AiodistError) -> None:
        for handle in self.pending():
            self._failed(handle, self._rejected.get(self._number(handle)) or again(error))
        self.operations.clear()
        self._freed.clear()
        self._rejected.clear()
        self.mailbox.abort(error)
        self.names.close(error)
        if self.gate is not None:
            self.gate.close(error)
        if self.repertoire.within is not None:
            self.repertoire.within.give_up(error)

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
        """Hear nothing of other ranks any more."""
        self.disputes.close()
        self.names.unsubscribe()

    @property
    def refusal(self) -> AiodistError | RuntimeError | None:
        """Why calls are refused, None while they are not."""
        return self._refusal

    def forked(self) -> None:
        """This is a child of the process that opened it."""
        self.issuing = None  # a thread that is not there may have begun
        self._watch.members.clear()  # its timer may yet fire here
        self._refuse(RuntimeError(f"communicator {self.name!r} was opened before os.fork: a child cannot use it"))

    def _refuse(self, why: AiodistError | RuntimeError) -> None:
        self._refusal = why
        if self.issuer is not None:
            self.issuer.open = False


def _told(done: Done, _: object, error: BaseException | None) -> None:
    done(error)


def _begin(start: Begin, t: Tensor, seq: int, done: Done) -> None:
    """Make a native call; what it raises goes to `done`."""
    try:
        start(t, seq, done)
    except Exception as error:  # noqa: BLE001  - it belongs to the task that awaits the operation
        done(ours(error))


def _after_fork() -> None:
    _held_over_fork.clear()
    for dispatcher in list(Dispatcher._alive):
        dispatcher.forked()


_held_over_fork: list[bool] = []


def _before_fork() -> None:
    """Fork while no other thread is in native calls: a lock that one holds there stays taken in the child for ever."""
    _held_over_fork.append(transport_lock.acquire(timeout=_FORK_SECONDS))


def _after_fork_in_parent() -> None:
    if _held_over_fork.pop():
        transport_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
