"""Ends a communicator: drains or aborts the operations in flight, and refuses later calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from aiodist import _core
from aiodist.backends.base import again
from aiodist.communicator.failures import Failures
from aiodist.communicator.issuing import Issuing
from aiodist.communicator.operation import Pending
from aiodist.communicator.settlement import Settlement
from aiodist.communicator.watchdog import Watchdog
from aiodist.control import Exit
from aiodist.errors import (
    AiodistError,
    CommunicatorAborted,
    CommunicatorClosed,
    MismatchAborted,
    MismatchError,
    OperationTimeout,
    PeerError,
)
from aiodist.handles import Handle, Progress, internals, listed
from aiodist.handles.combinators import all_over
from aiodist.handles.deadline import wait_within
from aiodist.handles.state import plight

_REPORT_SECONDS: Final = 2.0
"""Delay of the report of a failed close to the other ranks, in seconds.

Ranks often fail to close at the same time, by equal deadlines or one signal. Each of them should raise its own reason.
The report is for a rank that has no reason.
"""


class Lifetime:
    """The end of one communicator on this rank (loop's thread, unless a method says otherwise)."""

    def __init__(
        self,
        place: tuple[str, int],
        ranks: Sequence[int],
        progress: Progress,
        operations: Pending,
        settlement: Settlement,
        failures: Failures,
        watchdog: Watchdog,
        issuing: Issuing | None,
    ) -> None:
        """`place` is the name of the communicator and this rank's number there. `ranks` are world ranks, in order."""
        self.refusal: AiodistError | RuntimeError | None = None
        """Error that every call raises, or None while calls are accepted."""
        self.issuing = issuing
        """The issuing thread, if several threads may issue, or None if only the thread of the loop may."""
        self.issuer: _core.Issuer | None = None
        """The compiled core's part of issuing, or None if no lane can run operations."""
        self.on_lost: list[Callable[[int, AiodistError], None]] = []
        """Functions called with each lost rank, or -1 if the hub is lost, and the error."""
        self.on_abort: list[Callable[[AiodistError], None]] = []
        """Functions called at an abort for any reason, and again if another rank aborts the communicator later."""
        self.stops: list[Callable[[AiodistError], object]] = []
        """Functions that abort the parts of the communicator (transport lock held)."""
        self.subscriptions: list[Callable[[], object]] = []
        """Functions that end the subscriptions of messages of other ranks."""
        self._name, self._rank = place
        self._ranks = tuple(ranks)
        self._progress = progress
        self._operations = operations
        self._settlement = settlement
        self._failures = failures
        self._watchdog = watchdog

    def undisturbed(self) -> AbstractContextManager[object]:
        """Return a context in which no thread issues."""
        return nullcontext() if self.issuing is None else self.issuing

    def pending(self) -> list[Handle[Any]]:
        """Return the pending handles, in order of issue."""
        return [handle for handle in self._operations if internals.is_pending(handle)]

    def pending_collectives(self) -> list[Handle[Any]]:
        """Return the pending handles of collectives."""
        return [handle for handle, meets in self._operations.items() if meets is True and internals.is_pending(handle)]

    def cancel_receives(self) -> None:
        """Withdraw every receive without a message.

        Warn of each, by a RuntimeWarning if no code awaited the receive.
        """
        for handle in self.pending():
            forgotten = not (internals.is_retrieved(handle) or internals.is_awaited(handle))
            if handle.op.startswith("recv") and handle.cancel() and (where := handle.origin) is not None:
                message = f"{handle} was never matched{' nor awaited' * forgotten}, and withdrawn at close"
                kind = RuntimeWarning if forgotten else ResourceWarning
                warnings.warn_explicit(message, kind, where.filename, where.lineno)

    async def drain(self, seconds: float) -> None:
        """Wait until no operation is in flight.

        Raise `OperationTimeout` with the list of pending operations after `seconds`.
        """
        pending = self.pending()
        if pending and self.refusal is None:
            await wait_within([all_over(pending, self._progress.loop)], seconds)
            left = [handle for handle in pending if not handle.done()]
            if left:
                known, late = plight(left)
                text = f"still pending after {round(seconds, 1):g} s: {listed(left)}{known}"
                raise OperationTimeout(text, late=late, comm=self._name)

    def peer_lost(self, exit: Exit) -> None:
        """Abort this communicator with the loss of a rank, and notify `on_lost`."""
        error = exit.error()
        self._failures.note_exits()
        self.abort(error)
        for tell in list(self.on_lost):
            tell(self._ranks.index(exit.rank) if exit.rank in self._ranks else -1, error)

    async def settled(self) -> None:
        """Wait until all issued collectives are done, except named and detached ones."""
        if pending := [handle for handle in self.pending_collectives() if not internals.is_detached(handle)]:
            await all_over(pending, self._progress.loop)

    def supersede(self, error: CommunicatorAborted) -> None:
        """Abort the communicator on all ranks, unless aborted already.

        Later calls raise `error` in place of the earlier error.
        """
        aborted = self.refusal is not None
        self.abort_everywhere(error)
        with self.undisturbed():
            self.refuse(error)
        if aborted:  # for example after a loss
            self._notify_aborted(error)
            self._failures.tell_abort(str(error))

    def abort_everywhere(self, error: AiodistError) -> None:
        """Abort the communicator on all ranks, unless aborted already."""
        if self.refusal is None:
            # Before the abort on this rank, so that no rank takes lost messages for the cause.
            self._failures.tell_abort(f"rank {self._rank}: {error}")
            self.abort(error)

    def abort_soon(self, error: AiodistError, *, tell: bool) -> None:
        """Abort the communicator on this rank now, and on ranks without a reason of their own later."""
        if self.refusal is None:
            self.abort(error)
            if tell:
                text = f"rank {self._rank}: {error}"
                self._progress.loop.call_later(_REPORT_SECONDS, self._failures.tell_abort, text)

    def abort(self, error: AiodistError) -> None:
        """Reject pending operations and refuse later calls. Transfers that never end keep their buffers."""
        if self.refusal is not None:
            if isinstance(error, CommunicatorAborted):
                self._notify_aborted(error)
            return
        with self.undisturbed():
            self.refuse(self._aborted(error))
        self._watchdog.close()
        self._progress.with_lock(self._fail_all, error)
        self._notify_aborted(error)

    def _notify_aborted(self, error: AiodistError) -> None:
        for tell in list(self.on_abort):
            tell(error)

    def _fail_all(self, error: AiodistError) -> None:
        """End the operations in flight (transport lock held)."""
        self._progress.make_calls()  # the inbox may still have operations
        for operation in self._operations.in_flight():
            if isinstance(error, PeerError) and self._failures.is_open(operation):
                continue  # the verdict may be that the ranks differ
            self._settlement.settle(operation, None, operation.verdict or again(error), final=True)
        for stop in self.stops:
            stop(error)

    def _aborted(self, error: AiodistError) -> AiodistError:
        if not isinstance(error, MismatchError) or isinstance(error, MismatchAborted):
            return error
        aborted = MismatchAborted(f"communicator {self._name!r} was aborted: {error}", comm=self._name)
        aborted.__cause__ = error
        return aborted

    def close(self) -> None:
        """Refuse every later call, and end the operations that are still in flight."""
        self._watchdog.close()
        if self.refusal is None:
            with self.undisturbed():
                self.refuse(CommunicatorClosed(f"communicator {self._name!r} is closed", comm=self._name))
        self.unsubscribe()

    def unsubscribe(self) -> None:
        """Receive no more messages of other ranks. End operations that wait for their verdict."""
        for unsubscribe in self.subscriptions:
            unsubscribe()
        self._progress.with_lock(self._end_waiting)

    def _end_waiting(self) -> None:
        """End the operations that an abort has left to the verdict of the ranks (transport lock held)."""
        if isinstance(why := self.refusal, AiodistError):
            for operation in self._operations.in_flight():
                self._settlement.settle(operation, None, operation.verdict or again(why), final=True)

    def forked(self) -> None:
        """Refuse calls in a forked child of the process that opened the communicator."""
        self.issuing = None  # the issuing thread does not exist here
        self._watchdog.watch.members.clear()  # the timer of the watch may fire here
        self.refuse(RuntimeError(f"communicator {self._name!r} was opened before os.fork: a child cannot use it"))

    def refuse(self, why: AiodistError | RuntimeError) -> None:
        """Raise `why` in every later call."""
        self.refusal = why
        if self.issuer is not None:
            self.issuer.open = False
