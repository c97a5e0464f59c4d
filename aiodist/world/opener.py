"""`WorldOpener`: channel and world of each generation of an elastic world."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.registry import Registry
from aiodist.control import Channel, connect
from aiodist.env import Generation
from aiodist.errors import BackendUnavailable, CommunicatorAborted, ConfigError
from aiodist.world.generation import RankWorld, WorldOptions
from aiodist.world.opening import RankPlace, RankSeat, place_on, start_mpi

if TYPE_CHECKING:
    from aiodist.backends.mpi import MpiTransport


class WorldOpener:
    """Opens the generations of one rank: see `Opener`."""

    def __init__(self, options: WorldOptions, backend: str | None, given: RankSeat | None) -> None:
        """A rank that is a task of one process has a `given` seat. Raises ConfigError if the job is not elastic."""
        elastic = options.environment.elastic if given is None else given.elastic
        if elastic is None:
            how = "expected aiodist run --elastic MIN:MAX, whose launcher has the hub, so that any rank may die"
            raise ConfigError(f"init(elastic=True), and the job is not elastic: {how}")
        self.alone = options.alone
        self.most = elastic[1]
        self.report_after = options.report_after if options.alone else None
        self._options = options
        self._backend = backend or options.environment.backend
        self._given = given
        self._mpi: MpiTransport | None = None
        """MPI while it carries the first generation, or None."""

    async def first(self) -> tuple[Channel, Generation]:
        """Return the channel of the generation that this rank was started for."""
        if self._given is not None:
            return await self._given.first()
        environment = self._options.environment
        name = self._backend or ("mpi" if environment.mpi else None)
        if name and name not in ("gloo", "shm", "mpi"):
            raise ConfigError(f"backend {name!r} of an elastic world: expected gloo, shm, or mpi")
        generation = environment.generation
        if name == "mpi" and generation.number == 0:  # before all have met: a failure of MPI's start ends the job
            if not environment.shared_memory:
                raise BackendUnavailable("an elastic world over MPI is for ranks that share memory: AIODIST_SHM=0")
            self._mpi = await start_mpi(environment, self._options.limits, mortal=True)
        return await self.meet(generation, environment.rank, environment.rendezvous or ""), generation

    async def meet(self, generation: Generation, rank: int, address: str) -> Channel:
        """Return the channel of a generation that has begun. Raises `PeerLost` if it never begins."""
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

    async def open(self, channel: Channel, generation: Generation, before: Registry[Communicator] | None) -> RankWorld:
        """Return the open world of a generation, after the world of `before`. On an error only the channel remains."""
        place = await self._place(channel, generation)
        try:
            world = await RankWorld.of(self._options, place, generation)
        except BaseException:
            await place.transport.aclose(drained=False)
            raise
        try:
            if before is not None:
                world.registry.follow(before)
            await world.open()
            if (mpi := self._mpi) is not None:
                parts_of(world.comm).dispatcher.lifetime.on_abort.append(lambda _: mpi.leave())
        except BaseException as error:
            await world.abort(CommunicatorAborted(f"the world was not opened: {error!r}"))
            raise
        return world

    async def _place(self, channel: Channel, generation: Generation) -> RankPlace:
        """Return the place of this rank in a generation. MPI may carry the first generation only."""
        if self._given is not None:
            return self._given.place(channel, generation)
        options, mpi = self._options, self._mpi
        if mpi is not None and generation.number:
            mpi.leave()
            self._mpi = mpi = None
        asked = self._backend if self._backend != "mpi" else None
        backend = "shm" if mpi is not None else asked or "shared"
        place = await place_on(channel, options.environment, backend, options.limits)
        if mpi is not None:
            mpi.beside = place.transport
            place = replace(place, transport=mpi, beside=place.transport)
        return place
