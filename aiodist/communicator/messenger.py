"""Issues and ends the messages between two ranks.

[Note: states of a receive] Each change is made with the transport lock held.

- *posted*: the mailbox has the receive, or the inbox does until the lock is free. Only the program holds the handle.
  The receive has a weak reference, and a strong one (`_held`) only while code waits. The receive ends when the program
  drops the handle.
- *matched*: the receive owns a message, which may be in flight. `Pending` holds the handle until the end.
- *finished*: the handle is settled.
- *paused*: the last wait ended without the outcome, by cancellation or a deadline. A posted receive leaves the mailbox.
  The message of a matched receive returns to its old place in the mailbox, for the next receive that matches. A message
  in flight returns too, and so does an arrived message that no code has seen. The handle is pending, and the caller's
  memory is free. The next wait posts the receive again, as the last one.

A message in flight into the caller's memory cannot return before its arrival, so its receive is not paused.

[Note: threads of a receive] `take`, `_pause` and `finish` run with the lock held. The loop's thread writes `_held` and
the waiters of the handle. A waiting thread writes `Posted._threads`. So `_pause` checks again for waiting code with the
lock held. The mailbox calls `take` at the match. In one step, `take` makes the weak reference a strong one or finds
that the handle is gone. So a message never goes to a handle that nothing holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple
from weakref import ref

from aiodist.backends.base import again
from aiodist.collectives.cuda.on_device import DeviceWork, attach
from aiodist.collectives.messages import Arrived, MailboxReceive, MessageKind, Unpacked
from aiodist.communicator.changes import Mark, changed, marks_of
from aiodist.communicator.claims import acquire, release
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.operation import CommunicatorOperation, OperationState, Peer
from aiodist.handles import Handle, Operation, Posted, PostedOperation, internals
from aiodist.handles.origin import Origin, described
from aiodist.handles.polling import transport_lock
from aiodist.handles.posted import own
from aiodist.types import ANY

if TYPE_CHECKING:
    from types import CodeType

    from torch import Tensor

    from aiodist.communicator.claims import Claim

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


_CLOSE = Fingerprint("aclose")


@dataclass(frozen=True)
class Reception:
    """Arguments of a receive."""

    peer: Peer
    kind: int
    """Kind of message to receive. ANY receives both kinds, with the `Arrived` itself as the result."""
    into: Tensor | None
    claims: Sequence[Claim]
    work: Callable[[Tensor | None], list[DeviceWork]] | None = None
    """Function that returns the work on devices for `like`, or None for a receive without such work."""
    like: Tensor | None = None
    """Tensor on the device of the result, or None if the message determines the device."""
    later: Callable[[], DeviceWork] | None = None
    """Factory of the work for a message from a device, or None. Called only if the receive has no other work."""
    convert: Callable[[Any], Any] | None = None
    nbytes: int = 0
    sent: Sequence[Claim] = ()
    """Bytes that a `sendrecv` sends. Such a receive ends only after the send (see `Receiving.sending`)."""


class Messenger:
    """Issues the messages of one communicator."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.mailbox = dispatcher.mailbox
        self.pending = dispatcher.operations
        self.settlement = dispatcher.settlement
        self.progress = dispatcher.progress

    def receive(self, what: Fingerprint, asked: Reception, timeout: float | None) -> tuple[Handle[Any], Receiving]:
        """Issue a receive. Return the handle, which only the program holds before a match, and the operation."""
        receiving = Receiving(self, asked)
        operation = CommunicatorOperation(claims=[*asked.claims, *asked.sent], meets=asked.peer)
        handle = self.dispatcher.issue(
            operation, what, receiving.post, nbytes=asked.nbytes, timeout=timeout, work_bytes=0, receive=receiving
        )
        receiving.sent_marks = marks_of(asked.sent, strict=self.dispatcher.strict)
        return handle, receiving

    def stand_in(self, handle: Handle[Any]) -> Handle[Any]:
        """Return a new, detached handle for a part of the operation of `handle`."""
        return Handle(
            self.progress, handle.op, handle.seq, 0, internals.issued_at(handle), self.dispatcher.account
        ).detach()

    def dropped(self, gone: ref[Handle[Any]]) -> None:
        """Withdraw, soon, the receive of a dropped handle. The garbage collector may make this call."""
        if (receiving := self.pending.posted.get(gone)) is not None:
            self.progress.post(receiving.lapse)

    def cancel_all(self, receives: Sequence[Receiving], together: Handle[Any] | None = None) -> bool:
        """Withdraw the handle `together`, then all receives.

        Return False, without change, if a receive has a message.
        """
        return self.progress.with_lock(self._cancel_all, receives, together)

    def _cancel_all(self, receives: Sequence[Receiving], together: Handle[Any] | None) -> bool:
        self.progress.make_calls()  # the inbox may still have the receives
        if not all(receiving.waits() for receiving in receives):
            return False
        if together is not None:
            Operation.of(together).cancel()
        for receiving in receives:
            receiving.cancel_posted()
        return True

    def locked(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """Make `call` with the transport lock held (any thread). The loop's thread may hold the lock already."""
        if self.progress.owns_thread():
            return self.progress.with_lock(call, *args)
        with transport_lock:
            return call(*args)

    async def part(self, seconds: float) -> None:
        """Receive the messages that no receive took, after all ranks have issued their last operation."""
        transport = self.dispatcher.transport
        if transport.size > 1 and self.dispatcher.lifetime.refusal is None:
            before = Peer((transport.rank - 1) % transport.size, None, 0)
            operation = CommunicatorOperation(meets=before)
            await self.dispatcher.issue(operation, _CLOSE, lambda _: self.mailbox.part(), timeout=seconds)


@dataclass(eq=False, slots=True, repr=False)
class Receiving:
    """The operation of a `Posted` handle, see the module."""

    _messenger: Messenger
    _asked: Reception
    paused: bool = True
    ref: ref[Handle[Any]] = field(init=False)
    _called: tuple[str, int, tuple[CodeType, int]] = field(init=False)
    """Name, number and line of the call."""
    _held: Handle[Any] | None = None
    _wanted: MailboxReceive | None = None
    _operation: CommunicatorOperation | None = None
    sending: CommunicatorOperation | None = None
    """The other half of a `sendrecv`, until that half is finished."""
    _arrived: tuple[CommunicatorOperation, Arrived] | None = None
    """A message that came before the end of the other half."""
    sent_marks: Sequence[Mark] = ()
    """State of the tensors of the other half at the call."""
    _unsent: BaseException | None = None
    """The error of the other half."""

    def own(self, handle: Handle[Any], origin: tuple[CodeType, int]) -> None:
        """See `Receive`."""
        assert isinstance(handle, Posted)
        self.ref = ref(handle, self._messenger.dropped)
        hash(self.ref)  # cached by Python: a dead reference cannot compute its hash
        self._called = (handle.op, handle.seq, origin)
        if self._asked.sent:
            stand_in = self._messenger.stand_in(handle)
            self.sending = CommunicatorOperation(stand_in, self._asked.sent, meets=self._asked.peer)
        own(handle, self, self.cancel)

    def __str__(self) -> str:
        op, seq, origin = self._called
        return described(op, seq, Origin(*origin))

    @property
    def peer(self) -> Peer:
        """Source and tag of the message."""
        return self._asked.peer

    @property
    def dispatcher(self) -> Dispatcher:
        """Dispatcher of the communicator."""
        return self._messenger.dispatcher

    @property
    def call(self) -> str:
        """Name and line of the call."""
        op, _, origin = self._called
        return f"{op} at {Origin(*origin)}"

    @property
    def works(self) -> list[DeviceWork]:
        """Work of the receive on devices."""
        return [] if self._wanted is None or self._wanted.work is None else [self._wanted.work]

    @property
    def handle(self) -> Handle[Any] | None:
        """Handle, or None after the program has dropped the handle."""
        return self.ref()

    # --- as `Stoppable` ---------------------------------------------------------------------------------------

    def hold(self, handle: Posted[Any] | None, /) -> None:
        """See `Stoppable`."""
        self._held = handle

    def settled(self) -> None:
        """See `Stoppable`."""
        self._held = None
        if self._operation is not None:
            assert self._wanted is not None
            self._operation.handle = self._wanted.handle = None

    def resume(self, handle: Posted[Any], /) -> None:
        """See `Stoppable`. Raises BufferInFlight if another operation has the memory now."""
        acquire(self._asked.claims, self)
        self._messenger.locked(self._resume, handle)
        self._messenger.progress.resume_polling()

    def pause(self, handle: Posted[Any], /) -> None:
        """See `Stoppable`."""
        self._messenger.locked(self._pause, handle)

    # --- with the transport lock held -------------------------------------------------------------------------

    def post(self, operation: CommunicatorOperation) -> MailboxReceive:
        """Return the receive to post in the mailbox. Its memory is claimed. The lock need not be held here."""
        asked, handle = self._asked, self.ref()
        works = [] if asked.work is None else asked.work(asked.like)
        assert handle is not None
        assert asked.peer.src is not None
        self.paused = False
        operation.handle, operation.claims, operation.convert = None, asked.claims, asked.convert
        work = next(iter(works), None)
        finish = partial(self.finish, operation)
        wanted = MailboxReceive(
            asked.peer.src, asked.peer.tag, asked.into, finish, self.take, work, asked.later, kind=asked.kind
        )
        self._operation, self._wanted = operation, wanted
        self._messenger.pending.posted[self.ref] = self
        if works:
            attach(handle, works)
        return wanted

    def take(self) -> bool:
        """Hold the handle from now on, since a message matches.

        Return False if the program has dropped the handle, and after an abort.
        """
        operation, wanted, handle = self._operation, self._wanted, self.ref()
        assert operation is not None
        assert wanted is not None
        if handle is None or operation.state is OperationState.DONE:
            return False
        operation.handle = wanted.handle = handle
        self._messenger.pending.others[handle] = operation
        self._messenger.pending.posted.pop(self.ref, None)
        return True

    def cancel(self) -> bool:
        """Withdraw the receive unless a message has matched. Return True if the receive is withdrawn."""
        return self._messenger.cancel_all([self])

    def waits(self) -> bool:
        """Return True if no message has matched the receive."""
        assert self._wanted is not None
        return self.paused or self._messenger.mailbox.matching.waits(self._wanted)

    def cancel_posted(self) -> None:
        """Withdraw the receive, which no message has matched."""
        self._end(asyncio.CancelledError())

    def _end(self, error: BaseException) -> None:
        """End the receive, which no message has matched, with `error`."""
        assert self._wanted is not None
        if not self.paused:
            self._messenger.mailbox.cancel(self._wanted)
            self._wanted.finish(None, error)
            return
        self.paused = False
        self._messenger.pending.posted.pop(self.ref, None)
        if (handle := self.handle) is not None:
            self._messenger.settlement.settle(CommunicatorOperation(handle, meets=self.peer), None, error)

    def lapse(self) -> bool:
        """Withdraw the receive if the program has dropped its handle.

        Return True if the receive is withdrawn. From any thread.
        """
        return self.handle is None and self._messenger.locked(self._lapse)

    def _lapse(self) -> bool:
        self._messenger.progress.make_calls()  # the receive itself may still be in the inbox
        lapses = self.handle is None and self.ref in self._messenger.pending.posted and self.waits()
        if lapses:
            self.cancel_posted()
        return lapses

    def finish(self, operation: CommunicatorOperation, arrived: Arrived | None, error: BaseException | None) -> None:
        """End the receive with a message or an error, unless its other half is pending."""
        if operation.given_back is not None:
            operation.given_back(arrived, error)
            arrived, error = None, asyncio.CancelledError()
        elif arrived is not None and self.sending is not None:
            self._arrived = (operation, arrived)
            return
        else:
            if self._unsent is not None:
                arrived, error = None, self._unsent
            if operation.handle is None and not self.take():
                self._messenger.pending.posted.pop(self.ref, None)
            if self.sending is not None:  # now a separate operation
                self._pend(self.sending)
            if arrived is not None and self._asked.kind == ANY:
                arrived = replace(arrived, data=arrived)
        self._messenger.settlement.drained(operation)
        self._messenger.settlement.settle(operation, arrived, error)

    def _resume(self, handle: Posted[Any]) -> None:
        why = self._messenger.dispatcher.lifetime.refusal
        if self.paused and internals.is_pending(handle) and why is None:
            try:
                Operation.of(handle).set_canceller(self.cancel)
                wanted = self.post(operation := CommunicatorOperation(meets=self.peer))
                operation.marks = marks_of(operation.claims, strict=self._messenger.dispatcher.strict)
                self._messenger.mailbox.receive(wanted)
            except BaseException:
                release(self._asked.claims)
                raise
            return
        release(self._asked.claims)
        if self.paused and why is not None:
            self._end(again(why))

    def _pause(self, handle: Posted[Any]) -> None:
        self._messenger.progress.make_calls()
        posted = PostedOperation.of(handle)
        if self.paused or posted.attended or not (posted.is_pending or not posted.consumed):
            return
        mailbox, wanted, operation = self._messenger.mailbox, self._wanted, self._operation
        assert wanted is not None
        assert operation is not None
        if posted.is_pending and mailbox.matching.waits(wanted):
            mailbox.cancel(wanted)
            self._messenger.settlement.drained(operation)
        elif posted.is_pending and wanted.given is not None and self._asked.into is None:
            self._hand_over(handle, operation, wanted)
        elif posted.succeeded:
            mailbox.take_back(wanted, self._value_of(handle))
            posted.revoke()
        else:
            return
        self.paused = True
        if self.sending is not None:
            self._pend(self.sending)
        self._messenger.pending.posted[self.ref] = self
        mailbox.match_again()

    def _hand_over(self, handle: Handle[Any], operation: CommunicatorOperation, wanted: MailboxReceive) -> None:
        """Put the message back for another receive. A new handle represents the rest of the transfer."""
        operation.given_back = self._messenger.mailbox.put_back(wanted)
        operation.handle = wanted.handle = stand_in = self._messenger.stand_in(handle)
        self._operation = None
        self._messenger.pending.others[stand_in] = operation
        self._messenger.pending.others.pop(handle, None)
        came, self._arrived = self._arrived, None
        if came is not None:
            self.finish(came[0], came[1], None)
        Operation.of(handle).finish()

    def _value_of(self, handle: Handle[Any]) -> Any:  # noqa: ANN401
        """Return the received data in the form that the mailbox takes back."""
        value = handle.result()
        if self._asked.kind == ANY:
            return value.data
        return Unpacked(value) if self._asked.kind == MessageKind.OBJECT else value

    def _pend(self, sending: CommunicatorOperation) -> None:
        """Let the other half of a `sendrecv` be a separate operation."""
        assert sending.handle is not None
        self._messenger.pending.others[sending.handle] = sending

    # --- the other half of a sendrecv -------------------------------------------------------------------------

    def sent(self, error: BaseException | None) -> None:
        """Note that the other half is finished (transport lock held)."""
        if error is None and self._operation is not None:
            self._messenger.settlement.look(self._operation, changed(self.sent_marks))
        self.sending, self._unsent, self.sent_marks = None, error, ()
        came, self._arrived = self._arrived, None
        if came is not None:
            self.finish(came[0], came[1], None)
        elif error is not None and self.waits():
            self._end(error)
