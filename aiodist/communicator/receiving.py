"""A receive, from its issue to its end.

[Note: states of a receive] Each change is made with the transport lock held.

- *posted*: the mailbox has it, or the inbox does until the lock is free. Only the program holds the handle: the receive
  has a weak reference, and a strong one (`_held`) only while code waits. A handle that is dropped ends the receive.
- *matched*: the receive owns a message, which may be in flight. `Pending` holds the handle until the end.
- *finished*: the handle is settled.
- *paused*: the last wait ended without the outcome, by cancellation or a deadline. A posted receive leaves the mailbox.
  The message of a matched one returns to its old place there, for the next receive that matches, even while it is in
  flight, or after it came if no code has seen it. The handle is pending, and the caller's memory is free. The next
  wait posts the receive again, after those posted by then.

A message in flight into the caller's memory cannot return before it has come: its receive is not paused.

[Note: threads of a receive] `take`, `_pause` and `_finish` run with the lock held. The loop's thread writes `_held` and
the waiters of the handle, and a waiting thread writes `Posted._threads`. So `_pause` looks again, with the lock held,
whether code waits. The mailbox calls `take` at the match, which makes the weak reference a strong one or finds that the
handle is gone, in one step: a message never goes to a handle that nothing holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from aiodist.backends.base import again
from aiodist.collectives.cuda.on_device import DeviceWork, attach
from aiodist.collectives.mailbox import Arrived, Mailbox, Unpacked, Wanted
from aiodist.communicator.claims import acquire, release
from aiodist.communicator.completion import Completion, Owner
from aiodist.communicator.pending import Pending
from aiodist.errors import AiodistError
from aiodist.handles import Handle, Operation, Posted, PostedOperation, internals
from aiodist.handles.origin import described
from aiodist.types import ANY

if TYPE_CHECKING:
    from torch import Tensor

    from aiodist.communicator.claims import Claim
    from aiodist.communicator.watchdog import Peer


@dataclass(frozen=True)
class Reception:
    """Arguments of a receive."""

    peer: Peer
    kind: int
    """Kind of message to receive; ANY receives both, and then the result is the `Arrived` itself."""
    into: Tensor | None
    claims: Sequence[Claim]
    work: Callable[[], tuple[list[DeviceWork], Callable[[], DeviceWork] | None]]
    """Returns its work on devices, and a factory of it for a message that may come from one."""
    convert: Callable[[Any], Any] | None = None
    nbytes: int = 0
    sends: bool = False
    """True for a `sendrecv`, which is finished only after its own message is sent: see `Receiving.sending`."""


class Mailroom(Owner, Protocol):
    """The part of a communicator's `Dispatcher` that a receive calls."""

    mailbox: Mailbox
    operations: Pending

    @property
    def refusal(self) -> AiodistError | RuntimeError | None:
        """The error that refuses calls; None while the communicator is open."""

    def dropped(self, gone: ref[Handle[Any]], /) -> None:
        """The program has dropped the handle of a receive."""

    def stand_in(self, handle: Handle[Any], /) -> Handle[Any]:
        """Return a new, detached handle for a part of the operation of `handle`."""

    def cancel_receiving(self, receives: Sequence[Receiving], /) -> bool:
        """Withdraw them all, or none."""


class Receiving:
    """The operation of a `Posted` handle, see the module."""

    __slots__ = (
        "_arrived",
        "_asked",
        "_called",
        "_completion",
        "_dispatcher",
        "_held",
        "_unsent",
        "_wanted",
        "paused",
        "ref",
        "sending",
    )

    def __init__(self, dispatcher: Mailroom, handle: Posted[Any], asked: Reception) -> None:
        self.paused = True
        self.ref: ref[Handle[Any]] = ref(handle, dispatcher.dropped)
        hash(self.ref)  # cached by Python: a dead reference cannot compute its hash
        self._asked = asked
        self._dispatcher = dispatcher
        self._called = (internals.name_of(handle), handle.seq, handle.origin)
        self._held: Handle[Any] | None = None
        self._wanted: Wanted | None = None
        self._completion: Completion | None = None
        self.sending: Handle[None] | None = dispatcher.stand_in(handle) if asked.sends else None
        """The other half of a `sendrecv`, until it is finished."""
        self._arrived: tuple[Completion, Arrived] | None = None
        """The message, if it came before the other half was finished."""
        self._unsent: BaseException | None = None
        """The error of the other half."""
        PostedOperation.of(handle).set_owner(self)

    def __str__(self) -> str:
        return described(*self._called)

    @property
    def peer(self) -> Peer:
        """Source and tag of the message."""
        return self._asked.peer

    @property
    def works(self) -> list[DeviceWork]:
        """Its work on devices."""
        return [] if self._wanted is None or self._wanted.work is None else [self._wanted.work]

    @property
    def handle(self) -> Handle[Any] | None:
        """Its handle; None once the program has dropped that."""
        return self.ref()

    # --- as `Stoppable` ---------------------------------------------------------------------------------------

    def hold(self, handle: Posted[Any] | None, /) -> None:
        """See `Stoppable`."""
        self._held = handle

    def settled(self) -> None:
        """See `Stoppable`."""
        self._held = None
        if self._completion is not None:
            assert self._wanted is not None
            self._completion.handle = self._wanted.handle = None

    def resume(self, handle: Posted[Any], /) -> None:
        """See `Stoppable`; raises BufferInFlight where another operation has the memory now."""
        acquire(self._asked.claims, self)
        self._dispatcher.locked(partial(self._resume, handle))
        self._dispatcher.progress.liven()

    def pause(self, handle: Posted[Any], /) -> None:
        """See `Stoppable`."""
        self._dispatcher.locked(partial(self._pause, handle))

    # --- with the transport lock held -------------------------------------------------------------------------

    def post(self, handle: Posted[Any]) -> Callable[[], None]:
        """Return the call that posts it in the mailbox, for which the lock is held; its memory is claimed.

        The lock need not be held here.
        """
        works, later = self._asked.work()
        asked, dispatcher = self._asked, self._dispatcher
        self.paused = False
        completion = Completion(dispatcher, None, asked.claims, asked.convert)
        work = next(iter(works), None)
        finish = partial(self._finish, completion)
        assert asked.peer.src is not None
        wanted = Wanted(asked.kind, asked.peer.src, asked.peer.tag, asked.into, finish, work, later, take=self.take)
        self._completion, self._wanted = completion, wanted
        PostedOperation.of(handle).set_canceller(self.cancel)
        dispatcher.operations.posted[self.ref] = self
        attach(handle, works, asked.into)
        return partial(dispatcher.mailbox.receive, wanted)

    def take(self) -> bool:
        """Hold the handle from now on, since a message matches; return False if the program has dropped it."""
        completion, wanted, handle = self._completion, self._wanted, self.ref()
        assert completion is not None
        assert wanted is not None
        if handle is None:
            return False
        completion.handle = wanted.handle = handle
        self._dispatcher.operations.issued[handle] = self.peer
        self._dispatcher.operations.posted.pop(self.ref, None)
        return True

    def cancel(self) -> bool:
        """Withdraw it if no message has matched it; return whether it did."""
        return self._dispatcher.cancel_receiving([self])

    def waits(self) -> bool:
        """Return whether no message has matched it."""
        assert self._wanted is not None
        return self.paused or self._dispatcher.mailbox.waits(self._wanted)

    def cancel_posted(self) -> None:
        """Withdraw it; no message has matched it."""
        self._end(asyncio.CancelledError())

    def _end(self, error: BaseException) -> None:
        """End it with `error`; no message has matched it."""
        assert self._wanted is not None
        if not self.paused:
            self._dispatcher.mailbox.cancel(self._wanted)
            self._wanted.finish(None, error)
            return
        self.paused = False
        self._dispatcher.operations.posted.pop(self.ref, None)
        if (handle := self.handle) is not None:
            self._dispatcher.over(handle, None, error)

    def lapse(self) -> bool:
        """Withdraw it if the program has dropped its handle; return whether it did. From any thread."""
        done = False

        def now() -> None:
            nonlocal done
            self._dispatcher.progress.called()  # the receive itself may still be in the inbox
            if self.handle is None and self.ref in self._dispatcher.operations.posted and self.waits():
                self.cancel_posted()
                done = True

        if self.handle is None:
            self._dispatcher.locked(now)
        return done

    def _finish(self, completion: Completion, arrived: Arrived | None, error: BaseException | None) -> None:
        if completion.given_back is not None:
            completion.given_back(arrived, error)
            completion(None, asyncio.CancelledError())
        elif arrived is not None and self.sending is not None:
            self._arrived = (completion, arrived)
        else:
            if self._unsent is not None:
                arrived, error = None, self._unsent
            if completion.handle is None and not self.take():
                self._dispatcher.operations.posted.pop(self.ref, None)
            self._leave_sending()
            whole = arrived is not None and self._asked.kind == ANY
            completion(replace(arrived, data=arrived) if arrived is not None and whole else arrived, error)

    def _resume(self, handle: Posted[Any]) -> None:
        why = self._dispatcher.refusal
        if self.paused and internals.is_pending(handle) and why is None:
            try:
                self.post(handle)()
            except BaseException:
                release(self._asked.claims)
                raise
            return
        release(self._asked.claims)
        if self.paused and why is not None:
            self._end(again(why))

    def _pause(self, handle: Posted[Any]) -> None:
        self._dispatcher.progress.called()
        operation = PostedOperation.of(handle)
        if self.paused or operation.attended or not (operation.is_pending or not operation.consumed):
            return
        mailbox, wanted, completion = self._dispatcher.mailbox, self._wanted, self._completion
        assert wanted is not None
        assert completion is not None
        if operation.is_pending and mailbox.waits(wanted):
            mailbox.cancel(wanted)
            completion.release()
        elif operation.is_pending and wanted.given is not None and self._asked.into is None:
            self._hand_over(handle, completion, wanted)
        elif operation.succeeded:
            mailbox.take_back(wanted, self._value_of(handle))
            operation.revoke()
        else:
            return
        self.paused = True
        self._leave_sending()
        self._dispatcher.operations.posted[self.ref] = self
        mailbox.match_again()

    def _hand_over(self, handle: Handle[Any], completion: Completion, wanted: Wanted) -> None:
        """The message goes to another receive; a new handle stands for the rest of its transfer."""
        completion.given_back = self._dispatcher.mailbox.put_back(wanted)
        completion.handle = wanted.handle = stand_in = self._dispatcher.stand_in(handle)
        self._completion = None
        self._dispatcher.operations.issued[stand_in] = self.peer
        self._dispatcher.operations.issued.pop(handle, None)
        came, self._arrived = self._arrived, None
        if came is not None:
            self._finish(came[0], came[1], None)
        Operation.of(handle).finish()

    def _value_of(self, handle: Handle[Any]) -> Any:  # noqa: ANN401
        """Return the received data in the form that the mailbox takes back."""
        value = handle.result()
        if self._asked.kind == ANY:
            return value.data
        return Unpacked(value) if self._asked.kind == Mailbox.OBJECT else value

    # --- the other half of a sendrecv -------------------------------------------------------------------------

    def sent(self, error: BaseException | None) -> None:
        """The other half is finished; with the transport lock held."""
        self.sending, self._unsent = None, error
        came, self._arrived = self._arrived, None
        if came is not None:
            self._finish(came[0], came[1], None)
        elif error is not None and self.waits():
            self._end(error)

    def _leave_sending(self) -> None:
        """Have the other half, if it is in flight, be waited for by itself."""
        if self.sending is not None:
            self._dispatcher.operations.issued[self.sending] = self.peer
