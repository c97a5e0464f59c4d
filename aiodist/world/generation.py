"""The world of one rank, or one generation of it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from aiodist.collectives.choice.tablefile import edits_at_start
from aiodist.communicator import Communicator, Hierarchy, parts_of, root_levels, upkeep_of
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.registry import Registry
from aiodist.communicator.report import REPORT_SECONDS
from aiodist.communicator.threaded import ThreadedCommunicator
from aiodist.communicator.watchdog import Watch
from aiodist.env import Environment, Generation, Starter
from aiodist.errors import AiodistError
from aiodist.handles import Progress
from aiodist.topology import Topology
from aiodist.types import check_period, check_timeout
from aiodist.watch.arrivals import ArrivalTimes
from aiodist.watch.deadlocks import Deadlocks
from aiodist.watch.inspector import inspected
from aiodist.watch.lag import watched_loop
from aiodist.watch.metrics import measured
from aiodist.watch.trace import Recording
from aiodist.world.leaving import stopping_by_signals
from aiodist.world.opening import Limits, RankPlace, find_neighbours, find_topology, unless_lost
from aiodist.world.pinning import pinned


@dataclass(frozen=True)
class WorldOptions:
    """The options of the world, from `init` and the environment."""

    limits: Limits
    environment: Environment
    alone: bool
    """True if this rank has a process of its own."""
    program: bool
    """True if an error that ends this world ends the program, with its exit code."""
    timeout: float | None = None
    report_after: float | None = REPORT_SECONDS
    levels: Callable[[Communicator], Hierarchy | Awaitable[Hierarchy]] | None = None
    selector: str | os.PathLike[str] | None = None
    thread: bool = False
    stop_on_signal: bool = False
    stragglers: bool = False
    report_lag_over: float | None = None
    strict: bool = False
    reproducible: bool = False

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        check_period("report_after", self.report_after)
        check_period("report_lag_over", self.report_lag_over)


class RankWorld:
    """The open world of one generation on this rank."""

    def __init__(self, options: WorldOptions, place: RankPlace, registry: Registry[Communicator]) -> None:
        self.transport = place.transport
        self.channel = place.channel
        self.registry = registry
        self.comm: Communicator  # over all of its ranks, once it is open
        self._options = options
        self._place = place
        self._held = ExitStack()
        self._signals = ExitStack()
        self._watching: list[ArrivalTimes | Recording] = []

    @classmethod
    async def of(cls, options: WorldOptions, place: RankPlace, generation: Generation | None = None) -> RankWorld:
        """Return the world of the ranks at `place`, before `open`."""
        limits = options.limits
        near, alone, sharing = await find_neighbours(place, options.environment, limits)
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
        registry.strict = options.strict
        registry.resources.reproducible = options.reproducible
        return cls(options, place, registry)

    async def open(self) -> Communicator:
        """Return the communicator over all ranks, after the start of its services."""
        options, channel = self._options, self.channel
        limits, environment = options.limits, options.environment
        same = {"reproducible": options.reproducible}
        topology = await unless_lost(channel, find_topology(self._place, environment, limits, same))
        world = self.registry.world(self.transport, topology, thread=options.thread)
        watch = Watch.of(Progress.current(), channel)
        watch.report.after = options.report_after
        Deadlocks(watch, channel)
        if world.local_size > len(os.sched_getaffinity(0)):  # spinning would delay other ranks
            Progress.current().crowded = True
            if (near := self.registry.resources.near) is not None:
                near.engine.spin(0.0)
        asked = options.selector or environment.selector
        edits = edits_at_start(asked, channel, parts_of(world).repertoire, topology, seconds=limits.rendezvous)
        upkeep_of(world).apply_edits(await unless_lost(channel, edits))
        if options.alone:  # ranks that are tasks of one process share its cores as they are
            self._held.enter_context(await unless_lost(channel, pinned(channel, world.topology, environment)))
            if options.stop_on_signal:
                self._signals.enter_context(stopping_by_signals(lambda: world))
        self._held.enter_context(watched_loop(Progress.current(), channel.rank, options.report_lag_over))
        self._held.enter_context(inspected(watch, channel, environment.job if options.alone else None))
        if options.alone and environment.metrics is not None:
            self._held.enter_context(measured(world, environment.metrics, environment.otlp_interval))
        if options.levels is not None:
            await root_levels(world, options.levels)
        if (options.stragglers or environment.stragglers) and world.size > 1:
            self._watch(ArrivalTimes(world, report=environment.stragglers))
        if environment.trace is not None:
            # The launcher merges the files, also after a kill of ranks.
            own = environment.starter is not Starter.AIODIST
            recording = Recording(world, Path(environment.trace), own=own)
            self._watch(recording)
            await recording.begin()
        self.comm = world
        return world

    def _watch(self, watching: ArrivalTimes | Recording) -> None:
        self._watching.append(watching)
        self._held.callback(watching.close)

    async def cancel(self) -> None:
        """Release cores, signals and traces of the process, since the program failed."""
        self._held.close()
        self._signals.close()

    async def close(self) -> None:
        """Close all communicators, in order, with all other ranks."""
        for watching in reversed(self._watching):
            await watching.finish()
        self._held.close()
        await self.registry.close(self.comm)
        self._signals.close()  # a late signal is the one for which all have stopped

    async def abort(self, error: AiodistError) -> None:
        """Close without the others. Pending operations and later calls raise `error`."""
        await self.cancel()
        await self.registry.abort(error)
        await self.registry.close_memory()


def _communicator(dispatcher: Dispatcher, topology: Topology | None, registry: Registry[Communicator]) -> Communicator:
    make = Communicator if dispatcher.lifetime.issuing is None else ThreadedCommunicator
    return make(dispatcher, topology, registry)
