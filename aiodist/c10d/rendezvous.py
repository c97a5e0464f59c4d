"""What torch is told at import: the backend, and how ranks meet that no launcher of torch's started."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from aiodist.env import Environment
from aiodist.errors import ConfigError

_SCHEME = "aiodist"


def register(name: str, create: Callable[..., Any]) -> None:
    """Register the backend, and `init_method="aiodist://"`; once in a process."""
    if name in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    dist.register_rendezvous_handler(_SCHEME, _meet)


def _meet(url: str, timeout: timedelta = timedelta(minutes=1), **_: object) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield the store, rank and size of a rank of a plain mpirun: rank 0 tells over MPI where its store is.

    Where torch's variables are set (torchrun, `aiodist run`), they count.
    """
    environment = Environment.read()
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.variables.keys():
        yield from dist.rendezvous("env://", timeout=timeout)
        return
    rank, size = environment.rank, environment.size
    if not environment.mpi:
        raise ConfigError(f"{url}: no mpirun started this process: expected RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT")
    from aiodist.backends.mpi.transport import World

    World.initialize()
    from mpi4py import MPI

    store = dist.TCPStore(socket.gethostname(), 0, size, True, timeout, False) if rank == 0 else None
    host, port = MPI.COMM_WORLD.bcast(None if store is None else (store.host, store.port))
    yield store or dist.TCPStore(host, port, size, False, timeout), rank, size
