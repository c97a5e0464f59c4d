"""The issue of operations in lanes by the compiled core. Programs continue operations that no lane can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from aiodist import _core
from aiodist.communicator.changes import Mark, marks_of
from aiodist.communicator.claims import Claim, release
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.operation import CommunicatorOperation
from aiodist.errors import AiodistError, MismatchError, RemoteError
from aiodist.handles import Handle, in_flight
from aiodist.handles.kernel import Program
from aiodist.handles.origin import known_files
from aiodist.streams.writes import increment_version

Make = Callable[[CommunicatorOperation], Program[Any]]


class LaneIssuer:
    """The issue of one communicator's operations in lanes. `core` is None if the ranks do not share memory."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.core = dispatcher.lifetime.issuer = self._make_core()

    def _make_core(self) -> _core.Issuer | None:
        dispatcher = self._dispatcher
        within, agreement = dispatcher.repertoire.within, dispatcher.agreement
        if within is None or agreement.several:
            return None
        near = within.ordered.near
        core = _core.Issuer(
            within.ordered.core,
            in_flight,
            dispatcher.oplog,
            dispatcher.progress,
            near.arena.addresses,
            dispatcher.account,
            dispatcher.operations.collectives,
            dispatcher.progress.inbox,
            dispatcher.failures.to_fail,
            known_files,
            dispatcher.watch,
            near.publish,
            self._failed,
            self._changed,
            Handle,
            Tensor,
            Parameter,
            increment_version,
            torch.is_grad_enabled,
            torch.empty(0, device="cpu").is_inference,
        )
        core.strict = dispatcher.strict
        core.expire = None if dispatcher.timeout is None else dispatcher.set_deadline
        core.threads = dispatcher.lifetime.issuing is not None
        return core

    def go_on(self, handle: Handle[Any], make: Make, claims: Sequence[Claim], changed: Tensor | None) -> None:
        """Continue an agreed collective by a program, since no lane can run the collective (any thread).

        `changed` is the tensor that the user's program has changed so far, or None.
        """
        self._dispatcher.recent.enter(handle.seq)  # so that the operation can be stopped
        marks = marks_of(claims, strict=self._dispatcher.strict)
        self._dispatcher.progress.start_from_thread(self._go_on, handle, make, claims, marks, changed)

    def _go_on(
        self,
        handle: Handle[Any],
        make: Make,
        claims: Sequence[Claim],
        marks: Sequence[Mark],
        changed: Tensor | None,
    ) -> None:
        operation = self._dispatcher.operations.take_over(handle, claims)
        if operation is None:
            release(claims)
            return
        operation.traffic = self._dispatcher.recent.enter(handle.seq)
        operation.marks = marks
        self._dispatcher.settlement.look(operation, changed)
        if not self._dispatcher.failures.join(operation):
            operation.decide(None)
        operation.admitted.wait(partial(self._dispatcher.settlement.begin, operation, make(operation)))

    def _failed(self, handle: Handle[Any], error: AiodistError) -> None:
        """Fail the operation of `handle`, which a lane has ended with `error` after the release of its bytes."""
        progress = self._dispatcher.progress
        progress.post(progress.with_lock, self._end, handle, error)

    def _changed(self, handle: Handle[Any], result: object, tensor: Tensor) -> None:
        """Report that the program has changed `tensor` during the operation of `handle`, which a lane has finished."""
        progress = self._dispatcher.progress
        progress.post(progress.with_lock, self._report, handle, result, tensor)

    def _report(self, handle: Handle[Any], result: object, tensor: Tensor) -> None:
        operation = self._dispatcher.operations.take_over(handle)
        if operation is None:
            return
        settlement = self._dispatcher.settlement
        settlement.drained(operation)
        settlement.look(operation, tensor)
        operation.decide(None)
        settlement.settle(operation, result)

    def _end(self, handle: Handle[Any], error: AiodistError) -> None:
        operation = self._dispatcher.operations.take_over(handle)
        if operation is None:
            return
        if isinstance(operation.verdict, RemoteError) and not isinstance(error, MismatchError):
            operation.verdict = error  # this rank's own error precedes that of another
        self._dispatcher.settlement.drained(operation)
        if isinstance(error, MismatchError):  # each rank differs from at least one of two others
            self._dispatcher.failures.differ(operation)
        else:
            self._dispatcher.settlement.settle(operation, None, error)
