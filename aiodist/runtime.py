"""`init` and `run`: opens what is below in order, and closes it in reverse, also when things go wrong."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from aiodist.backends.base import Transport
from aiodist.backends.local import LocalHub, LocalTransport
from aiodist.collectives.metadata import as_bytes, as_tensor
from aiodist.collectives.operations import broadcast_bytes
from aiodist.collectives.primitives import Primitives
from aiodist.collectives.program import Endpoint, run as run_program
from aiodist.communicator import Communicator
from aiodist.control import Channel, connect, host, in_process
from aiodist.env import Environment
from aiodist.errors import CommunicatorAborted, ConfigError
from aiodist.family import Family
from aiodist.handles import Handle, Progress, from_future
from aiodist.isolation import isolate
from aiodist.topology import Topology

if TYPE_CHECKING:
    from aiodist.backends.mpi import MpiTransport

__all__ = ["BACKENDS", "Place", "as_handle", "current_place", "init", "isolate", "run"]

T = TypeVar("T")

BACKENDS = ("mpi", "gloo", "local")
_RENDEZVOUS_SECONDS = 60.0
_GONE_SECONDS = 4.0  # a rank whose body raised is gone by then, whatever its other threads do


@dataclass(frozen=True)
class Place:
    """Where a rank that shares its process with others finds itself."""

    transport: Transport
    channel: Channel
    checked: bool


current_place: ContextVar[Place | None] = ContextVar("aiodist_place", default=None)
"""Set around each rank by `aiodist.testing.run_ranks`; None in a process of its own."""


@asynccontextmanager
async def init(
    *, backend: str | None = None, checked: bool | None = None, timeout: float | None = None
) -> AsyncIterator[Communicator]:
    """Open the world: a `Communicator` over all ranks of the job; every rank must enter.

    The place in the job comes from `aiodist run`, an MPI launcher, torchrun or Slurm; without any, this is the only
    rank and no library is needed. `backend` is "mpi", "gloo" or "local", chosen to fit where None. `checked`
    compares each operation on all ranks before the data moves (AIODIST_CHECKED=1 where None). `timeout` is the
    default of every operation, in seconds.

    Leaving the block closes the world on all ranks, once what is in flight is over (30 s at most). When the block
    raises, nothing is waited for: the other ranks are told, their operations raise, and this process is gone within
    five seconds. Raises `ConfigError`, `BackendUnavailable`, or `OperationTimeout` naming the ranks that never came.
    Nothing global is set; it can be opened again after it was closed.
    """
    place = current_place.get()
    environment = Environment.read()
    if place is None:
        transport, channel = await _open(environment, _backend(backend, environment))
        own_checked = environment.checked
    else:
        transport, channel, own_checked = place.transport, place.channel, place.checked
    family = Family(channel, Communicator, checked=own_checked if checked is None else checked, timeout=timeout)
    try:
        world = family.world(transport, await _topology(channel))
        _limit_spinning(world)
        yield world
        await world.aclose()
    except BaseException as error:
        code = _exit_code(error)
        channel.fail(_cause(error), "".join(traceback.format_exception(error)), code)
        await family.abandon(CommunicatorAborted(f"this rank failed: {_cause(error)}"))
        if place is None and transport.size > 1:
            _leave_soon(code)
        raise
    finally:
        await channel.aclose()


def _backend(asked: str | None, environment: Environment) -> str:
    name = asked or environment.backend
    if name is None:
        name = "mpi" if environment.mpi else "local" if environment.size == 1 else "gloo"
    if name not in BACKENDS:
        raise ConfigError(f"backend {name!r} is unknown: expected one of {', '.join(BACKENDS)}")
    if name == "local" and environment.size > 1:
        raise ConfigError(f"backend 'local' has one process: this is one of {environment.size}; use mpi or gloo")
    return name


async def _open(environment: Environment, backend: str) -> tuple[Transport, Channel]:
    """Return this rank's transport over all ranks, and its control channel."""
    if backend == "local":
        return LocalTransport(LocalHub(), 0, 1), in_process(1)[0]
    if backend == "mpi" or environment.rendezvous is None:
        from aiodist.backends.mpi import open_world

        world = await open_world()
        channel = await _connect(environment, world)
        if backend == "mpi":
            return world, channel
    else:
        channel = await _connect(environment, None)
    from aiodist.backends.gloo import open_world as open_gloo

    return await open_gloo(channel), channel


async def _connect(environment: Environment, mpi: MpiTransport | None) -> Channel:
    rank, size = (environment.rank, environment.size) if mpi is None else (mpi.rank, mpi.size)
    if size == 1:
        return in_process(1)[0]
    if environment.rendezvous is not None:
        return await connect(
            environment.rendezvous,
            rank=rank,
            size=size,
            token=environment.token,
            timeout=_RENDEZVOUS_SECONDS,
            environ=environment.variables,
        )
    if mpi is None:
        raise ConfigError(f"{size} ranks and no rendezvous: start them with aiodist run, torchrun or mpirun")
    return await _meet_over_mpi(environment, mpi)


async def _meet_over_mpi(environment: Environment, mpi: MpiTransport) -> Channel:
    """Plain mpirun: rank 0 runs the hub and tells the others over MPI where it is."""
    hub = None
    told = None
    if mpi.rank == 0:
        token = secrets.token_hex(16)
        one_host = environment.local_size == mpi.size
        hub = await host(mpi.size, host="127.0.0.1" if one_host else socket.gethostname(), token=token)
        told = as_tensor(f"{hub.address} {token}".encode())
    progress = Progress.current()
    handle: Handle[torch.Tensor] = Handle(progress, "rendezvous")

    def finish(result: torch.Tensor | None, error: BaseException | None) -> None:
        if result is not None:
            handle.resolve(result)
        elif error is not None:
            handle.reject(error)

    program = broadcast_bytes(Primitives(Endpoint(mpi, 0), "auto"), told, 0)
    progress.start(partial(run_program, program, finish))
    address, token = as_bytes(await handle).decode().split()
    return await connect(
        address, rank=mpi.rank, size=mpi.size, token=token, timeout=_RENDEZVOUS_SECONDS, hub=hub
    )


async def _topology(channel: Channel) -> Topology:
    """Have the ranks tell one another which host they are on."""
    if channel.size == 1:
        return Topology((socket.gethostname(),), 0)
    await channel.set(f"host/{channel.rank}", socket.gethostname().encode())
    names = [(await channel.get(f"host/{rank}", timeout=_RENDEZVOUS_SECONDS)).decode() for rank in range(channel.size)]
    return Topology(tuple(names), channel.rank)


def _limit_spinning(world: Communicator) -> None:
    """A rank that spins where another waits for the core only keeps it waiting."""
    if world.local_size > len(os.sched_getaffinity(0)):
        Progress.current().spin_seconds = 0.0


def _exit_code(error: BaseException) -> int:
    """Return the exit code that Python will give this process for `error`."""
    if isinstance(error, BaseExceptionGroup):
        exits = error.subgroup((SystemExit, KeyboardInterrupt))
        return 1 if exits is None else _exit_code(exits.exceptions[0])
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    return 130 if isinstance(error, (KeyboardInterrupt, asyncio.CancelledError)) else 1


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _leave_soon(code: int) -> None:
    """Other threads, in native code or of the user's, may keep the interpreter from ending: do not wait for them."""

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    timer = threading.Timer(_GONE_SECONDS, leave)
    timer.daemon = True
    timer.start()


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

    `x` is an mpi4py Request, a `concurrent.futures.Future`, a torch Work, or a handle already. Raises TypeError for
    anything else: coroutines and asyncio futures are awaited as they are.
    """
    if isinstance(x, Handle):
        return x
    if isinstance(x, concurrent.futures.Future):
        return from_future(x)
    if "mpi4py.MPI" in sys.modules and isinstance(x, sys.modules["mpi4py.MPI"].Request):
        from aiodist.backends.mpi import request_handle

        return request_handle(x)
    if torch.distributed.is_available() and isinstance(x, torch.distributed.Work):
        from aiodist.backends.gloo import work_handle

        return work_handle(x)
    raise TypeError(f"{type(x).__name__} is nothing that completes: expected a Request, a Future or a torch Work")
