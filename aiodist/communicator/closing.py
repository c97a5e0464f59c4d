"""The open communicators of one world, which are notified of failures, and closed or aborted in reverse order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from aiodist.backends.base import ours
from aiodist.communicator.base import parts_of
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.leftovers import unreceived, warn_of_open
from aiodist.communicator.movement import Movement
from aiodist.communicator.resources import Resources
from aiodist.control import LIVENESS_SECONDS
from aiodist.errors import (
    AiodistError,
    CommunicatorAborted,
    CommunicatorClosed,
    MismatchAborted,
    MismatchError,
    OperationTimeout,
)
from aiodist.handles import Origin
from aiodist.handles.deadline import loop_time, timeout, wait_within
from aiodist.handles.polling import transport_lock
from aiodist.handles.state import plight

if TYPE_CHECKING:
    from aiodist.control import Exit

C = TypeVar("C", bound=Movement)


class Guest(Protocol):
    """An object that must end before its communicator, such as a training net or a parameter server."""

    async def close(self) -> None:
        """End in order. All ranks do so at the same time."""

    def abort(self) -> None:
        """End without waiting, since the program or another rank failed."""


class OpenCommunicators(Generic[C]):
    """Communicators, open or being closed, with their guests (loop's thread)."""

    def __init__(self, resources: Resources) -> None:
        self.open: list[C] = []
        self.closing: dict[C, asyncio.Future[None]] = {}
        """Communicators that tasks close, each with a future that is done after the close."""
        self.on_open: list[Callable[[Dispatcher], None]] = []
        """Functions called with the dispatcher of each new communicator."""
        self.closed_at: tuple[CodeType, int] | None = None
        """Line of the program that closes the world, if the loop runs in another thread, else None."""
        self.unreceived: list[str] = []
        """Messages from or to this rank that no rank received, on communicators that are closed."""
        self._resources = resources
        self._guests: dict[C, list[Guest]] = {}
        self._origins: dict[C, Origin] = {}
        """Line of the program that made a communicator. Communicators of aiodist itself have no line."""

    def all(self) -> list[C]:
        """Return the communicators that are open or being closed."""
        return [*self.open, *self.closing]

    @property
    def dispatchers(self) -> list[Dispatcher]:
        """Dispatchers of the communicators that are not closed."""
        return [parts_of(communicator).dispatcher for communicator in self.all()]

    def add(self, communicator: C) -> None:
        """Add a new communicator."""
        self.open.append(communicator)
        for notify in list(self.on_open):
            notify(parts_of(communicator).dispatcher)

    def note_origin(self, made: object, origin: Origin | None) -> None:
        """Note the line that made a communicator. Other objects are ignored."""
        for communicator in self.open if origin is not None else ():
            if communicator is made and origin is not None:
                self._origins.setdefault(communicator, origin)

    def admit(self, communicator: C, guest: Guest) -> None:
        """Close or abort `guest` before `communicator`."""
        parts_of(communicator).dispatcher.check_usable()
        self._guests.setdefault(communicator, []).append(guest)

    def discard(self, communicator: C, guest: Guest) -> None:
        """Remove `guest`, which has ended already."""
        with suppress(ValueError):
            self._guests.get(communicator, []).remove(guest)

    # --- failures ----------------------------------------------------------------------------------------------

    def lost(self, exit: Exit) -> None:
        """Report the loss of a rank to the communicators of that rank, or of the hub to those without its host."""
        for dispatcher in self.dispatchers:
            if exit.rank in dispatcher.ranks or (exit.rank < 0 and exit.host not in dispatcher.ranks):
                dispatcher.lifetime.peer_lost(exit)

    def device_failed(self, name: str, error: AiodistError) -> None:
        """Abort a communicator on all ranks, since the others may wait for this rank on the device."""
        for dispatcher in self.dispatchers:
            if dispatcher.name == name:
                dispatcher.lifetime.abort_everywhere(error)

    def broken(self, error: Exception) -> None:
        """Abort everything on all ranks, since a poller was removed, and operations in flight never end.

        If a rank is lost, the cause is that loss, which aborts the communicators of that rank first.
        """
        for dispatcher in self.dispatchers:
            dispatcher.failures.inquire(ours(error), partial(_abort_soon, dispatcher))

    def supersede(self, error: CommunicatorAborted) -> None:
        """Raise `error` in all calls from now on, on all ranks, since the ranks continue in another world.

        Operations that failed because of a lost rank have raised the loss already.
        """
        for communicator in list(self.open):
            parts_of(communicator).dispatcher.lifetime.supersede(error)

    def expect_abort(self) -> None:
        """Let the reason of an abort that follows precede the errors that other ranks cause by their reaction."""
        for dispatcher in self.dispatchers:
            dispatcher.failures.aborting = True

    def abort_rest(self, error: AiodistError) -> None:
        """Abort, on this rank, the communicators that are not aborted yet.

        Their other ranks have left, and send no statements about operations that failed.
        """
        for dispatcher in self.dispatchers:
            if dispatcher.lifetime.refusal is None:
                dispatcher.lifetime.abort(error)
                dispatcher.lifetime.unsubscribe()

    # --- closing -----------------------------------------------------------------------------------------------

    async def close(self, communicator: C, until: float) -> None:
        """Close `communicator` after its descendants, until that time of `loop_time`.

        Waits for communicators that another task closes. A communicator that is not closed in time raises
        `OperationTimeout` with its pending operations, and is aborted.
        """
        # By name, since tasks may make communicators in another order on each rank. "a/b" comes after "a".
        path = f"{communicator.name}/"
        below = [c for c in self.all() if c is communicator or c.name.startswith(path)]
        if communicator.name == "world":
            warn_of_open((c.name, self._origins[c]) for c in below if c in self._origins and c in self.open)
        for member in sorted(below, key=lambda c: c.name, reverse=True):
            await self._close(member, until)

    async def _close(self, communicator: C, until: float) -> None:
        if (closed := self.closing.get(communicator)) is not None:
            await _closed(communicator, closed, until)
        if communicator not in self.open:
            return
        self.open.remove(communicator)
        self._origins.pop(communicator, None)
        closed = self.closing[communicator] = asyncio.get_running_loop().create_future()
        dispatcher = parts_of(communicator).dispatcher
        drained = False
        guests = self._guests.pop(communicator, [])
        try:
            while guests:
                await self._close_guest(guests[-1], communicator, until)
                guests.pop()
            dispatcher.lifetime.cancel_receives()
            if dispatcher.lifetime.refusal is None:
                if dispatcher.lifetime.issuing is not None:  # else another thread's calls would come between
                    name = dispatcher.name
                    dispatcher.lifetime.issuing.close(
                        CommunicatorClosed(f"communicator {name!r} is being closed", comm=name)
                    )
                await dispatcher.lifetime.drain(_left(until))
                mismatch = await self._meet(dispatcher, until)
                await parts_of(communicator).messenger.part(_left(until))
                self.unreceived += await unreceived(communicator, _left(until))
                drained = True
                if mismatch is not None:
                    raise mismatch
                if communicator.name == "world" and self.unreceived:
                    raise MismatchError("; ".join(self.unreceived), rank=communicator.rank, comm=communicator.name)
        except BaseException as error:
            for guest in reversed(guests):
                guest.abort()
            failure = CommunicatorAborted(f"closing communicator {communicator.name!r} failed: {error!r}")
            dispatcher.lifetime.abort_soon(error if isinstance(error, AiodistError) else failure, tell=not drained)
            raise
        finally:
            try:
                await self._release(communicator, drained=drained)
            finally:
                del self.closing[communicator]
                closed.set_result(None)

    async def _release(self, communicator: C, *, drained: bool) -> None:
        try:
            parts_of(communicator).dispatcher.lifetime.close()
            parts_of(communicator).dispatcher.account.judge()
        finally:  # a judgment raises if the program turns warnings into errors
            _release_memory(parts_of(communicator).dispatcher)
            await self._resources.release(communicator.name, drained=drained)
            await parts_of(communicator).transport.aclose(drained=drained)

    async def _meet(self, dispatcher: Dispatcher, until: float) -> MismatchError | None:
        """Wait for all ranks in a last barrier.

        Return the mismatch if another rank has made one call more before.
        """
        if self.closed_at is not None:
            dispatcher.oplog.caller = self.closed_at
        try:
            await dispatcher.barrier(_left(until), "close")
        except MismatchAborted:
            raise
        except MismatchError as error:
            await self._meet(dispatcher, until)  # the third mismatch in a row aborts the communicator
            return error
        return None

    async def _close_guest(self, guest: Guest, communicator: C, until: float) -> None:
        try:
            async with timeout(_left(until)):
                await guest.close()
        except TimeoutError:
            known, late = plight(
                [handle for dispatcher in self.dispatchers for handle in dispatcher.lifetime.pending()]
            )
            text = f"{guest}, which all ranks close together, did not end in time{known}"
            raise OperationTimeout(text, late=late, comm=communicator.name, op="aclose") from None

    async def abort(self, error: AiodistError) -> None:
        """Abort everything, since the program failed."""
        aborted, self.open = self.open[::-1], []
        for communicator in self.closing:
            parts_of(communicator).dispatcher.lifetime.abort(error)
        if self.closing:
            # The abort ends the tasks that close these communicators, unless a library waits for a stopped rank.
            await asyncio.wait(self.closing.values(), timeout=LIVENESS_SECONDS)
        for communicator in aborted:
            dispatcher = parts_of(communicator).dispatcher
            dispatcher.account.forgiven = (CommunicatorAborted,)
            dispatcher.lifetime.abort(error)
            dispatcher.lifetime.unsubscribe()
            for guest in reversed(self._guests.pop(communicator, [])):
                guest.abort()
        for communicator in aborted:
            _release_memory(parts_of(communicator).dispatcher)
            with suppress(OSError):
                await parts_of(communicator).transport.aclose(drained=False)


async def _closed(communicator: Movement, closed: asyncio.Future[None], until: float) -> None:
    """Wait until another task has closed the communicator. That task raises the errors."""
    if not closed.done():
        await wait_within([closed], _left(until))
    if not closed.done():
        text = f"communicator {communicator.name!r} is still being closed by another task"
        raise OperationTimeout(text, comm=communicator.name, op="aclose")


def _abort_soon(dispatcher: Dispatcher, error: BaseException) -> None:
    assert isinstance(error, AiodistError)  # the loss of a rank, or the error given to the inquiry
    dispatcher.progress.post(dispatcher.lifetime.abort_everywhere, error)


def _release_memory(dispatcher: Dispatcher) -> None:
    """Stop the use of shared memory by a communicator, and end operations that still use that memory."""
    why = dispatcher.lifetime.refusal or CommunicatorClosed(f"communicator {dispatcher.name!r} is closed")
    with transport_lock:
        dispatcher.names.close(why)
        dispatcher.agreement.close(why)
        if (within := dispatcher.repertoire.within) is not None:
            within.abort(why)


def _left(until: float) -> float:
    return max(0.0, until - loop_time(asyncio.get_running_loop()))
