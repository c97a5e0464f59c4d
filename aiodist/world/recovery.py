"""An elastic world: a rank's generations, and the move from each to the next.

[Note: generations] The hub keeps the ranks of a generation and forms the next (`control.generations`). Here a rank asks
for it, connects to its session, and opens a world in it as at the start: nothing of the old one is mended or used
again, so nothing of it can be taken for something of the new one. The connection to the old session stays until the
new one has begun. Where a rank leaves while the others open the new world, they start over from there.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.registry import Registry
from aiodist.control import Channel, Exit, connect
from aiodist.control.generations import Generation
from aiodist.control.thread import settle_soon
from aiodist.errors import (
    AiodistError,
    BackendError,
    BackendUnavailable,
    CommunicatorAborted,
    CommunicatorClosed,
    CommunicatorError,
    ConfigError,
    LaunchError,
    MismatchError,
    OperationTimeout,
    PeerError,
    PeerLost,
)
from aiodist.handles import Handle, Operation, Origin
from aiodist.world.generation import RankWorld, WorldOptions
from aiodist.world.opening import RankPlace, RankSeat, place_on, start_mpi

if TYPE_CHECKING:
    from aiodist.backends.mpi import MpiTransport

_LATEST_SECONDS: Final = 0.2  # before a deadline: who is late is asked for then
_LOOK_SECONDS: Final = 0.01
_MOST_OLD: Final = 4
_AGAIN_SECONDS: Final = 60.0  # between two reports
_log = logging.getLogger("aiodist")


class Recovery:
    """The generations of one rank, from the one that it was started for to the current one."""

    def __init__(self, options: WorldOptions, backend: str | None, given: RankSeat | None) -> None:
        """The seat is `given` to a rank that is a task of one process. Raises ConfigError in a job not elastic."""
        elastic = options.environment.elastic if given is None else given.elastic
        if elastic is None:
            how = "expected aiodist run --elastic MIN:MAX, whose launcher has the hub, so that any rank may die"
            raise ConfigError(f"init(elastic=True), and the job is not elastic: {how}")
        self._most = elastic[1]
        self._options = options
        self._backend = backend or options.environment.backend
        self._given = given
        self._mpi: MpiTransport | None = None  # while it carries the first generation
        self._task: asyncio.Task[None] | None = None
        self._under_way: Handle[Communicator] | None = None
        self._uncollected = 0
        self._world: RankWorld  # that of the newest generation that was opened here
        self.channel: Channel  # that of the newest one that has begun

    @property
    def registry(self) -> Registry[Communicator]:
        """That of the newest world that was opened here."""
        return self._world.registry

    @property
    def current(self) -> Communicator:
        """The newest world that was opened here."""
        return self._world.comm

    @classmethod
    async def of(cls, options: WorldOptions, backend: str | None, given: RankSeat | None) -> Recovery:
        """Return one whose first world is open; as long as ranks leave meanwhile, it is one among those who live."""
        recovery = cls(options, backend, given)
        recovery.channel, generation = await recovery._first()
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
        """Close the current world with all other ranks; where one is lost meanwhile, without them: no work is left."""
        if self._under_way is not None:
            raise CommunicatorError(f"the world was left while {self._under_way} was under way: await it first")
        try:
            await self._world.close()
        except (PeerError, BackendError) as error:
            await self._await_loss(error)
            await self._world.abort(CommunicatorAborted(f"the world was closed without all of its ranks: {error}"))

    async def cancel(self) -> None:
        """The program failed: regroup no more, and hold nothing of the process."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._world.cancel()

    # --- shrink and grow ---------------------------------------------------------------------------------------

    def regroup(self, comm: Communicator, joiners: int, timeout: float | None) -> Handle[Communicator]:
        """See `Communicator.shrink` and `grow`; `joiners` is 0 for the former."""
        what = "grow" if joiners else "shrink"
        dispatcher = parts_of(comm).dispatcher
        dispatcher.check_loop()
        if comm is not self._world.comm or isinstance(dispatcher.lifetime.refusal, (CommunicatorClosed, RuntimeError)):
            raise dispatcher.lifetime.refusal or CommunicatorError(
                f"{what}() is for the world: {comm.name!r} is a part of it"
            )
        if self._under_way is not None:
            raise CommunicatorError(f"{self._under_way} is under way: await its handle")
        if joiners:
            dispatcher.check_usable()
            if comm.size + joiners > self._most:
                most = f"the job may have {self._most}"
                raise ValueError(f"grow({joiners}) of {comm.size} ranks: {most} (aiodist run --elastic MIN:MAX)")
        number = self._world.registry.resources.generation.number
        operation: Operation[Communicator] = Operation(
            dispatcher.progress, what, number, origin=Origin.here(3), polled=False
        )
        seconds = comm.timeout if timeout is None else timeout
        if seconds is not None:
            operation.set_deadline(seconds)
        handle = self._under_way = operation.handle
        self._task = asyncio.get_running_loop().create_task(
            self._run(operation, joiners, seconds), name=f"world: {what}"
        )
        dispatcher.progress.carry_out(handle, self._task)
        return handle

    async def _run(self, operation: Operation[Communicator], joiners: int, seconds: float | None) -> None:
        asking = asyncio.get_running_loop().create_task(self._ask_who_is_late(operation, seconds))
        try:
            made = await (self._grow(joiners) if joiners else self._shrink())
        except BaseException as error:  # noqa: BLE001  - it belongs to the task that awaits the handle
            self._under_way = None
            operation.reject(error)
        else:
            self._under_way = None
            operation.resolve(made)
        finally:
            asking.cancel()

    async def _ask_who_is_late(self, operation: Operation[Communicator], seconds: float | None) -> None:
        """Know it before a deadline, and report it where the ranks wait for long."""
        loop, report = asyncio.get_running_loop(), self._options.report_after if self._options.alone else None
        told_at = loop.time() if report is None else loop.time() + report
        with suppress(PeerError, RuntimeError, ValueError):
            if not self._options.alone:  # a clock that jumps would do so for nothing else
                if seconds is None:
                    return
                await asyncio.sleep(seconds - _LATEST_SECONDS)
            while True:
                late = dict(await self.channel.request("late"))
                operation.set_late(late.copy)
                if report is not None and loop.time() >= told_at:
                    names = "; ".join(f"rank {rank}: {where}" for rank, where in sorted(late.items()))
                    _log.warning(
                        "rank %d waits in %s: %s", self.channel.rank, operation, names or "all are on their way"
                    )
                    told_at += _AGAIN_SECONDS
                if not self._options.alone:
                    return
                await asyncio.sleep(_LATEST_SECONDS)

    def _collect(self) -> None:
        """Free old worlds, which are cycles with descriptors in them, once there are some: it takes about 0.3 s."""
        self._uncollected += 1
        if self._uncollected >= _MOST_OLD and self._options.alone:
            self._uncollected = 0
            gc.collect()

    async def _shrink(self) -> Communicator:
        old, channel = self._world, self.channel
        number = old.registry.resources.generation.number
        giving_up = asyncio.get_running_loop().create_task(
            self._supersede(old, f"rank {channel.rank} called shrink() on generation {number}")
        )
        try:
            generation = await self._next(0)
        finally:
            await giving_up
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

    def _enter(self, world: RankWorld) -> Communicator:
        self._world = world
        parts_of(world.comm).dispatcher.lifetime.on_abort.append(partial(self._given_up, world))
        world.registry.elastic = self
        return world.comm

    def _given_up(self, world: RankWorld, error: AiodistError) -> None:
        """Others have left this world: they come to no operation of its groups, of which they may not have all."""
        if isinstance(error, CommunicatorAborted) and self._under_way is None:
            lost = self._lost()
            world.registry.members.abort_rest(error if lost is None else lost.error())

    async def _supersede(self, old: RankWorld, why: str) -> None:
        """Give the old world up: what is pending on it, and every later call, raises CommunicatorAborted."""
        error = CommunicatorAborted(f"the ranks of this communicator go on in another one: {why}")
        old.registry.members.supersede(error)
        await old.abort(error)

    async def _opened(self, generation: Generation, before: Registry[Communicator] | None) -> RankWorld:
        """Return the world of a generation that has begun, or, where ranks leave meanwhile, of the next."""
        while True:
            try:
                return await self._open(generation, before)
            except PeerError:
                channel = self.channel
                generation = await self._next(0)
                await channel.aclose()

    async def _open(self, generation: Generation, before: Registry[Communicator] | None) -> RankWorld:
        """Return the world of a generation; raise PeerError where a rank has left, though a library said otherwise."""
        try:
            return await self._built(generation, before)
        except (BackendError, BackendUnavailable, OperationTimeout) as error:
            raise (await self._await_loss(error)).error() from None

    async def _built(self, generation: Generation, before: Registry[Communicator] | None) -> RankWorld:
        """Return an open world; what fails half-way is closed, but for the channel."""
        options = self._options
        if self._given is not None:
            place = self._given.place(self.channel, generation)
        else:
            place = await self._place(generation)
        try:
            world = await RankWorld.of(options, place, generation)
        except BaseException:
            await place.transport.aclose(drained=False)
            raise
        try:
            if before is not None:
                world.registry.portal = before.portal
                world.registry.resources.stop_requested = before.resources.stop_requested
                if before.kept is not None:
                    before.kept.follow(world.registry)
            await world.open()
            if (mpi := self._mpi) is not None:
                parts_of(world.comm).dispatcher.lifetime.on_abort.append(lambda _: mpi.leave())
        except BaseException as error:
            await world.abort(CommunicatorAborted(f"the world was not opened: {error!r}"))
            raise
        return world

    async def _place(self, generation: Generation) -> RankPlace:
        """Return the place of this process in a generation: only in the first one MPI may carry it."""
        environment, mpi = self._options.environment, self._mpi
        backend = self._backend if self._backend != "mpi" else None
        if mpi is not None and generation.number:
            mpi.leave()
            self._mpi = mpi = None
        backend = "shm" if mpi is not None else backend or "shared"
        place = await place_on(self.channel, environment, backend, self._options.limits)
        if mpi is not None:
            mpi.beside = place.transport
            place = replace(place, transport=mpi, beside=place.transport)
        return place

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
        """Return how the first rank left that is known to be lost."""
        return next((exit for exit in self.channel.exits().values() if not exit.clean), None)

    async def _first(self) -> tuple[Channel, Generation]:
        """Return the channel to the others of the generation that this rank is started for."""
        if self._given is not None:
            return await self._given.first()
        environment = self._options.environment
        name = self._backend or ("mpi" if environment.mpi else None)
        if name and name not in ("gloo", "shm", "mpi"):
            raise ConfigError(f"backend {name!r} of an elastic world: expected gloo, shm, or mpi")
        generation = Generation(environment.generation, environment.previous)
        if name == "mpi" and generation.number == 0:  # before all have met: what fails while MPI starts ends the job
            if not environment.shared_memory:
                raise BackendUnavailable("an elastic world over MPI is for ranks that share memory: AIODIST_SHM=0")
            self._mpi = await start_mpi(environment, self._options.limits, mortal=True)
        return await self._meet(generation, environment.rank, environment.rendezvous or ""), generation

    async def _meet(self, generation: Generation, rank: int, address: str) -> Channel:
        """Return the channel of a generation once it has begun; raise `PeerLost` where it never will."""
        if self._given is not None:
            return await self._given.next(generation, rank)
        return await connect(
            address,
            rank=rank,
            size=generation.size,
            token=self._options.environment.token,
            timeout=self._options.limits.rendezvous,
            there=generation.number > 0,
        )

    async def _next(self, joiners: int) -> Generation:
        """Return the next generation, once it has begun; `channel` is that of its session then."""
        channel = self.channel
        # Each time somebody has left meanwhile, or could not connect.
        for _ in range(2 * channel.size + 8):
            answer = await channel.request("regroup", joiners)
            if "refused" in answer:
                raise self._refusal(answer["refused"], answer["why"])
            generation = Generation(answer["number"], tuple(answer["previous"]))
            try:
                self.channel = await self._meet(generation, answer["rank"], answer["where"])
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
