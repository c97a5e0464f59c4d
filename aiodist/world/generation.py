"""The world of one rank, and in an elastic job one generation of it: what is opened, in order, and how it ends."""

from __future__ import annotations

import asyncio
import os
import selectors
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiodist.collectives.choice.tablefile import edits_at_start
from aiodist.communicator import Communicator, Hierarchy, root_levels
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.registry import Registry
from aiodist.communicator.threaded import ThreadedCommunicator
from aiodist.communicator.watchdog import Watch
from aiodist.control import Channel, connect
from aiodist.control.forks import guard_polling
from aiodist.control.generations import Generation
from aiodist.env import Environment, Starter
from aiodist.errors import AiodistError, BackendUnavailable, CommunicatorAborted, ConfigError
from aiodist.handles import Progress
from aiodist.topology import Topology
from aiodist.watch.arrivals import ArrivalTimes
from aiodist.watch.deadlocks import Deadlocks
from aiodist.watch.inspector import inspected
from aiodist.watch.lag import watched_loop
from aiodist.watch.trace import Recording
from aiodist.world.opening import (
    Limits,
    RankPlace,
    RankSeat,
    find_neighbours,
    find_topology,
    place_on,
    unless_lost,
)
from aiodist.world.pinning import pinned
from aiodist.world.stopping import stopping_by_signals


@dataclass(frozen=True)
class WorldOptions:
    """How the world is to be, as `init` was told and the environment says."""

    limits: Limits
    environment: Environment
    timeout: float | None
    report: float | None
    levels: Callable[[Communicator], Hierarchy | Awaitable[Hierarchy]] | None
    selector: str | os.PathLike[str] | None
    thread: bool
    stop_on_signal: bool
    stragglers: bool
    """Ranks note when they come to collectives."""
    lag: float | None
    alone: bool
    """This rank has its process to itself."""


class RankWorld:
    """What one generation has open on this rank."""

    def __init__(self, options: WorldOptions, place: RankPlace, registry: Registry[Communicator]) -> None:
        self.transport = place.transport
        self.channel = place.channel
        self.registry = registry
        self.comm: Communicator
        """Over all of its ranks, once it is open."""
        self._options = options
        self._hosts = place.hosts
        self._held = ExitStack()
        self._signals = ExitStack()
        self._watching: list[ArrivalTimes | Recording] = []

    @classmethod
    async def of(cls, options: WorldOptions, place: RankPlace, generation: Generation | None = None) -> RankWorld:
        """Return the world of the ranks at `place`, for `open` to be called."""
        limits = options.limits
        near, alone, sharing = await find_neighbours(
            place.channel, place.hosts, place.transport, options.environment, limits
        )
        registry = Registry(
            place.channel,
            _communicator,
            near=near,
            alone=alone,
            sharing=sharing,
            timeout=options.timeout,
            drain_seconds=limits.drain,
            generation=generation,
        )
        return cls(options, place, registry)

    async def open(self) -> Communicator:
        """Return the communicator over all ranks, with all that belongs to it."""
        options, channel = self._options, self.channel
        limits, environment = options.limits, options.environment
        topology = await unless_lost(channel, find_topology(channel, self._hosts, environment, limits))
        world = self.registry.world(self.transport, topology, thread=options.thread)
        watch = Watch.of(Progress.current(), channel)
        watch.report.after = options.report
        Deadlocks(watch, channel)
        _limit_spinning(world)
        asked = options.selector or environment.selector
        edits = edits_at_start(asked, channel, world.parts.repertoire, topology, seconds=limits.rendezvous)
        world.upkeep.apply_edits(await unless_lost(channel, edits))
        if options.alone:  # ranks that are tasks of one process share its cores as they are
            self._held.enter_context(await unless_lost(channel, pinned(channel, world.topology, environment)))
            if options.stop_on_signal:
                self._signals.enter_context(stopping_by_signals(world))
        self._held.enter_context(guard_polling(_epoll_of(asyncio.get_running_loop())))
        self._held.enter_context(watched_loop(Progress.current(), channel.rank, options.lag))
        self._held.enter_context(inspected(watch, channel, environment.job if options.alone else None))
        if options.levels is not None:
            await root_levels(world, options.levels)
        if options.stragglers and world.size > 1:
            self._watch(ArrivalTimes(world, report=environment.stragglers))
        if environment.trace is not None:
            # The launcher merges the files, also where ranks are killed.
            own = environment.starter is not Starter.AIODIST
            recording = Recording(world, Path(environment.trace), own=own)
            self._watch(recording)
            await recording.begin()
        self.comm = world
        return world

    def _watch(self, watching: ArrivalTimes | Recording) -> None:
        self._watching.append(watching)
        self._held.callback(watching.close)

    def release(self) -> None:
        """Hold nothing of the process any more: cores, signals, a trace."""
        self._held.close()
        self._signals.close()

    async def close(self) -> None:
        """Close all communicators, in order, with all other ranks."""
        for watching in reversed(self._watching):
            await watching.finish()
        self._held.close()
        await self.registry.close(self.comm)
        self._signals.close()  # one that comes late to this rank is the one that all have stopped for

    async def abort(self, error: AiodistError) -> None:
        """Close all there is without the others; what is pending, and every later call, raises `error`."""
        self.release()
        await self.registry.abort(error)
        await self.registry.close_memory()


class Life:
    """A rank's only world."""

    def __init__(self, world: RankWorld) -> None:
        self.channel = world.channel
        self.registry = world.registry
        self._world = world

    async def begin(self) -> Communicator:
        """Open it."""
        return await self._world.open()

    async def close(self) -> None:
        """Close it with all other ranks."""
        await self._world.close()

    async def cancel(self) -> None:
        """The program failed: hold nothing of the process any more."""
        self._world.release()


@dataclass(frozen=True)
class ElasticWays:
    """How an elastic world finds the others, and opens what they share."""

    options: WorldOptions
    backend: str | None
    given: RankSeat | None

    @property
    def most(self) -> int:
        """How many ranks there may be."""
        elastic = self.options.environment.elastic if self.given is None else self.given.elastic
        if elastic is None:
            how = "expected aiodist run --elastic MIN:MAX, whose launcher has the hub, so that any rank may die"
            raise ConfigError(f"init(elastic=True), and the job is not elastic: {how}")
        return elastic[1]

    @property
    def alone(self) -> bool:
        """See `Ways`."""
        return self.given is None

    @property
    def report(self) -> float | None:
        """See `Ways`; in one process a clock that jumps would do so only for this."""
        return self.options.report if self.alone else None

    async def first(self) -> tuple[Channel, Generation]:
        """See `Ways`."""
        if self.most and self.given is not None:
            return await self.given.first()
        environment = self.options.environment
        if self.backend or environment.backend or environment.mpi:
            self._check_backend()
        generation = Generation(environment.generation, environment.previous)
        return await self._connect(generation, environment.rank, environment.rendezvous or ""), generation

    async def next(self, generation: Generation, rank: int, where: Any) -> Channel:  # noqa: ANN401
        """See `Ways`."""
        if self.given is not None:
            return await self.given.next(generation, rank)
        return await self._connect(generation, rank, where)

    async def _connect(self, generation: Generation, rank: int, address: str) -> Channel:
        environment = self.options.environment
        return await connect(
            address,
            rank=rank,
            size=generation.size,
            token=environment.token,
            timeout=self.options.limits.rendezvous,
            there=generation.number > 0,
        )

    def _check_backend(self) -> None:
        name = "mpi" if self.options.environment.mpi else self.backend or self.options.environment.backend
        if name == "mpi":
            raise BackendUnavailable("an elastic world over MPI: expected aiodist run --mpi none")
        if name not in ("gloo", "shm"):
            raise ConfigError(f"backend {name!r} of an elastic world: expected gloo or shm")

    async def open(self, channel: Channel, generation: Generation, before: Registry[Communicator] | None) -> RankWorld:
        """See `Ways`."""
        options = self.options
        if self.given is not None:
            place = self.given.place(channel, generation)
        else:
            backend = self.backend or options.environment.backend
            backend = backend or ("shared" if options.environment.shared_memory else "gloo")
            place = await place_on(channel, options.environment, backend, options.limits)
        try:
            world = await RankWorld.of(options, place, generation)
        except BaseException:
            await place.transport.aclose(drained=False)
            raise
        try:
            if before is not None:
                world.registry.portal = before.portal
                world.registry.stop_requested = before.stop_requested
                if before.kept is not None:
                    before.kept.follow(world.registry)
            await world.open()
        except BaseException as error:
            await world.abort(CommunicatorAborted(f"the world was not opened: {error!r}"))
            raise
        return world


def _communicator(dispatcher: Dispatcher, topology: Topology | None, registry: Registry[Communicator]) -> Communicator:
    make = Communicator if dispatcher.issuing is None else ThreadedCommunicator
    return make(dispatcher, topology, registry)


def _epoll_of(loop: asyncio.AbstractEventLoop) -> int | None:
    """Return the file descriptor that the loop waits at, None where it does not tell."""
    if (backend := getattr(loop, "_get_backend_id", None)) is not None:  # uvloop
        fd: int = backend()
        return fd
    selector: object = getattr(loop, "_selector", None)
    return selector.fileno() if isinstance(selector, selectors.EpollSelector) else None


def _limit_spinning(world: Communicator) -> None:
    """A rank that spins where another waits for the core only keeps it waiting."""
    if world.local_size > len(os.sched_getaffinity(0)):
        Progress.current().crowded = True
        if (near := world.parts.registry.near) is not None:
            near.engine.spin(0.0)
