"""The end of an operation: release of bytes, then the outcome. Only this module ends operations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from aiodist.collectives.messages import Arrived
from aiodist.communicator.claims import release
from aiodist.communicator.names import Named
from aiodist.communicator.operation import CommunicatorOperation, NativeCall, OperationState, Pending, carry_out
from aiodist.errors import AiodistError
from aiodist.handles import Handle, Operation, Progress
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

    def run(self, operation: CommunicatorOperation, work: Program[Any] | NativeCall) -> None:
        """Run the program of a collective, or make the call of a library, when the ranks agree."""
        if isinstance(work, NativeCall):
            operation.admitted.wait(partial(self._call, operation, work))
        else:
            run(carry_out(operation, work), partial(self.finished, operation), partial(self.drained, operation))

    def _call(self, operation: CommunicatorOperation, work: NativeCall, error: BaseException | None) -> None:
        """Make the call, unless the ranks differ. All have agreed before, so the end of the call ends the operation."""
        if error is not None:
            self.complete(operation, None, error)
            return
        operation.state = OperationState.STARTED
        if operation.traffic is not None:
            operation.traffic.native = 1
        done = partial(self._called, operation, work.result)
        try:
            work.call[0](*work.call[1:], done)
        except Exception as raised:  # noqa: BLE001  - it belongs to the task that awaits the operation
            done(ours(raised))

    def _called(self, operation: CommunicatorOperation, result: object, error: BaseException | None) -> None:
        if error is None:
            self.drained(operation)
            if not operation.stopped:
                self.end(operation, result, None)
        else:  # first the statement about the failure, which says that the library is in an unknown state
            self.finished(operation, None, error)
            self.drained(operation)

    def run_message(self, operation: CommunicatorOperation, program: Program[None]) -> None:
        """Run the program of a message to its end, without a comparison."""
        run(program, partial(self.finished, operation), partial(self.drained, operation))

    def finished(self, operation: CommunicatorOperation, result: object, error: BaseException | None) -> None:
        """Take the result or the error. An error may come before the drain of the bytes."""
        if operation.stopped and error is None:  # zeros of other ranks may have completed the operation
            return
        if error is None and operation.convert is not None and operation.handle is not None:
            call = partial(self._convert, operation, operation.convert, result)
            if self._threads:
                operation.finish_with(call)
            else:
                self._progress.post(call)
            return
        operation.error = operation.error or error
        if operation.handle is not None and (error is None or self._ends_alone(operation, error)):
            self.end(operation, result, error)

    def drained(self, operation: CommunicatorOperation) -> None:
        """Release the bytes, which no transfer uses any more."""
        release(operation.claims)
        operation.claims = ()
        if operation.state is not OperationState.DONE:
            operation.state = OperationState.DRAINED
        if operation.verdict is not None:
            self.end(operation, None, operation.verdict)

    def complete(self, operation: CommunicatorOperation, result: object, error: BaseException | None) -> None:
        """Drain and finish an operation of a single transfer."""
        self.drained(operation)
        self.finished(operation, result, error)

    def settle(self, operation: CommunicatorOperation, result: object, error: BaseException | None) -> None:
        """End an operation. The end of a failed collective waits for the verdict of the ranks."""
        operation.error = error
        if error is None or self._ends_alone(operation, error):
            self.end(operation, result, error)

    def end(self, operation: CommunicatorOperation, result: object, error: BaseException | None) -> None:
        """Remove an operation from the table, and settle the handle."""
        if operation.state is OperationState.DONE:
            return
        handle, error = operation.handle, operation.verdict or error
        assert handle is not None
        self._pending.remove(operation)
        operation.state = OperationState.DONE
        if isinstance(operation.meets, Named):
            operation.meets.operation = None
        if error is not None:
            self.fail(handle, error)
        elif not handle.done():
            if isinstance(result, Arrived):
                operation.set_message(result.source, result.tag, result.nbytes)
                result = result.data
            operation.resolve(result)

    def fail(self, handle: Handle[Any], error: BaseException) -> None:
        """Reject a pending handle with an error that names rank, communicator and operation."""
        if handle.done():
            return
        if isinstance(error, asyncio.CancelledError):
            Operation.of(handle).cancel()
            return
        comm, rank = self._place
        if isinstance(error, AiodistError):
            error.located(rank=rank, comm=comm, op=str(handle))
        else:
            with suppress(Exception):  # an error class of the user may raise
                error.add_note(f"raised in {handle}, communicator {comm}, rank {rank}")
        with suppress(asyncio.InvalidStateError):  # a waiting thread has just settled the handle
            Operation.of(handle).reject(error)

    # --- conversion: without the lock ---------------------------------------------------------------------------

    def _convert(self, operation: CommunicatorOperation, convert: Callable[[Any], Any], result: object) -> None:
        """Convert the result, on the thread of the loop or on one that waits for the handle."""
        value: Any = None
        error: BaseException | None = None
        if operation.given_back is None:
            try:
                value = convert(result)
            except BaseException as raised:  # noqa: BLE001  - it belongs to the task that awaits the operation
                error = raised
        self._progress.start_from_thread(self._converted, operation, result, value, error)

    def _converted(
        self, operation: CommunicatorOperation, result: object, value: object, error: BaseException | None
    ) -> None:
        """Settle the handle, unless a thread has given the message back during the conversion."""
        if operation.given_back is not None:
            operation.given_back(result, None)
            value, error = None, asyncio.CancelledError()
        if operation.handle is not None and not operation.stopped:
            self.end(operation, value, error)
