"""Ends operations: releases the bytes, then sets the outcome. Only this module ends operations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from aiodist.collectives.endpoint import Differ
from aiodist.collectives.messages import Arrived
from aiodist.communicator.changes import changed, report
from aiodist.communicator.claims import release
from aiodist.communicator.counts import Counts
from aiodist.communicator.names import Named
from aiodist.communicator.operation import CommunicatorOperation, NativeCall, OperationState, Peer, Pending
from aiodist.errors import AiodistError
from aiodist.handles import Handle, Progress, internals
from aiodist.handles.kernel import Program, ours, run


class Settlement:
    """Runs and ends the operations of one communicator. The transport lock is held, unless a method says otherwise."""

    def __init__(
        self,
        place: tuple[str, int],
        progress: Progress,
        pending: Pending,
        ends_alone: Callable[[CommunicatorOperation, BaseException], bool],
        *,
        threads: bool,
    ) -> None:
        """`place` is the name of the communicator and this rank's number there.

        `ends_alone` returns True if an error ends the operation now, or False if the verdict of the ranks will.
        `threads` is True if threads other than the loop's may issue.
        """
        self._place = place
        self._progress = progress
        self._pending = pending
        self._ends_alone = ends_alone
        self._threads = threads
        self.counts: Counts | None = None
        """Counts by kind, or None without metrics."""

    def begin(
        self, operation: CommunicatorOperation, work: Program[Any] | NativeCall, refusal: BaseException | None = None
    ) -> None:
        """Begin the work of an operation, or end a collective with the `refusal` of the ranks."""
        if refusal is not None:
            if not isinstance(work, NativeCall):
                work.close()
            self._called(operation, None, refusal)
            return
        if operation.state is OperationState.CHECKED:
            operation.state = OperationState.STARTED
        if isinstance(work, NativeCall):
            if operation.traffic is not None:
                operation.traffic.native = 1
            done = partial(self._called, operation, work.result)
            try:
                work.call[0](*work.call[1:], done)
            except Exception as raised:
                if operation.state is OperationState.DONE:  # `done` itself has raised
                    raise
                done(ours(raised))
        else:
            run(work, partial(self.settle, operation), partial(self.drained, operation))

    def _called(self, operation: CommunicatorOperation, result: object, error: BaseException | None) -> None:
        """End an operation that was refused, or whose native call has ended: all ranks have agreed before the call."""
        self.drained(operation)
        self.settle(operation, result, error)

    def drained(self, operation: CommunicatorOperation) -> None:
        """Release the bytes, which no transfer uses any more. A verdict that has waited then ends the operation.

        A change by the program is found here, since the program may write as soon as the handle is done.
        """
        if operation.marks and operation.state is not OperationState.DONE:
            self.look(operation, changed(operation.marks))
        operation.marks = ()
        release(operation.claims)
        operation.claims = ()
        if operation.state is not OperationState.DONE:
            operation.state = OperationState.DRAINED
            if operation.verdict is not None:
                self._end(operation, None, operation.verdict)

    def look(self, operation: CommunicatorOperation, tensor: Tensor | None) -> None:
        """Let a result of `operation` report that the program has changed `tensor`, if any, during the operation."""
        if tensor is not None and not operation.reported:
            operation.reported = True
            operation.convert = partial(report, operation, tensor, operation.convert)

    def settle(
        self,
        operation: CommunicatorOperation,
        result: object,
        error: BaseException | None = None,
        *,
        final: bool = False,
    ) -> None:
        """End an operation with the result or the error of this rank's part. A second outcome has no effect.

        The result of a collective counts once all ranks agree, unless a part has failed on some rank, and is converted
        first. An error may wait for the verdict of the ranks. `final` is True for that verdict, and for the reason of
        an abort.
        """
        if operation.state is OperationState.DONE:
            return
        if error is None and not isinstance(operation.meets, Peer):
            if not operation.agreed.is_set:
                operation.agreed.wait(partial(self.settle, operation, result))
                return
            error = operation.agreed.error
        if error is None:
            if operation.error is not None:  # zeros of other ranks may have completed the operation
                return
            if operation.convert is not None and operation.handle is not None:
                self._convert_soon(operation, operation.convert, result)
                return
        elif not final and operation.handle is not None:
            if operation.error is None or isinstance(operation.error, Differ):
                operation.error = error
            if not self._ends_alone(operation, error):
                return
        self._end(operation, result, error)

    # --- conversion: without the lock ---------------------------------------------------------------------------

    def _convert_soon(self, operation: CommunicatorOperation, convert: Callable[[Any], Any], result: object) -> None:
        """Let the loop's thread convert the result, or a thread that waits for the handle."""
        call = partial(self._convert, operation, convert, result)
        if self._threads:
            operation.finish_with(call)
        else:
            self._progress.post(call)

    def _convert(self, operation: CommunicatorOperation, convert: Callable[[Any], Any], result: object) -> None:
        value: Any = None
        error: BaseException | None = None
        if operation.given_back is None:
            try:
                value = convert(result)
            except BaseException as raised:  # noqa: BLE001  - the error belongs to the task that awaits the operation
                error = raised
        self._progress.start_from_thread(self._converted, operation, result, value, error)

    def _converted(
        self, operation: CommunicatorOperation, result: object, value: object, error: BaseException | None
    ) -> None:
        """End the operation (lock held), unless a thread has given the message back during the conversion."""
        if operation.given_back is not None:
            operation.given_back(result, None)
            value, error = None, asyncio.CancelledError()
        if operation.error is None:
            self._end(operation, value, error)

    # --- the outcome: with the lock -----------------------------------------------------------------------------

    def _end(self, operation: CommunicatorOperation, result: object, error: BaseException | None) -> None:
        """Remove an operation from the table, and settle the handle."""
        if operation.state is OperationState.DONE:
            return
        operation.state = OperationState.DONE
        if operation.handle is None:  # a receive that the program has dropped
            return
        self._pending.remove(operation)
        if isinstance(operation.meets, Named):
            operation.meets.operation = None
        if error is not None:
            self._reject(operation, operation.handle, error)
        else:
            if isinstance(result, Arrived):
                if self.counts is not None:
                    sent = operation.handle.nbytes if operation.meets.dst is not None else 0
                    self.counts.nbytes[operation.handle.op] += result.nbytes + sent
                operation.set_message(result.source, result.tag, result.nbytes)
                result = result.data
            operation.resolve(result)

    def _reject(self, operation: CommunicatorOperation, handle: Handle[Any], error: BaseException) -> None:
        """Reject the handle with an error that names rank, communicator and operation."""
        if isinstance(error, asyncio.CancelledError):
            operation.cancel()
            return
        comm, rank = self._place
        if isinstance(error, AiodistError):
            error.located(rank=rank, comm=comm, op=str(handle))
        else:
            with suppress(Exception):  # an error class of the user may refuse notes
                error.add_note(f"raised in {handle}, communicator {comm}, rank {rank}")
        internals.reject_pending(handle, error)  # the core may have resolved the handle of a lane, in any thread
