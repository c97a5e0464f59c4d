"""Ends the failed operations of a communicator, by an exchange of statements and a drain of messages.

The rules are those of `conversation`. This module has the input and output. Statements travel over the control channel,
whose listener thread handles them, so a busy loop delays nothing. A rank that has not issued the number answers on that
thread. A rank that has issued the number needs the transport lock, since none of its messages may start after its
statement.
"""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, TypeVarTuple

from aiodist.backends.base import PeerGone, Stopped, Transport, again, key_of
from aiodist.backends.shm import ShmNative
from aiodist.collectives.endpoint import Differ, Traffic
from aiodist.communicator.conversation import (
    UNANSWERED,
    Action,
    Ask,
    Cause,
    Clear,
    Conclude,
    Conversations,
    Drain,
    SendStatement,
    StartTimer,
    Statement,
    Verdict,
)
from aiodist.communicator.issued import Issued
from aiodist.communicator.names import NamedOperations
from aiodist.communicator.operation import CommunicatorOperation, OperationState, When
from aiodist.communicator.oplog import Latest
from aiodist.communicator.settlement import Settlement
from aiodist.control import HUB, LIVENESS_SECONDS, Channel, ChannelClosed, name_ranks
from aiodist.control.thread import settle_soon
from aiodist.errors import (
    AiodistError,
    BackendError,
    CommunicatorAborted,
    CommunicatorError,
    MismatchError,
    PeerError,
    RemoteError,
)
from aiodist.handles import Progress

_FINAL = (CommunicatorError, PeerError, asyncio.CancelledError)
"""Errors that need no conversation, since the communicator was aborted, or the operation was withdrawn."""

Then = Callable[[BaseException], object]
Ts = TypeVarTuple("Ts")


@dataclass(eq=False, slots=True)
class _Failure:
    """A failed number on this rank, from the first statement of any rank.

    The record is kept, as the conversation is, for late statements and a late issue of the number.
    """

    traffic: Traffic | None = None
    """Messages of this rank, final at the rank's statement, or None before."""
    issued: bool = True
    """False if the statement says that this rank has not issued the number."""
    timer: TimerHandle | None = None
    """Timer of the liveness bound (loop's thread)."""
    expired: bool = False
    """True after the liveness bound, when a verdict ends the operation without a drain."""


class Failures:
    """The failed operations of one communicator on this rank.

    The transport lock is held in all methods, unless the docstring says otherwise.
    """

    def __init__(
        self, name: str, channel: Channel, ranks: Sequence[int], transport: Transport, within: ShmNative | None
    ) -> None:
        """`ranks` are the world ranks of the communicator, in order. `within` are the steps in shared memory."""
        self.to_fail: dict[int, None] = {}
        """Numbers that this rank stated not to have issued, until the issue.

        The compiled core shares this dict, and issues nothing while there are such numbers.
        """
        self._name = name
        self._topic = f"failures:{name}"
        self._channel = channel
        self._ranks = list(ranks)
        self._rank = self._ranks.index(channel.rank)
        self._transport = transport
        self._within = within
        self._progress = Progress.current()
        self._conversations = Conversations(self._rank, len(ranks))
        self._lock = Lock()
        """Held for each event of the conversations, and while this rank checks if it has issued a number."""
        self.failed: Latest[_Failure] = Latest()
        """Failed operations, by number. Never empty while `to_fail` has numbers."""
        self.aborting = False
        """True once a rank notifies the others of an abort. The reason of the abort precedes later verdicts."""

    def connect(
        self,
        issued: Issued,
        names: NamedOperations,
        settlement: Settlement,
        abort_here: Callable[[AiodistError], None],
        abort_everywhere: Callable[[AiodistError], None],
    ) -> None:
        """Use the parts that use this object. The two functions abort the communicator (loop's thread)."""
        self._issued, self._names, self._settlement = issued, names, settlement
        self._abort_here, self._abort_everywhere = abort_here, abort_everywhere
        self._channel.subscribe(self._topic, self._heard)

    def close(self) -> None:
        """Receive no more statements (loop's thread)."""
        self._channel.unsubscribe(self._topic)
        for number in list(self.failed):
            self._stop_timer(number)

    # --- failures of this rank ------------------------------------------------------------------------------------

    def ends_alone(self, operation: CommunicatorOperation, error: BaseException) -> bool:
        """Return True if `error` ends the operation now, or False if a conversation finds the cause."""
        number = operation.number
        failure = self.failed.get(number)
        if (failure is not None and failure.traffic is not None) or isinstance(error, (Differ, Stopped)):
            return False
        if isinstance(error, _FINAL) or len(self._ranks) == 1 or (number < 0 and not isinstance(error, BackendError)):
            return True
        if number < 0:
            self.inquire(error, partial(self._settlement.settle, operation, None, final=True))
        else:
            cause = Cause.GONE if isinstance(error, PeerGone) else Cause.FAILED
            self._state(number, Cause.MISMATCH if isinstance(error, MismatchError) else cause, _text(error))
        return False

    def differ(self, operation: CommunicatorOperation) -> None:
        """Handle an operation on which the ranks differ."""
        if not self.join(operation):
            self._state(operation.number, Cause.MISMATCH)

    def join(self, operation: CommunicatorOperation) -> bool:
        """Stop an operation if this rank has made its statement about the number.

        Return True if the operation is stopped.
        """
        number = operation.number
        if self.to_fail:
            with self._lock:  # the listener thread may look now if the operation is issued
                self.to_fail.pop(number, None)
        failure = self.failed.get(number)
        if failure is None or failure.traffic is None:
            return False
        operation.decide(Differ(number))
        if (verdict := self._conversations.verdict(number)) is not None:
            self._end(operation, verdict)
        return True

    def inquire(self, error: BaseException, then: Then) -> None:
        """Ask if all ranks are alive, then call `then` with the loss of a rank or else with `error`.

        Any thread may call this. The transport lock is held when `then` is called.
        """
        others = [rank for rank in self._ranks if rank != self._channel.rank]
        self._channel.ask_alive(others, partial(self._answered, error, then))

    def _answered(self, error: BaseException, then: Then, silent: list[int]) -> None:
        """Handle the end of an inquiry, without an answer of the world ranks `silent` (any thread)."""
        exits = self._channel.exits().values()
        lost = next((exit for exit in exits if not exit.clean and exit.rank in (*self._ranks, HUB)), None)
        if lost is not None:
            error = lost.error()
        elif silent:
            error.add_note(f"{name_ranks(map(self._ranks.index, silent))} {UNANSWERED}")
        self._soon(then, error)

    def cause(self, error: BaseException) -> asyncio.Future[BaseException]:
        """Return a future of the error to raise in place of `error` (loop's thread). See `inquire`."""
        answer: asyncio.Future[BaseException] = self._progress.loop.create_future()
        self.inquire(error, partial(settle_soon, answer))
        return answer

    def break_off(self, error: BaseException) -> None:
        """Abort the communicator with `error` or the loss of a rank, since its ranks can no longer be compared."""
        wrapped = BackendError(f"the ranks of communicator {self._name!r} cannot be compared: {error}")
        wrapped.__cause__ = error
        self.inquire(wrapped, lambda _: self._progress.post(self._abort_everywhere, wrapped))

    # --- statements -----------------------------------------------------------------------------------------------

    def _state(self, number: int, cause: Cause = Cause.NONE, error: str = "") -> None:
        """Stop the operation on this rank, and make this rank's statement."""
        failure = self._failure(number)
        if failure.traffic is not None:
            return
        operation = self._issued.operation(number, look=True)
        traffic = failure.traffic = self._issued.traffic(number)
        self._names.hold(number)
        bound, begun = False, traffic.begun
        if operation is not None:
            # A failed native call counts too, since the library is in an unknown state. Such calls may have no record.
            native = operation.traffic is None or operation.traffic.native > 0
            agreed = operation.agreed.is_set and operation.agreed.error is None
            bound = (native and agreed) or operation.when is When.NOW
            begun = operation.traffic is not None and operation.admitted.is_set and operation.admitted.error is None
            operation.decide(Differ(number))
        self._stop_steps(number, traffic)
        statement = Statement(*self._issued.description(number), True, cause, error, begun, bound)
        self._do(self._conversations.state, number, statement)

    def _failure(self, number: int) -> _Failure:
        """Return the record of a failed number (any thread)."""
        with self._lock:
            failure = self.failed.get(number)
            if failure is None:
                failure = self.failed[number] = _Failure()
            return failure

    def _stop_steps(self, number: int, traffic: Traffic) -> None:
        traffic.stopped_by = Differ(number)
        if self._within is not None:
            self._within.stop(key_of(number))

    def _heard(self, world_rank: int, message: list[Any]) -> None:
        """Handle a statement of another rank (listener thread)."""
        number, fields, sent, asked = message
        rank = self._ranks.index(world_rank)
        self.note_exits()  # first, since the loop may note the exits later
        if fields is None:
            self.aborting = True
            self._progress.post(self._abort_here, CommunicatorAborted(sent))
        else:
            self._do(self._conversations.hear, rank, number, Statement.read(fields), dict(sent), dict(asked))

    def _answer(self, number: int) -> None:
        """Make this rank's statement about an operation that failed on another rank (listener thread)."""
        failure = self._failure(number)
        with self._lock:
            self.to_fail[number] = None  # first: the program may issue `number` now, and then waits for the lock
            if number in self._issued:
                del self.to_fail[number]
            else:
                failure.traffic, failure.issued = Traffic(), False
        if failure.issued:
            self._progress.start_from_thread(self._state, number)
        else:
            self._do(self._conversations.state, number, Statement(self._issued.last(), issued=False))

    def note_exits(self, *, clean: bool = False) -> None:
        """Note the lost ranks in the order of the control channel. True for `clean` also notes the ranks that left."""
        for exit in self._channel.exits().values():
            for rank, world_rank in enumerate(self._ranks):
                if exit.rank in (world_rank, HUB) and rank != self._rank and exit.clean <= clean:
                    self._do(partial(self._conversations.leave, rank, clean=exit.clean))

    # --- actions in any thread, unless the docstring names a thread -------------------------------------------------

    def _do(self, event: Callable[..., list[Action]], *args: Any) -> None:  # noqa: ANN401
        """Perform the actions that an event of the conversations returns."""
        with self._lock:
            actions = event(*args)
        for action in actions:
            match action:
                case Ask(number):
                    self._answer(number)
                case SendStatement(number, statement):
                    traffic = self._failure(number).traffic
                    for rank in range(len(self._ranks)):
                        sent, asked = ({}, {}) if traffic is None else traffic.with_rank(rank)
                        self.send(rank, [number, list(statement), list(sent.items()), list(asked.items())])
                case StartTimer(number):
                    self._progress.post(self._start_timer, number)
                case Drain():
                    self._progress.start_from_thread(self._drain, action)
                case Conclude(number, verdict):
                    self._soon(self._conclude, number, verdict)
                case Clear(number):
                    self._progress.start_from_thread(self._names.release, number)

    def _soon(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Make a call with the transport lock held, after an abort that a rank has requested."""
        if self.aborting:
            self._progress.post(self._progress.with_lock, call, *args)
        else:
            self._progress.start_from_thread(call, *args)

    def send(self, rank: int, message: list[Any]) -> None:
        """Send a message to another rank."""
        if rank != self._rank:
            with suppress(ChannelClosed):  # the world is closed, as the other ranks know
                self._channel.send(self._ranks[rank], self._topic, message)

    def tell_abort(self, text: str) -> None:
        """Notify every other rank to abort the communicator."""
        self.aborting = True
        for rank in range(len(self._ranks)):
            self.send(rank, [0, None, text, None])

    def _drain(self, action: Drain) -> None:
        """Drain messages (transport lock held)."""
        if (traffic := self._failure(action.number).traffic) is not None:
            # Both ranks may have stopped steps in shared memory at the same time, so each stops them again.
            self._stop_steps(action.number, traffic)
            traffic.clear(self._transport, action.rank, action.sent, action.asked)

    def _start_timer(self, number: int) -> None:
        """Let `_expire` be called after the liveness bound, unless the timer runs (loop's thread)."""
        failure = self._failure(number)
        if failure.timer is None:
            failure.timer = self._progress.loop.call_later(LIVENESS_SECONDS, self._expire, number)

    def _stop_timer(self, number: int) -> None:
        """Cancel the timer of a failed number (loop's thread)."""
        failure = self._failure(number)
        if failure.timer is not None:
            failure.timer.cancel()
            failure.timer = None

    def _expire(self, number: int) -> None:
        """End the wait for statements and for the drain, after the liveness bound (loop's thread)."""
        failure = self._failure(number)
        failure.timer, failure.expired = None, True
        self.note_exits(clean=True)
        self._do(self._conversations.expire, number)
        self._progress.with_lock(self._end_undrained, number)

    # --- verdicts -------------------------------------------------------------------------------------------------

    def _conclude(self, number: int, verdict: Verdict) -> None:
        """Perform the verdict, even if the operation has ended on this rank."""
        operation = self._issued.operation(number)
        if verdict.abort:
            self._progress.post(self._abort, number, verdict)
        elif operation is not None:
            self._end(operation, verdict)
        if operation is None or operation.state is OperationState.DONE:
            self._progress.post(self._stop_timer, number)

    def _end(self, operation: CommunicatorOperation, verdict: Verdict) -> None:
        """End a failed operation after its drain, or now if a rank is lost or silent."""
        if verdict.abort:
            return  # `_abort` ends the operation
        number = operation.number
        operation.verdict = error = self._error(number, verdict, operation.error)
        waits = operation.state is not OperationState.DRAINED and not self._failure(number).expired
        if waits and not verdict.silent and verdict.cause is not Cause.LOST:
            self._progress.post(self._start_timer, number)
        else:
            self._settlement.settle(operation, None, error, final=True)

    def _abort(self, number: int, verdict: Verdict) -> None:
        """Abort the communicator, which cannot continue, then end the operation (loop's thread)."""
        self._abort_here(self._progress.with_lock(self._aborted, number, verdict))
        self._progress.with_lock(self._end_undrained, number)

    def _aborted(self, number: int, verdict: Verdict) -> AiodistError:
        """Give the operation its error, and return the error of the communicator."""
        operation = self._issued.operation(number)
        error = self._error(number, verdict, None if operation is None else operation.error)
        if isinstance(error, RemoteError):
            error = CommunicatorAborted(f"rank {verdict.rank}: {verdict.error}", comm=self._name)
        if operation is not None:
            operation.verdict = error
        return again(error) if isinstance(error, AiodistError) else CommunicatorAborted(_text(error))

    def _end_undrained(self, number: int) -> None:
        """End an operation with a verdict, even if its messages are not drained."""
        if self._conversations.verdict(number) is not None:
            operation = self._issued.operation(number)
            if operation is not None and operation.verdict is not None:
                self._settlement.settle(operation, None, operation.verdict, final=True)

    def _error(self, number: int, verdict: Verdict, own: BaseException | None) -> BaseException:
        """Return the error that this rank raises. Its own part failed with `own`, or `own` is None."""
        called, rank = self._issued.title(number), verdict.rank
        own = None if isinstance(own, (Differ, Stopped)) else own
        silent = f"{name_ranks(verdict.silent)} {UNANSWERED}"
        if verdict.cause is Cause.MISMATCH and rank < 0:
            since = f" (out of step since #{verdict.since})" if 0 <= verdict.since < number else ""
            data = "; the output of the operation is unspecified" if verdict.begun else ""
            later = self._issued.description(number)[0] if not self._failure(number).issued else ""
            side = f"; rank {self._rank} has issued {later} since then" if later else ""
            return MismatchError(f"ranks disagree on {called}{since}: {verdict.sides}{side}{data}")
        if verdict.cause is Cause.LOST:
            named = (self._ranks[rank], HUB)
            return next(exit for exit in self._channel.exits().values() if exit.rank in named).error()
        if own is not None and (verdict.cause is not Cause.MISMATCH or isinstance(own, MismatchError)):
            if verdict.silent:
                own.add_note(silent)
            return own
        if verdict.cause is Cause.GONE:
            return PeerGone(f"{called}: {verdict.error}", comm=self._name)
        if verdict.cause is Cause.SILENT:
            return PeerError(f"{called} failed, and {silent}: {verdict.error}", comm=self._name)
        return RemoteError(f"{called}: rank {rank}'s part failed: {verdict.error}", raised_by=rank, comm=self._name)

    def is_open(self, operation: CommunicatorOperation) -> bool:
        """Return True if the verdict on a failed operation is still to come."""
        return (
            operation.error is not None and operation.verdict is None and self._conversations.is_open(operation.number)
        )


def _text(error: BaseException) -> str:
    return str(error.args[0]) if isinstance(error, AiodistError) else f"{type(error).__name__}: {error}"
