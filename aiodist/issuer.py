"""What happens around every operation of a communicator: claims, order, deadlines, completion, failure."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from threading import get_ident
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakSet

from torch import Tensor

from aiodist.backends.base import Begin, Done, Transport
from aiodist.claims import Claim
from aiodist.collectives import operations
from aiodist.collectives.mailbox import Arrived, Mailbox, Wanted
from aiodist.collectives.primitives import Primitives
from aiodist.collectives.program import Program, run
from aiodist.collectives.queued import Queue
from aiodist.collectives.repertoire import Repertoire
from aiodist.control import Channel, Exit
from aiodist.errors import (
    AiodistError,
    BackendError,
    CommunicatorAborted,
    CommunicatorClosed,
    CommunicatorError,
    MismatchError,
    OperationTimeout,
)
from aiodist.handles import LARGE_BYTES, Account, Handle, Progress, in_flight
from aiodist.handles.combinators import all_over
from aiodist.handles.origin import whence
from aiodist.handles.progress import transport_lock
from aiodist.ledger import Fingerprint, Ledger
from aiodist.stalls import Stalls
from aiodist.streams.events import failed

__all__ = ["Issuer", "Plan", "QueuePlan"]

T = TypeVar("T")

_FORK_SECONDS = 1.0
_DISPUTED = (BackendError, MismatchError)


class Plan(NamedTuple):
    """How to reduce tensors of one kind with a single native call, worked out at the first of them."""

    what: Fingerprint
    nbytes: int
    start: Begin
    inline_bytes: int
    """From here on it begins on the progress thread, unless the communicator says otherwise."""


class QueuePlan(NamedTuple):
    """The same for tensors on a device, where a call only queues."""

    what: Fingerprint
    nbytes: int
    queue: Queue


class _Differ(Exception):
    """The ranks brought different digests to a barrier."""


class Issuer:
    """Issues the operations of one communicator and answers for them until they are over."""

    _alive: ClassVar[WeakSet[Issuer]] = WeakSet()

    def __init__(
        self,
        name: str,
        transport: Transport,
        channel: Channel,
        ranks: Sequence[int],
        *,
        checked: bool,
        repertoire: Repertoire | None = None,
    ) -> None:
        """`ranks` are the world ranks of the communicator's, in order."""
        self.name = name
        self.repertoire = repertoire or Repertoire(transport)
        self.ranks = tuple(ranks)
        self.transport = transport
        self.progress = Progress.current()
        self.account = Account(self.progress.loop)
        self.mailbox = Mailbox(transport)
        self.ledger = Ledger(name, channel, ranks, self._disagreed)
        self.timeout: float | None = None
        self.checked = checked and transport.size > 1
        self.large_bytes = LARGE_BYTES
        """From here on the progress thread makes the native calls."""
        self._pending: dict[Handle[Any], bool] = {}
        """In order of issue; True for collectives, which all ranks number alike."""
        self._refusal: AiodistError | RuntimeError | None = None
        self._thread_id = get_ident()
        self._stalls = Stalls(self._pending, self.ledger, self.progress.loop)
        if transport.size == 1:
            self._stalls.silence()
        self.on_lost: list[Callable[[int, AiodistError], None]] = []
        """Told, on the loop, of each rank of this communicator that is gone; -1 when nothing can be known any more."""
        self.on_abort: list[Callable[[AiodistError], None]] = []
        """Told, on the loop, when it is given up, for whatever reason; once."""
        self._alive.add(self)

    @classmethod
    def refusing(cls, name: str, transport: Transport, channel: Channel, error: CommunicatorError) -> Issuer:
        """Return one that refuses every call, for a rank outside the group."""
        issuer = cls(f"{name} (outside)", transport, channel, [channel.rank], checked=False)
        issuer.ledger.close()
        issuer._refusal = error
        return issuer

    # --- issuing -------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise what a call must raise: wrong thread or loop, closed, aborted."""
        if isinstance(self._refusal, RuntimeError):  # a forked child, where asyncio says that no loop runs
            raise self._refusal.with_traceback(None)
        if asyncio._get_running_loop() is not self.progress.loop:
            raise RuntimeError(
                f"communicator {self.name!r} belongs to another thread or event loop: call it on the loop it was "
                "opened on; a second loop opens its own dup()"
            )
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)

    def collective(
        self,
        what: Fingerprint,
        program: Program[T],
        claims: Sequence[Claim] = (),
        *,
        nbytes: int = 0,
        timeout: float | None = None,
        convert: Callable[[Any], Any] | None = None,
        queues: bool = False,
    ) -> Handle[Any]:
        """Issue `program` as the next operation that all ranks take part in.

        With `queues` it only queues its work on a device, which takes no time. `convert` makes the result of what the
        program returns, on the loop's thread: it may run the user's code.
        """
        handle: Handle[T] = self._handle(what.kind, nbytes, claims, timeout, collective=True)
        self._record(what, handle)
        self._begin(handle.seq, program, self._finisher(handle, claims, convert), 0 if queues else nbytes)
        return handle

    def _record(self, what: Fingerprint, handle: Handle[Any]) -> None:
        self.ledger.record(what, handle.raw_origin, _coroutine() if self.checked else "")

    def _begin(self, seq: int, program: Program[Any], finish: Callable[..., None], nbytes: int) -> None:
        if self.checked:
            verdict = partial(self._checked_start, program, finish, nbytes)
            self.ledger.check(seq, lambda error: self.progress.post(partial(verdict, error)))
        else:
            self.run(program, finish, nbytes)

    def run(self, program: Program[Any], finish: Callable[..., None], nbytes: int) -> None:
        """Run `program`, then call `finish(result, error)`."""
        self.start(partial(run, program, finish), nbytes)

    def receive(self, handle: Handle[Any], wanted: Wanted) -> None:
        """Give `wanted` to the mailbox; `handle` can be withdrawn until something matches it."""

        def withdraw() -> bool:
            with transport_lock:
                withdrawn = self.mailbox.withdraw(wanted)
                if withdrawn:
                    wanted.finish(None, asyncio.CancelledError())
            return withdrawn

        handle.set_canceller(withdraw)
        self.start(partial(self.mailbox.receive, wanted), 0)

    def quick(self, plan: Plan | QueuePlan, t: Tensor, timeout: float | None) -> Handle[Tensor]:
        """Issue one native call that works on `t` in place: `collective` without what it does not need."""
        start, nbytes = t.data_ptr(), plan.nbytes
        pending, progress, ledger, stalls = self._pending, self.progress, self.ledger, self._stalls
        if self._refusal is not None or get_ident() != self._thread_id or not (stalls.watching and progress.armed):
            self.check_usable()
            stalls.keep_watch()
        handle: Handle[Tensor] = Handle(progress, "allreduce", ledger.seq, nbytes, whence(3), self.account)
        if timeout is not None or self.timeout is not None:
            self._set_deadline(handle, timeout)
        in_flight.acquire(start, nbytes, True, handle)
        ledger.record(plan.what, handle.raw_origin)
        pending[handle] = True

        def done(error: BaseException | None) -> None:
            in_flight.release(start, nbytes, True)
            if isinstance(error, _DISPUTED) and handle in pending:
                self._ask_the_others(handle, error)
                return
            pending.pop(handle, None)
            if error is not None:
                self._failed(handle, error)
            elif not handle.done():
                handle.resolve(t)

        if isinstance(plan, QueuePlan):
            self._queue(plan.queue, t, handle, done)
        elif nbytes >= (plan.inline_bytes if self.large_bytes == LARGE_BYTES else self.large_bytes):
            then = progress.counted(done) if nbytes < plan.inline_bytes else done
            progress.start_in_thread(partial(plan.start, t, handle.seq, then))
        else:
            progress.start(partial(plan.start, t, handle.seq, done))
        return handle

    def _queue(self, queue: Queue, t: Tensor, handle: Handle[Tensor], done: Done) -> None:
        try:
            handle.fence, call = queue(t, done)
        except RuntimeError as raised:
            call = partial(done, failed(raised))
        self.progress.start(call)

    def barrier(self, p: Primitives, timeout: float | None) -> Handle[None]:
        """Issue a barrier that also compares what the ranks issued before it."""
        what = Fingerprint("barrier")

        def program() -> Program[None]:
            if not (yield from operations.barrier(p, digest)):
                raise _Differ

        handle: Handle[None] = self._handle("barrier", 0, (), timeout, collective=True)
        self._record(what, handle)
        # Checked mode has compared every operation, and goes on after those that differed.
        digest = 0 if self.checked else self.ledger.digest

        def finish(_: None, error: BaseException | None) -> None:
            if isinstance(error, _Differ):
                self.progress.post(lambda: self._explain(handle.seq))
                return
            self._finish(handle, (), None, error)
            if error is None:
                self.account.cover(handle.seq)

        self._begin(handle.seq, program(), finish, 0)
        return handle

    def message(
        self,
        op: str,
        nbytes: int,
        claims: Sequence[Claim],
        timeout: float | None,
        convert: Callable[[Any], Any] | None = None,
    ) -> tuple[Handle[Any], Callable[[Any, BaseException | None], None]]:
        """Return the handle of a point-to-point operation, and what to call when it is over."""
        handle: Handle[Any] = self._handle(op, nbytes, claims, timeout, collective=False)
        return handle, self._finisher(handle, claims, convert)

    def start(self, call: Callable[[], None], nbytes: int) -> None:
        """Make a call with the transport lock held; what copies or reduces a lot leaves the loop alone."""
        if nbytes >= self.large_bytes:
            self.progress.start_in_thread(call)
        else:
            self.progress.start(call)

    def _checked_start(
        self, program: Program[Any], finish: Callable[..., None], nbytes: int, error: AiodistError | None
    ) -> None:
        if error is not None:
            program.close()
            finish(None, error)
        else:
            self.run(program, finish, nbytes)

    def _handle(
        self,
        op: str,
        nbytes: int,
        claims: Sequence[tuple[int, int, bool]],
        timeout: float | None,
        *,
        collective: bool,
    ) -> Handle[Any]:
        self.check_usable()
        handle: Handle[Any] = Handle(self.progress, op, self.ledger.seq, nbytes, whence(4), self.account)
        if timeout is not None or self.timeout is not None:
            self._set_deadline(handle, timeout)
        in_flight.acquire_all(claims, handle)
        self._pending[handle] = collective
        self._stalls.keep_watch()
        return handle

    def _set_deadline(self, handle: Handle[Any], timeout: float | None) -> None:
        seconds = self.timeout if timeout is None else timeout
        assert seconds is not None
        handle.set_deadline(seconds, lambda: dict(self.ledger.late))
        self._stalls.expect(handle, seconds)

    # --- completion: with the transport lock held --------------------------------------------------------------

    def _finisher(
        self, handle: Handle[Any], claims: Sequence[Claim], convert: Callable[[Any], Any] | None
    ) -> Callable[[Any, BaseException | None], None]:
        """Return what is called with the result or the error of an operation."""
        finish = partial(self._finish, handle, claims)
        if convert is None:
            return finish

        def on_loop(result: object) -> None:
            try:
                value = convert(result)
            except BaseException as error:  # noqa: BLE001  - it belongs to whoever awaits the operation
                finish(None, error)
            else:
                finish(value, None)

        def converted(result: object, error: BaseException | None) -> None:
            if error is None:
                self.progress.post(partial(on_loop, result))
            else:
                finish(None, error)

        return converted

    def _finish(
        self, handle: Handle[Any], claims: Sequence[Claim], result: object, error: BaseException | None
    ) -> None:
        for claim in claims:
            in_flight.release(*claim)
        if isinstance(error, _DISPUTED) and self._pending.get(handle):
            self._ask_the_others(handle, error)
            return
        self._pending.pop(handle, None)
        if error is not None:
            self._failed(handle, error)
        elif not handle.done():
            if isinstance(result, Arrived):
                handle.source, handle.tag, handle.nbytes = result.source, result.tag, result.nbytes
                result = result.data
            handle.resolve(result)

    def _failed(self, handle: Handle[Any], error: BaseException) -> None:
        if handle.done():
            return
        if isinstance(error, asyncio.CancelledError):
            handle.withdraw()
            return
        if isinstance(error, MismatchError) and not self.checked:
            # Found without a message; what else they disagree on nobody knows.
            self.progress.post(partial(self.abort, error))
        if isinstance(error, AiodistError):
            error.located(rank=self.transport.rank, comm=self.name, op=str(handle))
        handle.reject(error)

    # --- disagreements ---------------------------------------------------------------------------------------

    def _ask_the_others(self, handle: Handle[Any], error: AiodistError) -> None:
        """A collective's transfer failed, most likely since ranks disagree: each of them knows the line of its call."""

        def conclude() -> None:
            with transport_lock:
                self._pending.pop(handle, None)
                self._failed(handle, error)

        self.progress.post(lambda: self._stalls.ask(handle, conclude))

    def _disagreed(self, error: AiodistError) -> None:
        """On the listener thread: MPI cannot withdraw a collective, so the communicator is given up.

        In checked mode a mismatch is found before anything is sent, and told through the verdict.
        """
        if not (self.checked and isinstance(error, MismatchError)):
            self.progress.post(lambda: self.abort(error))

    def _explain(self, seq: int) -> None:
        """The digests differ at the barrier `seq`: have the ranks show each other what they issued before it."""
        text = f"ranks issued different operations before barrier #{seq}, which are no longer kept"
        self._stalls.compare_history(lambda: self.abort(MismatchError(text)))

    # --- the end -------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Return counts of what was issued and what is pending."""
        return {"collectives": self.ledger.seq, "pending": len(self.pending())}

    def pending(self) -> list[Handle[Any]]:
        """Return what is not over, in order of issue."""
        return [handle for handle in list(self._pending) if not handle.done()]

    def withdraw_receives(self) -> None:
        """Withdraw every receive that nothing matched, and warn of each."""
        for handle in self.pending():
            if handle.op.startswith("recv") and handle.cancel():
                message = f"{handle} was never matched, and withdrawn at close"
                where = handle.origin
                if where is not None:
                    warnings.warn_explicit(message, ResourceWarning, where.filename, where.lineno)

    async def drain(self, seconds: float) -> None:
        """Wait until nothing is pending; raise `OperationTimeout` naming what still is after `seconds`."""
        pending = self.pending()
        if pending and self._refusal is None:
            await asyncio.wait([all_over(pending, self.progress.loop)], timeout=seconds)
            left = [str(handle) for handle in pending if not handle.done()]
            if left:
                raise OperationTimeout(
                    f"still pending after {round(seconds, 1):g} s: {', '.join(left)}", comm=self.name
                )

    def peer_lost(self, exit: Exit) -> None:
        """A rank of this communicator is gone: what is pending and every later call raise that."""
        error = exit.error()
        self.abort(error)
        for tell in list(self.on_lost):
            tell(self.ranks.index(exit.rank) if exit.rank in self.ranks else -1, error)

    def abort(self, error: AiodistError) -> None:
        """Reject what is pending and refuse what comes; buffers stay owned by transfers that never end."""
        if self._refusal is not None:
            return
        self._refusal = self._aborted(error)
        self._stalls.silence()
        self.progress.exclusively(partial(self._fail_all, error))
        self.ledger.give_up(error)
        for tell in list(self.on_abort):
            tell(error)

    def _fail_all(self, error: AiodistError) -> None:
        for handle in self.pending():
            self._failed(handle, copy(error))
        self._pending.clear()

    def _aborted(self, error: AiodistError) -> AiodistError:
        if not isinstance(error, MismatchError):
            return error
        aborted = CommunicatorAborted(f"communicator {self.name!r} was aborted: {error}", comm=self.name)
        aborted.__cause__ = error
        return aborted

    def close(self) -> None:
        """Refuse every later call."""
        self._stalls.silence()
        self.ledger.close()
        if self._refusal is None:
            self._refusal = CommunicatorClosed(f"communicator {self.name!r} is closed", comm=self.name)
        self.account.judge()

    @property
    def refusal(self) -> AiodistError | RuntimeError | None:
        """Why calls are refused, None while they are not."""
        return self._refusal

    def forked(self) -> None:
        """This is a child of the process that opened it."""
        self._refusal = RuntimeError(f"communicator {self.name!r} was opened before os.fork: a child cannot use it")


def _coroutine() -> str:
    """Return the name of the coroutine that the current task runs, as a sign of who issues."""
    task = asyncio.current_task()
    coroutine = task.get_coro() if task is not None else None
    return str(getattr(coroutine, "__qualname__", ""))


def _after_fork() -> None:
    _held_over_fork.clear()
    for issuer in list(Issuer._alive):
        issuer.forked()


_held_over_fork: list[bool] = []


def _before_fork() -> None:
    """Fork while no other thread is in native calls: a lock that one holds there stays taken in the child for ever."""
    _held_over_fork.append(transport_lock.acquire(timeout=_FORK_SECONDS))


def _after_fork_in_parent() -> None:
    if _held_over_fork.pop():
        transport_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)
