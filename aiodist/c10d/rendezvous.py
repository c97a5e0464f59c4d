"""What torch is told at import: the backend, and how ranks meet that no launcher of torch's started."""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from aiodist.control import connect
from aiodist.env import Environment

Met = tuple[dist.Store, int, int]
_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_LONGEST = timedelta(minutes=5)


def register(name: str, create: Callable[..., Any]) -> None:
    """Register the backend, and what `env://` means where torch's variables are not set; once in a process."""
    if name in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    of_torch = handlers["env"]

    def meet(url: str, timeout: timedelta = _LONGEST, **options: object) -> Iterator[Met]:
        """Yield the store, rank and size: by torch's variables, else by `aiodist run`, or by a plain mpirun."""
        environment = Environment.read()
        started = environment.mpi or environment.rendezvous is not None
        if "rank=" in url or environment.variables.keys() >= _VARIABLES or not started:
            yield from of_torch(url, timeout=timeout, **options)
        else:
            yield _met(environment, timeout)

    handlers["env"] = meet


def _met(environment: Environment, timeout: timedelta) -> Met:
    """Have rank 0 open a store, and tell the others where it is."""
    rank, size = environment.rank, environment.size
    store = None
    if rank == 0:
        name = socket.gethostname() if environment.mpi else "127.0.0.1"
        store = dist.TCPStore(name, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    told = None if store is None else f"{store.host} {store.port}"
    if environment.rendezvous is None:
        said = _over_mpi(told)
    else:
        said = asyncio.run(_over_channel(environment, told, timeout.total_seconds()))
    host, port = said.split()
    return store or dist.TCPStore(host, int(port), size, is_master=False, timeout=timeout), rank, size


def _over_mpi(told: str | None) -> str:
    from aiodist.backends.mpi.transport import World

    World.initialize()
    from mpi4py import MPI

    said: str = MPI.COMM_WORLD.bcast(told)
    return said


async def _over_channel(environment: Environment, told: str | None, seconds: float) -> str:
    assert environment.rendezvous is not None
    channel = await connect(
        environment.rendezvous,
        rank=environment.rank,
        size=environment.size,
        token=environment.token,
        timeout=seconds,
        environ=environment.variables,
    )
    if told is not None:
        await channel.set("c10d/store", told.encode())
    said: bytes = await channel.get("c10d/store")
    await channel.aclose()
    return said.decode()
