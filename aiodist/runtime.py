"""`init` and `run`: opens what is below in order, and closes it in reverse, also when things go wrong."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from aiodist.accelerator import means_here, visible_devices
from aiodist.backends.local import LocalHub, LocalTransport
from aiodist.backends.shm import Neighbourhood, ShmTransport, meet
from aiodist.backends.shm import open_world as open_shared_memory
from aiodist.collectives.agreement import rank_zeros
from aiodist.collectives.metadata import as_bytes, as_tensor
from aiodist.collectives.operations import broadcast_bytes
from aiodist.collectives.primitives import Primitives
from aiodist.collectives.program import Endpoint
from aiodist.collectives.program import run as run_program
from aiodist.collectives.repertoire import Repertoire
from aiodist.communicator import Communicator
from aiodist.communicator.tuned import edits_at_start
from aiodist.control import Channel, Exit, connect, host, in_process
from aiodist.control.forks import guard_polling
from aiodist.env import Environment, Starter
from aiodist.errors import AiodistError, BackendUnavailable, CommunicatorAborted, ConfigError, OperationTimeout
from aiodist.family import DRAIN_SECONDS, Family
from aiodist.handles import Handle, Progress, from_future
from aiodist.hierarchy import Hierarchy, root_levels
from aiodist.isolation import isolate
from aiodist.pinning import pinned
from aiodist.streams import CudaStream, event_handle
from aiodist.topology import Means, Topology, bound

if TYPE_CHECKING:
    from aiodist.backends.base import Transport
    from aiodist.backends.mpi import MpiTransport

__all__ = ["BACKENDS", "Limits", "Place", "as_handle", "current_limits", "current_place", "init", "isolate", "run"]

T = TypeVar("T")

BACKENDS = ("mpi", "gloo", "shm", "local")
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Limits:
    """How patient `init` is, in seconds."""

    rendezvous: float = 60.0
    """Until every rank has come."""
    drain: float = DRAIN_SECONDS
    """Until what is in flight at the end of the block is over."""
    abort: float = 1.5
    """For giving everything up after the block raised."""
    leave: float = 2.5
    """For the process to end after that, whatever its other threads do."""


@dataclass(frozen=True)
class Place:
    """Where a rank finds itself: who carries its data, who its news."""

    transport: Transport
    channel: Channel
    checked: bool


current_place: ContextVar[Place | None] = ContextVar("aiodist_place", default=None)
"""Set around each rank by `aiodist.testing.run_ranks`; None in a process of its own."""

current_limits: ContextVar[Limits] = ContextVar("aiodist_limits", default=Limits())  # noqa: B039  - it is frozen


@asynccontextmanager
async def init(
    *,
    backend: str | None = None,
    checked: bool | None = None,
    timeout: float | None = None,
    levels: Callable[[Communicator], Hierarchy | Awaitable[Hierarchy]] | None = None,
    selector: str | os.PathLike[str] | None = None,
) -> AsyncIterator[Communicator]:
    """Open the world: a `Communicator` over all ranks of the job; every rank must enter.

    The place in the job comes from `aiodist run`, an MPI launcher, torchrun or Slurm; without any, this is the only
    rank and no library is needed. `backend` is "mpi", "gloo", "shm" (for ranks of one host) or "local", chosen to fit
    where None. `checked` compares each operation on all ranks before the data moves (AIODIST_CHECKED=1 where None).
    `timeout` is the default of every operation, in seconds. `levels` is called with the world before the block is
    entered and returns what `coll.hierarchy(...)` does, or a coroutine of it: the groups of `coll.levels`, with those
    of a host under the last of them. `selector` is a file with the table of `coll.selector`, as rank 0 finds it
    (AIODIST_SELECTOR where None); without, the one that `aiodist tune` measured for these hosts and versions, if any;
    "none" is neither.

    Leaving the block closes the world on all ranks, once what is in flight is over (30 s at most). When the block
    raises, nothing is waited for: the other ranks are told, and their operations raise `RemoteError` or `PeerLost`;
    when the process then ends, threads that never do hold it up for a few seconds at most. Raises `ConfigError`,
    `BackendUnavailable`, `PeerLost`, or `OperationTimeout` naming the ranks that never came.
    Nothing global is set; it can be opened again after it was closed.
    """
    limits = current_limits.get()
    given = current_place.get()
    environment = Environment.read()
    place = given or await _find_place(environment, _backend(backend, environment), limits)
    transport, channel = place.transport, place.channel
    near, alone = await _neighbours(channel, transport, environment, limits)
    family = Family(
        channel,
        Communicator,
        near=near,
        alone=alone,
        checked=place.checked if checked is None else checked,
        timeout=timeout,
        drain_seconds=limits.drain,
    )
    process = os.getpid()
    try:
        topology = await _unless_lost(channel, _topology(channel, environment, limits))
        world = family.world(transport, topology)
        _limit_spinning(world)
        asked = selector or environment.selector
        edits = rank_zeros(channel, lambda: edits_at_start(world, asked), limits.rendezvous)
        world._adopt(await _unless_lost(channel, edits))
        # Ranks that are tasks of one process share its cores as they are.
        cores = nullcontext() if given else await _unless_lost(channel, pinned(channel, world.topology, environment))
        with cores, guard_polling(_epoll_of(asyncio.get_running_loop())):
            if levels is not None:
                await root_levels(world, levels)
            yield world
        if os.getpid() == process:  # else it is a forked child's end of the block, which is nobody else's business
            await world.aclose()
    except BaseException as error:
        if os.getpid() == process:
            end = await _the_end(error)
            if given is None and transport.size > 1:
                await _leave_in_time(end.exitcode, limits.leave)
            await _give_up(family, channel, end, limits.abort, patient=environment.starter is Starter.MPI)
            await family.close_memory()
        raise
    if os.getpid() == process:
        await family.close_memory()
        await channel.aclose()


# --- opening -------------------------------------------------------------------------------------------------


def _backend(asked: str | None, environment: Environment) -> str:
    name = asked or environment.backend
    if name is None:
        name = "mpi" if environment.mpi else "local" if environment.size == 1 else "gloo"
    if name not in BACKENDS:
        raise ConfigError(f"backend {name!r} is unknown: expected one of {', '.join(BACKENDS)}")
    if name == "local" and environment.size > 1:
        raise ConfigError(f"backend 'local' has one process: this is one of {environment.size}; use mpi, gloo or shm")
    return name


async def _find_place(environment: Environment, backend: str, limits: Limits) -> Place:
    """Return this process's place among all ranks of its job. What fails half-way is closed again."""
    if backend == "local":
        return Place(LocalTransport(LocalHub(), 0, 1), in_process(1)[0], environment.checked)
    mpi = None
    if environment.rendezvous is None and (backend == "mpi" or environment.mpi):
        mpi = await _start_mpi(environment, limits)
    try:
        channel = await _meet(environment, mpi, limits)
    except BaseException:
        if mpi is not None:
            await mpi.aclose(drained=False)
        raise
    try:
        transport = await _unless_lost(channel, _transport(environment, backend, mpi, channel, limits))
    except BaseException as error:
        end = await _the_end(error)
        channel.fail(end.cause, end.traceback, end.exitcode)
        await channel.aclose()
        raise
    return Place(transport, channel, environment.checked)


async def _meet(environment: Environment, mpi: MpiTransport | None, limits: Limits) -> Channel:
    """Return the control channel to the other ranks, once all of them have come."""
    if (environment.size if mpi is None else mpi.size) == 1:
        return in_process(1)[0]
    if mpi is not None:
        return await _meet_over_mpi(environment, mpi, limits)
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


async def _transport(
    environment: Environment, backend: str, mpi: MpiTransport | None, channel: Channel, limits: Limits
) -> Transport:
    if backend == "mpi":
        return mpi or await _start_mpi(environment, limits)
    if mpi is not None:  # it was needed only for the ranks to meet
        await mpi.aclose(drained=True)
    if backend == "shm":
        return await _open_shared_memory(environment, channel, limits)
    from aiodist.backends.gloo import open_world

    return await open_world(channel)


async def _open_shared_memory(environment: Environment, channel: Channel, limits: Limits) -> ShmTransport:
    """Return a transport in memory that all ranks share; raise BackendUnavailable where they do not."""
    if channel.size == 1:
        return open_shared_memory(None)
    near, reason = await meet(channel, allowed=environment.shared_memory, seconds=limits.rendezvous)
    if near is not None and len(near.members) == channel.size:
        return open_shared_memory(near)
    if near is not None:
        near.close()
        reason = f"of {channel.size} ranks only {len(near.members)} are on this host"
    raise BackendUnavailable(f"backend 'shm' is for ranks of one host that share memory: {reason}")


async def _start_mpi(environment: Environment, limits: Limits) -> MpiTransport:
    from aiodist.backends.mpi import library_version, open_world

    try:
        async with asyncio.timeout(limits.rendezvous):
            world = await open_world()
    except TimeoutError:
        who = f"not all of the {environment.size} ranks came"
        raise OperationTimeout(f"MPI could not start within {limits.rendezvous:g} s: {who}", op="init") from None
    if environment.mpi and world.size != environment.size:
        await world.aclose(drained=False)
        raise ConfigError(
            f"mpirun started {environment.size} ranks, but {library_version()}, which mpi4py loaded, sees "
            f"{world.size}: the two are of different MPIs"
        )
    return world


async def _unless_lost(channel: Channel, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; raise as soon as it is known that another rank has left."""
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[Exit] = loop.create_future()

    def note(exit: Exit) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(_settle, lost, exit)

    channel.on_lost(note)
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


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


async def _meet_over_mpi(environment: Environment, mpi: MpiTransport, limits: Limits) -> Channel:
    """Plain mpirun: rank 0 runs the hub and tells the others over MPI where it is."""
    hub = None
    told = None
    if mpi.rank == 0:
        token = secrets.token_hex(16)
        one_host = environment.local_size == mpi.size
        hub = await host(mpi.size, host="127.0.0.1" if one_host else "", token=token)
        told = as_tensor(f"{hub.address} {token}".encode())
    progress = Progress.current()
    handle: Handle[torch.Tensor] = Handle(progress, "rendezvous")

    def finish(result: torch.Tensor | None, error: BaseException | None) -> None:
        if result is not None:
            handle.resolve(result)
        elif error is not None:
            handle.reject(error)

    program = broadcast_bytes(Primitives(Endpoint(mpi, 0), Repertoire(mpi)), told, 0)
    progress.start(partial(run_program, program, finish))
    address, token = as_bytes(await handle).decode().split()
    return await connect(address, rank=mpi.rank, size=mpi.size, token=token, timeout=limits.rendezvous, hub=hub)


async def _topology(channel: Channel, environment: Environment, limits: Limits) -> Topology:
    """Have the ranks tell one another which host they are on, and which CUDA devices they see there."""
    devices = visible_devices(environment)
    mine = [socket.gethostname(), devices, means_here(nccl_shares=environment.many_ranks_a_device) if devices else ()]
    places: list[Any] = [mine]
    if channel.size > 1:
        await channel.set(f"host/{channel.rank}", json.dumps(mine).encode())
        told = [await channel.get(f"host/{rank}", timeout=limits.rendezvous) for rank in range(channel.size)]
        places = [json.loads(one) for one in told]
    hosts = Topology(tuple([host for host, _, _ in places]), channel.rank)
    bindings = [
        bound(hosts.ranks_on(host).index(rank), physical, Means(*means))
        for rank, (host, physical, means) in enumerate(places)
    ]
    return replace(hosts, devices=tuple(bindings) if any(bindings) else ())


async def _neighbours(
    channel: Channel, transport: Transport, environment: Environment, limits: Limits
) -> tuple[Neighbourhood | None, str]:
    """Return the ranks of this host that share memory with this one, or why there are none."""
    if transport.name == "local" or channel.size == 1:
        return None, "all ranks are in one process"
    if isinstance(transport, ShmTransport):
        return transport.near, ""
    return await _unless_lost(channel, meet(channel, allowed=environment.shared_memory, seconds=limits.rendezvous))


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


# --- giving up -----------------------------------------------------------------------------------------------


class _End(NamedTuple):
    """Why the block ended, as the other ranks are told."""

    cause: str
    traceback: str
    exitcode: int


async def _the_end(error: BaseException) -> _End:
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, asyncio.CancelledError):
        error = await _reason() or error
    return _End(f"{type(error).__name__}: {error}".removesuffix(": "), trace, _exit_code(error))


async def _reason() -> BaseException | None:
    """Return what ends the loop, if it is ended: `sys.exit` in one task cancels the others.

    `asyncio.run` cancels them while it is left with that exception, so a callback of the loop sees it being handled;
    a task does not, since each has handled exceptions of its own.
    """
    loop = asyncio.get_running_loop()
    seen: asyncio.Future[BaseException | None] = loop.create_future()
    loop.call_soon(lambda: _settle(seen, sys.exception()))
    reason = await seen
    return reason if isinstance(reason, (SystemExit, KeyboardInterrupt)) else None


def _exit_code(error: BaseException) -> int:
    """Return the exit code that Python will give this process for `error`."""
    if isinstance(error, BaseExceptionGroup):
        exits = error.subgroup((SystemExit, KeyboardInterrupt))
        return 1 if exits is None else _exit_code(exits.exceptions[0])
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    # Ctrl-C cancels the main task, and is raised by `asyncio.run` only after that has ended.
    return 130 if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)) else 1


async def _give_up(family: Family, channel: Channel, end: _End, seconds: float, *, patient: bool) -> None:
    """Tell the others and close what is open, in `seconds` at most; no trouble of it hides the error that led here.

    With `patient`, let the others leave first: an mpirun kills them as soon as this process ends.
    """
    channel.fail(end.cause, end.traceback, end.exitcode)
    with suppress(TimeoutError, AiodistError, RuntimeError, OSError):
        async with asyncio.timeout(seconds):
            await family.abandon(CommunicatorAborted(f"this rank failed: {end.cause}"))
            while patient and len(channel.exits()) < channel.size - 1:  # noqa: ASYNC110  - news of it come on a thread
                await asyncio.sleep(0.02)
            await channel.aclose()


async def _leave_in_time(code: int, seconds: float) -> None:
    """Other threads, in native code or of the user's, may keep the process from ending: then end it, with `code`.

    The time runs while asyncio closes the loop, where it waits for the threads of its executor, and from the end of
    the main thread, where Python waits for all others; not before: the program may catch the error and go on.
    """
    closing = threading.Event()
    sign = _sign_of_closing(closing)
    await anext(sign)
    loop = asyncio.get_running_loop()

    def watch(sign: object) -> None:
        main = threading.main_thread()
        left = seconds
        while left > 0:
            started = monotonic()
            closing.wait(_LOOK_SECONDS)
            main.join(_LOOK_SECONDS)
            if not main.is_alive() or (closing.is_set() and not loop.is_closed()):
                left -= monotonic() - started
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)

    # It holds `sign`, which the loop knows only weakly.
    threading.Thread(target=watch, name="aiodist-leave", daemon=True, kwargs={"sign": sign}).start()


async def _sign_of_closing(closing: threading.Event) -> AsyncIterator[None]:
    """Set `closing` when the loop is closed: it ends the asynchronous generators that nobody has ended."""
    try:
        yield
    finally:
        closing.set()


# --- running -------------------------------------------------------------------------------------------------


def run(
    main: Callable[..., Coroutine[Any, Any, T]] | Coroutine[Any, Any, T],
    *args: object,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    debug: bool | None = None,
) -> T:
    """Run a coroutine function with `args`, or a coroutine, to its end on a new event loop; return its result.

    uvloop is used where it is installed, and torch's modes are kept apart per task (see `isolate`). A convenience:
    `asyncio.run(main())` works too.
    """
    coroutine = main if isinstance(main, Coroutine) else main(*args)
    with asyncio.Runner(loop_factory=loop_factory or _best_loop(), debug=debug) as runner:
        isolate(runner.get_loop())
        return runner.run(coroutine)


def _best_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def as_handle(x: Any) -> Handle[Any]:  # noqa: ANN401
    """Return a handle that is done when `x` is, on the running loop.

    `x` is an mpi4py Request, a `concurrent.futures.Future`, a torch Work, a `torch.cuda.Event` as it was recorded last,
    a `torch.cuda.Stream` or `CudaStream` with what it has queued by now, or a handle already. Raises TypeError for
    anything else: coroutines and asyncio futures are awaited as they are.
    """
    if isinstance(x, Handle):
        return x
    if isinstance(x, CudaStream):
        return x.record()
    if isinstance(x, torch.cuda.Stream):
        return CudaStream(x).record()
    if isinstance(x, torch.cuda.Event):
        return event_handle(x)
    if isinstance(x, concurrent.futures.Future):
        return from_future(x)
    if "mpi4py.MPI" in sys.modules and isinstance(x, sys.modules["mpi4py.MPI"].Request):
        from aiodist.backends.mpi import request_handle

        return request_handle(x)
    if torch.distributed.is_available() and isinstance(x, torch.distributed.Work):
        from aiodist.backends.gloo import work_handle

        return work_handle(x)
    raise TypeError(
        f"{type(x).__name__} is nothing that completes: expected a Request, a Future, a torch Work, a "
        "CUDA event or stream"
    )
