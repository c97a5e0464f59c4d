"""A world that is opened without a block: `kept.py NAME`."""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

import aiodist
from tests.support.blocking import blocked_until
from tests.support.programs import say


async def closed() -> None:
    """Closed and opened again; `aclose` does what the end of a block does."""
    coll = await aiodist.open(timeout=20)
    side = await coll.dup()
    handle = coll.allreduce(torch.ones(1 << 16))
    handle.add_done_callback(lambda h: say("drained:", h.result()[0].item()))
    await coll.aclose()
    for old in (coll, side):
        try:
            old.barrier()
        except aiodist.CommunicatorClosed:
            say("closed:", old.name)
    await coll.aclose()
    again = await aiodist.open()
    say("again:", await again.allreduce(1))
    await again.aclose()


async def forgotten() -> None:
    """The world is never closed."""
    coll = await aiodist.open()
    say("sum:", await coll.allreduce(1))


async def one_forgets() -> None:
    """Rank 0 ends and leaves it open; the other closes its own."""
    coll = await aiodist.open()
    say("sum:", await coll.allreduce(1))
    ended = Path("rank 0 ended")
    if coll.rank:
        assert await asyncio.to_thread(blocked_until, ended.exists)
        await coll.aclose()
        say("closed")
        return

    def later() -> None:
        threading.main_thread().join()
        ended.touch()

    threading.Thread(target=later).start()


async def raised() -> None:
    """The program of one rank fails while it is open."""
    coll = await aiodist.open()
    await coll.barrier()
    if coll.rank == 1:
        raise ValueError("boom")
    try:
        await coll.barrier()
    except aiodist.RemoteError as error:
        say("told:", str(error).splitlines()[0], 'raise ValueError("boom")' in str(error))
        raise


async def left() -> None:
    """One rank calls sys.exit while it is open."""
    coll = await aiodist.open()
    await coll.barrier()
    if coll.rank == 1:
        sys.exit(3)
    await coll.barrier()


def closed_at_exit() -> None:
    """A function that the program registered to run at exit closes the world."""
    loop = asyncio.new_event_loop()
    coll = loop.run_until_complete(aiodist.open())
    atexit.register(lambda: loop.run_until_complete(coll.aclose()))


PROGRAMS: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
    program.__name__: program for program in (closed, forgotten, one_forgets, raised, left)
}

if __name__ == "__main__":
    if sys.argv[1:] == ["closed_at_exit"]:
        closed_at_exit()
        sys.exit()
    start = asyncio.run if sys.argv[2:] == ["asyncio"] else aiodist.run
    start(PROGRAMS[sys.argv[1]]())
