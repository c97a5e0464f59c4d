"""An elastic world: the generations of a rank, and the move from each to the next.

[Note: generations] The hub forms the generations (`generations`). A rank asks for the next one, connects to its
session, and opens a world in it as at the start. No part of the old world is repaired or used again, so none can be
mistaken for a part of the new one. The connection to the old session remains until the new one has begun. If a rank
leaves while the others open the new world, they ask the new session for the next one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.registry import Registry
from aiodist.control import Channel, Exit
from aiodist.control.thread import settle_soon
from aiodist.env import Generation
from aiodist.errors import (
    AiodistError,
    BackendError,
    BackendUnavailable,
    CommunicatorAborted,
    CommunicatorClosed,
    CommunicatorError,
    LaunchError,
    MismatchError,
    OperationTimeout,
    PeerError,
    PeerLost,
)
from aiodist.handles import Handle, Operation, Origin

_LATEST_SECONDS: Final = 0.2
"""Time before a deadline at which the late ranks are asked for, in seconds."""
_LOOK_SECONDS: Final = 0.01
_MOST_OLD: Final = 4
_AGAIN_SECONDS: Final = 60.0
"""Time between two reports, in seconds."""
_log = logging.getLogger("aiodist")


class GenerationWorld(Protocol):
    """The world of one generation on this rank."""

    registry: Registry[Communicator]
    comm: Communicator

    async def close(self) -> None:
        """Close all communicators with all other ranks."""

    async def abort(self, error: AiodistError) -> None:
        """Close without the others. Pending operations and later calls raise `error`."""

    async def cancel(self) -> None:
        """Release the process, since the program failed."""


class Opener(Protocol):
    """Opens the channel and the world of each generation of this rank."""

    alone: bool
    """True if the rank has a process of its own."""
    most: int
    """Most ranks of the job."""
    report_after: float | None
    """Wait after which the late ranks are logged, in seconds, or None."""

    async def first(self) -> tuple[Channel, Generation]:
        """Return the channel of the generation that this rank was started for."""

    async def meet(self, generation: Generation, rank: int, address: str) -> Channel:
        """Return the channel of a generation that has begun. Raises `PeerLost` if it never begins."""

    async def open(
        self, channel: Channel, generation: Generation, before: Registry[Communicator] | None
    ) -> GenerationWorld:
        """Return the open world of a generation, after the world of `before`. On an error only the channel remains."""


class Recovery:
    """The generations of one rank, from its first to the current one."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._task: asyncio.Task[None] | None = None
        self._in_flight: Handle[Communicator] | None = None
        self._uncollected = 0
        self._world: GenerationWorld  # of the newest generation that was opened here
        self.channel: Channel  # of the newest generation that has begun

    @property
    def registry(self) -> Registry[Communicator]:
        """Registry of the newest world that was opened here."""
        return self._world.registry

    @property
    def current(self) -> Communicator:
        """The newest world that was opened here."""
        return self._world.comm

    @classmethod
    async def of(cls, opener: Opener) -> Recovery:
        """Open the first world. If ranks leave meanwhile, it is the world of the live ranks."""
        recovery = cls(opener)
        recovery.channel, generation = await opener.first()
        try:
            recovery._enter(await recovery._opened(generation, None))
        except BaseException as error:
            recovery.channel.fail(f"{type(error).__name__}: {error}")
            await recovery.channel.aclose()
            raise
        return recovery

    async def open(self) -> Communicator:
        """Return the first world."""
        return self.current

    async def close(self) -> None:
        """Close the current world with all other ranks, without a rank that is lost meanwhile."""
        if self._in_flight is not None:
            raise CommunicatorError(f"the world was left while {self._in_flight} was in flight: await it first")
        try:
            await self._world.close()
        except (PeerError, BackendError) as error:
            await self._await_loss(error)
            await self._world.abort(CommunicatorAborted(f"the world was closed without all of its ranks: {error}"))

    async def cancel(self) -> None:
        """Stop, since the program failed, and release the process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._world.cancel()

    # --- shrink and grow ---------------------------------------------------------------------------------------

    def regroup(self, comm: Communicator, joiners: int, timeout: float | None) -> Handle[Communicator]:
        """See `Communicator.shrink`, for which `joiners` is 0, and `grow`."""
        what = "grow" if joiners else "shrink"
        dispatcher = parts_of(comm).dispatcher
        dispatcher.check_loop()
        if comm is not self._world.comm or isinstance(dispatcher.lifetime.refusal, (CommunicatorClosed, RuntimeError)):
            raise dispatcher.lifetime.refusal or CommunicatorError(
                f"{what}() is for the world: {comm.name!r} is a part of it"
            )
        if self._in_flight is not None:
            raise CommunicatorError(f"{self._in_flight} is in flight: await its handle")
        if joiners:
            dispatcher.check_usable()
            if comm.size + joiners > self._opener.most:
                most = f"the job may have {self._opener.most}"
                raise ValueError(f"grow({joiners}) of {comm.size} ranks: {most} (aiodist run --elastic MIN:MAX)")
        number = self._world.registry.resources.generation.number
        operation: Operation[Communicator] = Operation(
            dispatcher.progress, what, number, origin=Origin.here(3), polled=False
        )
        seconds = comm.timeout if timeout is None else timeout
        if seconds is not None:
            operation.set_deadline(seconds)
        handle = self._in_flight = operation.handle
        self._task = asyncio.get_running_loop().create_task(
            self._run(operation, joiners, seconds), name=f"world: {what}"
        )
        dispatcher.progress.carry_out(handle, self._task)
        return handle

    async def _run(self, operation: Operation[Communicator], joiners: int, seconds: float | None) -> None:
        asking = asyncio.get_running_loop().create_task(self._ask_who_is_late(operation, seconds))
        try:
            made = await (self._grow(joiners) if joiners else self._shrink())
        except BaseException as error:  # noqa: BLE001  - the task that awaits the handle raises it
            self._in_flight = None
            operation.reject(error)
        else:
            self._in_flight = None
            operation.resolve(made)
        finally:
            asking.cancel()

    async def _ask_who_is_late(self, operation: Operation[Communicator], seconds: float | None) -> None:
        """Ask for the late ranks before a deadline, and log them after a long wait."""
        loop, report = asyncio.get_running_loop(), self._opener.report_after
        report_at = loop.time() if report is None else loop.time() + report
        with suppress(PeerError, RuntimeError, ValueError):
            if not self._opener.alone:  # no questions in a row: a virtual clock would jump to each
                if seconds is None:
                    return
                await asyncio.sleep(seconds - _LATEST_SECONDS)
            while True:
                late = dict(await self.channel.request("late"))
                operation.set_late(late.copy)
                if report is not None and loop.time() >= report_at:
                    names = "; ".join(f"rank {rank}: {where}" for rank, where in sorted(late.items()))
                    _log.warning("rank %d waits in %s: %s", self.channel.rank, operation, names or "all have asked")
                    report_at += _AGAIN_SECONDS
                if not self._opener.alone:
                    return
                await asyncio.sleep(_LATEST_SECONDS)

    def _collect(self) -> None:
        """Collect old worlds, which are cycles with descriptors, but not each time: it takes about 0.3 s."""
        self._uncollected += 1
        if self._uncollected >= _MOST_OLD and self._opener.alone:
            self._uncollected = 0
            gc.collect()

    async def _shrink(self) -> Communicator:
        old, channel = self._world, self.channel
        number = old.registry.resources.generation.number
        aborting = asyncio.get_running_loop().create_task(
            self._supersede(old, f"rank {channel.rank} called shrink() on generation {number}")
        )
        try:
            generation = await self._next(0)
        finally:
            await aborting
        await channel.aclose()
        comm = self._enter(await self._opened(generation, old.registry))
        del old
        self._collect()
        return comm

    async def _grow(self, joiners: int) -> Communicator:
        old, channel = self._world, self.channel
        dispatcher = parts_of(old.comm).dispatcher
        await dispatcher.lifetime.settled()
        asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._collect)  # while the new ranks start
        generation = await self._next(joiners)
        await self._supersede(old, f"it grew to generation {generation.number}")
        await channel.aclose()
        return self._enter(await self._open(generation, old.registry))

    def _enter(self, world: GenerationWorld) -> Communicator:
        self._world = world
        parts_of(world.comm).dispatcher.lifetime.on_abort.append(partial(self._aborted, world))
        world.registry.elastic = self
        return world.comm

    def _aborted(self, world: GenerationWorld, error: AiodistError) -> None:
        """Abort the groups of a world that other ranks have left: they join no operation of a group any more."""
        if isinstance(error, CommunicatorAborted) and self._in_flight is None:
            lost = self._lost()
            world.registry.members.abort_rest(error if lost is None else lost.error())

    async def _supersede(self, old: GenerationWorld, why: str) -> None:
        """Abort the old world. Pending operations and later calls raise CommunicatorAborted."""
        error = CommunicatorAborted(f"the ranks of this communicator continue in another one: {why}")
        old.registry.members.supersede(error)
        await old.abort(error)

    async def _opened(self, generation: Generation, before: Registry[Communicator] | None) -> GenerationWorld:
        """Return the world of a generation, or of a later one if ranks leave meanwhile."""
        while True:
            try:
                return await self._open(generation, before)
            except PeerError:
                channel = self.channel
                generation = await self._next(0)
                await channel.aclose()

    async def _open(self, generation: Generation, before: Registry[Communicator] | None) -> GenerationWorld:
        """Return the world of a generation, or raise PeerError if a rank has left. A library may report otherwise."""
        try:
            return await self._opener.open(self.channel, generation, before)
        except (BackendError, BackendUnavailable, OperationTimeout) as error:
            raise (await self._await_loss(error)).error() from None

    async def _await_loss(self, error: AiodistError) -> Exit:
        """Return how a rank left, if `error` may follow from that; raise `error` if all ranks answer."""
        answered: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        others = [rank for rank in range(self.channel.size) if rank != self.channel.rank]
        self.channel.ask_alive(others, partial(settle_soon, answered))
        await answered
        if (lost := self._lost()) is None:
            raise error
        return lost

    def _lost(self) -> Exit | None:
        """Return the exit of the first rank that is known to be lost."""
        return next((exit for exit in self.channel.exits().values() if not exit.clean), None)

    async def _next(self, joiners: int) -> Generation:
        """Return the next generation, once it has begun. `channel` is then that of its session."""
        channel = self.channel
        # Each further round follows a rank that left or could not connect.
        for _ in range(2 * channel.size + 8):
            answer = await channel.request("regroup", joiners)
            if "refused" in answer:
                raise self._refusal(answer["refused"], answer["why"])
            generation = Generation(answer["number"], tuple(answer["previous"]))
            try:
                self.channel = await self._opener.meet(generation, answer["rank"], answer["where"])
            except (PeerLost, OperationTimeout) as error:
                failed = error
            else:
                return generation
        raise failed

    def _refusal(self, kind: str, why: str) -> AiodistError:
        if kind == "left" and (lost := self._lost()) is not None:
            return lost.error()
        kinds: dict[str, Callable[[str], AiodistError]] = {
            "outside": CommunicatorAborted,
            "disagree": MismatchError,
            "cancelled": LaunchError,
        }
        return kinds.get(kind, CommunicatorError)(why)
