"""torch's default process group in an asyncio program."""

from __future__ import annotations

import asyncio
import socket
from datetime import timedelta

import torch.distributed as dist

from aiodist.communicator import Communicator

_STORE_TIMEOUT = timedelta(minutes=1)


async def wrap(coll: Communicator) -> dist.ProcessGroup:
    """Return torch's default process group over the ranks of `coll`, which goes on beside it; collective.

    The group has a `dup(thread=True)` of its own. `torch.distributed.is_initialized()` is then true, and what torch
    has for process groups (FSDP2, DTensor, samplers, metrics) works in threads: in `asyncio.to_thread`, or on a
    `HostStream`. On the loop's own thread a call that waits raises RuntimeError. `dist.destroy_process_group()` ends
    it, else the end of the communicator does. Raises ValueError where torch has a default group already.
    """
    own = await coll.dup(thread=True)
    store = None
    if coll.rank == 0:
        store = dist.TCPStore(
            socket.gethostname() if coll.nodes > 1 else "127.0.0.1", 0, coll.size, True, _STORE_TIMEOUT, False
        )
    host, port = await coll.broadcast_object(None if store is None else (store.host, store.port))
    if store is None:
        store = await asyncio.to_thread(dist.TCPStore, host, port, coll.size, False, _STORE_TIMEOUT)
    dist.init_process_group("aiodist", store=store, rank=coll.rank, world_size=coll.size, pg_options=own)
    group = dist.group.WORLD
    assert group is not None
    return group
