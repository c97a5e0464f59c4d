"""The union of two jobs: a control channel and communicators over the ranks of both, first those of the listener."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from dataclasses import dataclass

from aiodist.communicator import Communicator, parts_of
from aiodist.control import Channel, HostedHub, connect, exchange, name_ranks
from aiodist.env import Environment
from aiodist.errors import AiodistError, CommunicatorAborted, OperationTimeout
from aiodist.topology import Topology, named
from aiodist.world.generation import RankWorld, WorldOptions
from aiodist.world.opening import Limits, place_on, unless_lost


@dataclass(frozen=True)
class Meeting:
    """The place of this rank in the union of two jobs."""

    name: str
    """Name of the bridge, for messages."""
    address: str
    token: str
    rank: int
    """Number in the union: the ranks that listen come first."""
    listening: int
    """Number of ranks that listen."""
    size: int
    seconds: float
    """Longest wait for all ranks of both jobs."""
    hub: HostedHub | None = None
    """The hub, on the rank that hosts it."""

    @property
    def mine(self) -> range:
        """The ranks of this job, in the union."""
        return range(self.listening) if self.rank < self.listening else range(self.listening, self.size)

    @property
    def theirs(self) -> range:
        """The ranks of the other job, in the union."""
        return range(self.listening, self.size) if self.rank < self.listening else range(self.listening)

    def names(self, places: list[tuple[str, int]]) -> dict[int, tuple[str, int]]:
        """Return the name of each rank of the union, and its number in its own job."""
        found = {}
        for rank, (host, process) in enumerate(places):
            own = rank if rank < self.listening else rank - self.listening
            job = f"the job at the other end of bridge {self.name!r}" if rank in self.theirs else "this job"
            found[rank] = f"rank {own} of {job} (host {host}, process {process})", own
        return found


class Union:
    """This rank's end of the connection of two jobs.

    Attributes:
        channel: the control channel over the ranks of both.
        messages: communicator for the messages of the program.
        weights: communicator for published states.
    """

    def __init__(self, channel: Channel, world: RankWorld, messages: Communicator) -> None:
        self.channel = channel
        self.messages = messages
        self.weights: Communicator
        self._world = world

    @classmethod
    async def of(cls, meeting: Meeting) -> Union:
        """Return the union once all ranks of both jobs have come.

        Raises `OperationTimeout` with the ranks that have not come in time, and `PeerLost` if a rank is lost meanwhile.
        """
        seconds = meeting.seconds
        try:
            channel = await connect(
                meeting.address,
                rank=meeting.rank,
                size=meeting.size,
                token=meeting.token,
                timeout=seconds,
                hub=meeting.hub,
            )
        except OperationTimeout as error:
            missing = " and ".join(
                f"{name_ranks(late)} of {job}"
                for job, ranks in (("this job", meeting.mine), ("the other job", meeting.theirs))
                if (late := [rank - ranks[0] for rank in error.late if rank in ranks])
            )
            message = f"bridge {meeting.name!r} at {meeting.address}: {missing or 'a rank'} had not come"
            raise OperationTimeout(f"{message} after {seconds:.3g} s", late=error.late, op="connect") from error
        try:
            mine = [socket.gethostname(), os.getpid()]
            places = await unless_lost(channel, exchange(channel, "bridge", mine, seconds))
            channel.names.update(meeting.names(places))
            union = await cls._on(channel, meeting, [host for host, _ in places])
            if 0 < meeting.rank < meeting.listening:
                # Rank 0 decides whether the bridge is open: on this rank it may be lost from the beginning.
                told = channel.request("exchange", "opened", channel.size, '""')
                told.add_done_callback(lambda told: told.cancelled() or told.exception())
            else:
                await unless_lost(channel, exchange(channel, "opened", "", seconds))
            return union
        except BaseException:
            with suppress(OSError, RuntimeError):
                await channel.aclose()
            raise

    @classmethod
    async def _on(cls, channel: Channel, meeting: Meeting, hosts: list[str]) -> Union:
        limits, environment = Limits(rendezvous=meeting.seconds), Environment.read()
        place = await place_on(channel, environment, "shared", limits)
        try:
            world = await RankWorld.of(WorldOptions(limits, environment, alone=False, program=False), place)
        except BaseException:
            await place.transport.aclose(drained=False)
            raise
        try:
            topology = Topology(named(hosts, place.hosts), meeting.rank)
            messages = world.registry.world(place.transport, topology, f"bridge {meeting.name}")
            union = cls(channel, world, messages)
            union.weights = await messages.dup()
        except BaseException as error:
            await world.abort(CommunicatorAborted(f"bridge {meeting.name!r} was not opened: {error!r}"))
            raise
        return union

    def abort(self, error: AiodistError) -> None:
        """Make pending and later operations of this rank raise `error`. The other ranks are not notified."""
        for comm in (self.weights, self.messages):
            lifetime = parts_of(comm).dispatcher.lifetime
            if lifetime.refusal is None:
                lifetime.abort(error)

    async def close(self, error: AiodistError) -> None:
        """Abort, release the memory of other ranks, and leave the control channel."""
        try:
            await self._world.abort(error)
        finally:
            with suppress(OSError, TimeoutError, AiodistError):
                await asyncio.shield(self.channel.aclose())
