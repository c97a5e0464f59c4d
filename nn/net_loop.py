"""A net's side of the event loop: programs, which are coroutines whose steps are the net's collectives."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from aiodist.communicator.operation import Event
from aiodist.errors import OperationTimeout
from aiodist.handles import Handle, Lane, Operation, Permit, Progress, internals, kernel
from aiodist.handles.sources import Done
from aiodist.nn.devices import Devices

T = TypeVar("T")
Late = Callable[[OperationTimeout], None]
"""Callback for a collective whose deadline has passed; the collective continues."""


class NetLoop:
    """Runs the programs of one net on its event loop.

    A program is no task, so it continues while no task awaits it. It never continues within a task either: which task
    polls a collective to its end differs by rank, and the program's next collective does not belong to that task.
    """

    def __init__(self, devices: Devices, lane: Lane) -> None:
        self.progress = Progress.current()
        self.devices = devices
        self.lane = lane
        """Limit of the bytes in flight."""
        self.waiting: list[asyncio.Future[None]] = []
        """Awaits of steps, which raise `OperationTimeout` when a collective is late."""
        self._granted: deque[Event] = deque()
        """Turns of programs that have a permit, and have not continued, in their order."""

    def run(self, what: str, program: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Handle[T]:
        """Return the handle of `program(*args)`, which the loop runs (any thread)."""
        operation: Operation[T] = Operation(self.progress, what, polled=False)
        self.progress.post(_start, operation, program, *args)
        return operation.handle

    def late(self, error: OperationTimeout) -> None:
        """Raise `error` in the awaits of steps."""
        for future in self.waiting:
            if not future.done():
                future.set_exception(error)

    def resume(self, done: Done) -> None:
        """Continue a program, now or outside of the current task."""
        # The thread that polls devices holds the transport lock.
        if asyncio.current_task(self.progress.loop) is None and not self.devices:
            done(None)
        else:
            self.progress.post(done, None)

    # --- what programs await -----------------------------------------------------------------------------------------

    def wait(self, handle: Handle[Any], late: Late, done: Done) -> None:
        """Call `done` when `handle` is done, however it ends."""
        internals.add_waiter(handle, _ProgramWaiter(self, late, done))

    async def permit(self, nbytes: int, *, limited: bool) -> Permit | None:
        """Wait until `nbytes` may be in flight; if not `limited`, only until earlier callers have continued.

        Callers continue in the order of their calls. Return the permit to release, or None if there is no limit.
        """
        if not self._granted:
            if not limited:
                return None
            if (permit := self.lane.take(nbytes)) is not None:
                return permit
        turn, permit = Event(), None
        if limited:
            permit = self.lane.request(nbytes, partial(self._grant, turn))
        else:
            self._grant(turn)
        if not turn.is_set:
            await kernel.transfer(turn.wait)
        return permit

    def _grant(self, turn: Event) -> None:
        self._granted.append(turn)
        if asyncio.current_task() is None:
            self._continue_granted()
        else:  # a task that has released a permit
            self.progress.post(self._continue_granted)

    def _continue_granted(self) -> None:
        while self._granted:
            self._granted.popleft().set()


class _ProgramWaiter:
    """Continues a program when a handle is done."""

    __slots__ = ("_done", "_late", "_loop")

    def __init__(self, loop: NetLoop, late: Late, done: Done) -> None:
        self._loop = loop
        self._late = late
        self._done = done

    def wake(self, handle: Handle[Any], late: OperationTimeout | None, /) -> None:
        """See `Waiter`."""
        if late is not None and not handle.done():
            self._late(late)
            internals.add_waiter(handle, self)
        else:
            self._loop.resume(self._done)


def _start(operation: Operation[T], program: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> None:
    kernel.run(program(*args), partial(_settle, operation))


def _settle(operation: Operation[T], result: T, error: BaseException | None) -> None:
    """End `operation` with the outcome of its program."""
    if error is None:
        operation.resolve(result)
    else:
        operation.reject(error)
