"""L2: a forked child drops the calls that its parent has yet to start, without a warning."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from typing import Any

import torch

import aiodist
from aiodist.testing.seams.progress import transport_lock


async def test_l2_a_forked_child_drops_calls_without_a_warning() -> None:
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with transport_lock:
            held.set()
            free.wait()

    async with aiodist.init() as coll:
        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        handles: list[aiodist.Handle[Any]] = [
            coll.exscan(torch.ones(3)),
            coll.send(torch.ones(1), 0),
            coll.sendrecv(torch.ones(1), 0, 0),
            coll.recv(torch.ones(1), 0),
        ]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            child = os.fork()
            if child == 0:
                os._exit(sum("was never awaited" in str(warning.message) for warning in seen))
        free.set()
        holder.join()
        assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, child, 0))[1]) == 0
        await aiodist.gather(*handles)
