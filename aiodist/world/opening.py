"""The place of a rank: transport, control channel and neighbours."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aiodist.backends.local import LocalHub, LocalTransport
from aiodist.backends.shm import Met, meet
from aiodist.backends.shm import open_world as open_shared_memory
from aiodist.collectives.cuda.accelerator import means_here, visible_devices
from aiodist.collectives.cuda.peers import peers_here
from aiodist.collectives.endpoint import Endpoint
from aiodist.collectives.implementations import Primitives, Repertoire
from aiodist.collectives.metadata import as_bytes, as_tensor
from aiodist.collectives.operations import allgather
from aiodist.communicator.registry import DRAIN_SECONDS
from aiodist.control import Channel, Exit, connect, disagreement, exchange, find_hosts, host, in_process
from aiodist.control.thread import settle_soon
from aiodist.env import Environment, Generation
from aiodist.errors import BackendUnavailable, ConfigError, MismatchError, OperationTimeout
from aiodist.handles import Operation, Progress
from aiodist.handles.kernel import Program
from aiodist.handles.kernel import run as run_program
from aiodist.machine import network
from aiodist.topology import Means, Topology, bound, named
from aiodist.world.leaving import the_end

if TYPE_CHECKING:
    from aiodist.backends.base import Transport
    from aiodist.backends.mpi import MpiTransport

T = TypeVar("T")

_BACKENDS = ("mpi", "gloo", "shm", "local")


@dataclass(frozen=True)
class Limits:
    """Time limits of `init`, in seconds."""

    rendezvous: float = 60.0
    """Wait for all ranks."""
    drain: float = DRAIN_SECONDS
    """Wait for operations in flight at the end of the block."""
    abort: float = 1.5
    """Abort after an error of the block."""
    forgotten: float = 5.0
    """Close, at the end of the program, of a world of `open` that the program has not closed."""
    leave: float = 2.5
    """End of the process after that, even if its other threads still run."""


@dataclass(frozen=True)
class RankPlace:
    """The transport and the control channel of a rank."""

    transport: Transport
    channel: Channel
    hosts: tuple[int, ...]
    """First rank of the host of each rank."""
    met: Met | None = None
    """Ranks that share memory, if known."""
    beside: Transport | None = None
    """Transport of communicators that are made from an elastic world over MPI."""


@dataclass(frozen=True)
class Introduction:
    """Ranks that know their numbers and can exchange a few bytes, which is enough for a rendezvous."""

    rank: int
    size: int
    exchange: Callable[[bytes], Awaitable[list[bytes]]]
    """Returns the bytes of each rank, by rank. All ranks call it the same number of times."""


class RankSeat(Protocol):
    """The seat of a rank that is a task of one process. Each `init` in a row has its own transport and channel."""

    def take(self) -> RankPlace:
        """Return the place of the rank's next `init`."""

    @property
    def elastic(self) -> tuple[int, int] | None:
        """Fewest and most ranks of an elastic job, or None."""

    async def first(self) -> tuple[Channel, Generation]:
        """Return the channel of the generation that this rank was started for."""

    async def next(self, generation: Generation, rank: int) -> Channel:
        """Return the channel of a generation that has begun. Raises `PeerLost` if it never begins."""

    def place(self, channel: Channel, generation: Generation) -> RankPlace:
        """Return the place of the rank with this channel."""


current_place: ContextVar[RankSeat | None] = ContextVar("aiodist_place", default=None)
"""Seat of a rank of `aiodist.testing.run_ranks`, or None for a rank with a process of its own."""


async def find_place(
    environment: Environment, asked: str | None, limits: Limits, meeting: Introduction | None = None
) -> RankPlace:
    """Return this process's place among all ranks of its job. An error closes all that was opened.

    `asked` is the backend for the data, or None for the default of the starter. The ranks of a `meeting` are the job,
    with an MPI or without.
    """
    backend = _backend(asked, environment)
    if backend == "local":
        return RankPlace(LocalTransport(LocalHub(), 0, 1), in_process(1)[0], (0,))
    mpi = None
    if meeting is None and environment.rendezvous is None and (backend == "mpi" or environment.mpi):
        mpi = await start_mpi(environment, limits)
    try:
        channel = await (_meet(environment, mpi, limits) if meeting is None else _meet_over(meeting, limits))
    except BaseException:
        if mpi is not None:
            await mpi.aclose(drained=False)
        raise
    if meeting is not None and (asked or environment.backend) is None:
        backend = "shared"
    try:
        return await place_on(channel, environment, backend, limits, mpi)
    except BaseException as error:
        end = await the_end(error)
        channel.fail(end.cause, end.traceback, end.exitcode)
        await channel.aclose()
        raise


async def place_on(
    channel: Channel, environment: Environment, backend: str, limits: Limits, mpi: MpiTransport | None = None
) -> RankPlace:
    """Return the place of a rank that has met the others. "shared" is shared memory if all ranks can, else gloo."""
    hosts = await unless_lost(channel, find_hosts(channel, limits.rendezvous))
    met = None
    if channel.size > 1 and (backend == "shm" or (backend in ("shared", "mpi") and len(set(hosts)) == 1)):
        meeting = meet(channel, hosts, allowed=environment.shared_memory, seconds=limits.rendezvous)
        met = await unless_lost(channel, meeting)
    if backend == "shared":
        backend = "shm" if channel.size == 1 or (met is not None and met.near is not None) else "gloo"
    transport = await unless_lost(channel, open_transport(environment, backend, mpi, channel, met, hosts, limits))
    return RankPlace(transport, channel, hosts, met)


def _backend(asked: str | None, environment: Environment) -> str:
    name = asked or environment.backend
    if name is None:
        return "mpi" if environment.mpi else "local" if environment.size == 1 else "shared"
    if name not in _BACKENDS:
        raise ConfigError(f"backend {name!r} is unknown: expected one of {', '.join(_BACKENDS)}")
    if name == "local" and environment.size > 1:
        raise ConfigError(f"backend 'local' has one process: this is one of {environment.size}; use mpi, gloo or shm")
    return name


async def _meet(environment: Environment, mpi: MpiTransport | None, limits: Limits) -> Channel:
    """Return the control channel to the other ranks, once all of them have come."""
    if (environment.size if mpi is None else mpi.size) == 1:
        return in_process(1)[0]
    if mpi is not None:  # plain mpirun
        primitives = Primitives(Endpoint(mpi, 0), Repertoire(mpi))

        async def exchange(said: bytes) -> list[bytes]:
            (of_all,) = await _run(allgather(primitives, [as_tensor(said)]))
            return [as_bytes(one) for one in of_all]

        return await _meet_over(Introduction(mpi.rank, mpi.size, exchange), limits)
    if environment.rendezvous is None:
        how = "start them with aiodist run, torchrun or mpirun"
        raise ConfigError(f"{environment.size} ranks and no rendezvous: {how}")
    return await connect(
        environment.rendezvous,
        rank=environment.rank,
        size=environment.size,
        token=environment.token,
        timeout=limits.rendezvous,
        environ=environment.variables,
    )


async def open_transport(
    environment: Environment,
    backend: str,
    mpi: MpiTransport | None,
    channel: Channel,
    met: Met | None,
    hosts: Sequence[int],
    limits: Limits,
) -> Transport:
    """Return what carries bytes by `backend`; raise BackendUnavailable where these ranks cannot use it."""
    if backend == "mpi":
        mpi = mpi or await start_mpi(environment, limits)
        if met is not None and met.near is not None and "cuda" not in mpi.capabilities().devices:
            mpi.near = open_shared_memory(met.near)
        return mpi
    if mpi is not None:  # it was needed only for the ranks to meet
        await mpi.aclose(drained=True)
    if backend == "gloo":
        from aiodist.backends.gloo import open_world

        return await open_world(channel, one_host=len(set(hosts)) == 1)
    if met is None:
        return LocalTransport(LocalHub(), 0, 1, name="shm")
    near, reason, _ = met
    if near is not None and len(near.members) == channel.size:
        return open_shared_memory(near)
    if near is not None:
        near.close()
        reason = f"of {channel.size} ranks only {len(near.members)} are on this host"
    raise BackendUnavailable(f"backend 'shm' is for ranks of one host that share memory: {reason}")


async def start_mpi(environment: Environment, limits: Limits, *, mortal: bool = False) -> MpiTransport:
    """Return MPI's transport over all ranks of the job, which are as many as the environment says; see `open_world`."""
    from aiodist.backends.mpi import library_version, open_world

    try:
        async with asyncio.timeout(limits.rendezvous):
            world = await open_world(mortal=mortal)
    except TimeoutError:
        who = f"not all of the {environment.size} ranks came"
        raise OperationTimeout(f"MPI could not start within {limits.rendezvous:g} s: {who}", op="init") from None
    if (environment.mpi or environment.size > 1) and world.size != environment.size:
        await world.aclose(drained=False)
        seen = f"{library_version()}, which mpi4py loaded, sees {world.size}"
        if not environment.mpi:
            raise ConfigError(f"backend 'mpi' for {environment.size} ranks, but no mpirun started them: {seen}")
        raise ConfigError(f"mpirun started {environment.size} ranks, but {seen}: the two are of different MPIs")
    return world


async def unless_lost(channel: Channel, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; raise as soon as it is known that another rank has left."""
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[Exit] = loop.create_future()
    channel.on_lost(partial(settle_soon, lost))
    task = loop.create_task(work)
    try:
        await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
        if lost.done() and not task.done():
            raise lost.result().error()
        return await task
    finally:
        lost.cancel()
        if task.cancel():
            await asyncio.wait((task,))


async def _meet_over(meeting: Introduction, limits: Limits) -> Channel:
    """Return the channel to a hub of rank 0, on the loopback interface if all ranks have the same one."""
    rank, size = meeting.rank, meeting.size
    networks = await meeting.exchange(network().encode())
    hub, told = None, ""
    if rank == 0:
        token = secrets.token_hex(16)
        hub = await host(size, host="127.0.0.1" if len(set(networks)) == 1 else "", token=token)
        told = f"{hub.address} {token}"
    address, token = (await meeting.exchange(told.encode()))[0].decode().split()
    return await connect(address, rank=rank, size=size, token=token, timeout=limits.rendezvous, hub=hub)


async def _run(program: Program[T]) -> T:
    """Return the result of a program without a communicator."""
    progress = Progress.current()
    operation: Operation[T] = Operation(progress, "rendezvous")

    def finish(result: T | None, error: BaseException | None) -> None:
        if result is not None:
            operation.resolve(result)
        elif error is not None:
            operation.reject(error)

    progress.start(partial(run_program, program, finish))
    return await operation.handle


async def find_topology(
    place: RankPlace, environment: Environment, limits: Limits, same: Mapping[str, object]
) -> Topology:
    """Exchange the hosts of all ranks, and the CUDA devices that each rank sees.

    Raises MismatchError on all ranks if an option in `same` differs between ranks.
    """
    devices = visible_devices(environment)
    means = means_here(nccl_shares=environment.many_ranks_a_device) if devices else ()
    mine = [socket.gethostname(), devices, means, peers_here(), same]
    places = await exchange(place.channel, "place", mine, limits.rendezvous)
    for option in same:
        values = [str(options.get(option)) for *_, options in places]
        if len(set(values)) > 1:
            raise MismatchError(disagreement(f"init({option}=)", values))
    topology = Topology(named([name for name, *_ in places], place.hosts), place.channel.rank)
    bindings = [
        bound(topology.ranks_on(topology.host_of[rank]).index(rank), physical, Means(*means), peers)
        for rank, (_, physical, means, peers, _) in enumerate(places)
    ]
    return replace(topology, devices=tuple(bindings) if any(bindings) else ())


async def find_neighbours(place: RankPlace, environment: Environment, limits: Limits) -> Met:
    """Return the ranks of this host that share memory with this one, or the reason if there are none."""
    channel, transport = place.channel, place.beside or place.transport
    if transport.name == "local" or channel.size == 1:
        return Met(None, "all ranks are in one process")
    if place.met is not None:
        return place.met
    meeting = meet(channel, place.hosts, allowed=environment.shared_memory, seconds=limits.rendezvous)
    return await unless_lost(channel, meeting)
