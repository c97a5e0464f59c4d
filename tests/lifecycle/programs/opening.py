"""Effects of `init` on the process, and its end if other ranks do not come: `opening.py NAME`."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

import aiodist
from aiodist.backends.shm import neighbours
from aiodist.testing.seams.world import Limits, opened
from tests.support.blocking import blocked_until
from tests.support.programs import say
from tests.support.until import until

BEGAN = "mpi4py.MPI" in sys.modules


def resident() -> int:
    """Return this process's memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


async def world() -> None:
    """Open and close a few times; see what stays."""
    environ = dict(os.environ)
    signals_and_all = [threading.excepthook, sys.excepthook, asyncio.get_running_loop().get_exception_handler()]
    for number in range(3):
        async with aiodist.init() as coll:
            assert await coll.allreduce(coll.rank + number) == sum(r + number for r in range(coll.size))
            side = await coll.dup()
            assert await side.allreduce(1) == coll.size
        say("threads:", *threads())
    if "flat" in sys.argv:
        async with aiodist.init() as coll:
            await flat(coll)
    say("environment is as it was:", environ == dict(os.environ))
    hooks = [threading.excepthook, sys.excepthook, asyncio.get_running_loop().get_exception_handler()]
    say("hooks are as they were:", hooks == signals_and_all)
    say("torch.distributed:", torch.distributed.is_available() and torch.distributed.is_initialized())


async def flat(coll: aiodist.Communicator) -> None:
    """10,000 distinct tensors leave nothing behind."""

    async def some(count: int) -> None:
        for i in range(count):
            await coll.allreduce(torch.ones(2000 + i))

    await some(5000)  # as many as the oplog keeps, and some
    gc.collect()
    objects, memory = len(gc.get_objects()), resident()
    for _ in range(10):
        await some(1000)
    gc.collect()
    say("objects:", len(gc.get_objects()) - objects)
    say("memory:", resident() - memory)


async def alone() -> None:
    """No launcher: one rank, and no MPI."""
    async with aiodist.init() as coll:
        say("ranks:", coll.rank, coll.size, coll.backend)
        assert await coll.allreduce(5) == 5
    await world()
    say("MPI:", BEGAN or "mpi4py.MPI" in sys.modules)


async def late() -> None:
    """Rank 1 comes after the opening of rank 0 was cancelled and has ended; then rank 0 opens again."""
    gave_up = Path(os.environ["LIFECYCLE_REPORT"], "gave-up")
    if "1" in (os.environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "AIODIST_RANK")):
        assert await asyncio.to_thread(blocked_until, gave_up.exists, 60)
    else:
        await asyncio.to_thread(int)  # its worker stays
        before = threads()
        opening = asyncio.create_task(enter())
        await until(lambda: threads() != before)
        opening.cancel()
        await asyncio.wait([opening], timeout=20)  # no rank comes before, and the rendezvous has 60 s
        say("cancelled:", opening.cancelled())
        try:
            await enter(Limits(rendezvous=0.5))
        except aiodist.OperationTimeout as error:
            say("late:", error.late, "rank 1 of 2 had not joined" in str(error))
        say("threads are as they were:", threads() == before)
        await asyncio.to_thread(gave_up.touch)
    say("then:", await enter())


async def enter(limits: Limits | None = None) -> int:
    async with opened(limits or Limits()) as coll:
        total: int = await coll.allreduce(1)
        return total


async def unavailable() -> None:
    """Asks for MPI where there is none."""
    try:
        async with aiodist.init(backend="mpi"):
            pass
    except aiodist.BackendUnavailable as error:
        say("unavailable:", error)


async def without_mpi4py() -> None:
    """Asks for MPI where not even mpi4py is installed."""

    class Absent:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == "mpi4py":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Absent())
    await unavailable()
    async with aiodist.init() as coll:
        say("alone all the same:", coll.size)


async def users_mpi() -> None:
    """The user's program uses MPI too, and has initialised it."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    assert comm.allreduce(1) == comm.size
    for _ in range(2):
        async with aiodist.init(backend="mpi") as coll:
            pending = coll.allreduce(torch.ones(1 << 20))
            assert comm.allreduce(comm.rank) == sum(range(comm.size))
            assert (await pending)[0] == coll.size
            t = torch.ones(3)
            request = comm.Iallreduce(MPI.IN_PLACE, t.numpy())
            await aiodist.as_handle(request)
            assert t[0] == comm.size
    say("finalized:", MPI.Is_finalized(), comm.allreduce(1))


async def too_low() -> None:
    """The user has initialised MPI with too low a level."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_FUNNELED)
    try:
        async with aiodist.init(backend="mpi"):
            pass
    except aiodist.BackendError as error:
        say("level:", error)
    MPI.Finalize()


async def twice() -> None:
    """Opens a second world while the first is open."""
    async with aiodist.init() as coll:
        try:
            async with aiodist.init() as inner:
                say("inner:", inner.rank, inner.size, await inner.allreduce(1))
        except aiodist.ConfigError as error:
            say("refused:", error)
        say("outer:", await coll.allreduce(1))
    say("then:", await enter())


async def apart() -> None:
    """Ranks of one host that cannot share memory, where the container of rank 0 refuses it."""

    def refuse(name: str, nbytes: int) -> int:
        raise OSError(1, "refused")

    if os.environ["AIODIST_RANK"] == "0":
        setattr(neighbours, "segment_fd", refuse)  # noqa: B010  - not a public name of the module
    async with aiodist.init() as coll:
        assert await coll.allreduce(coll.rank + 1) == sum(range(coll.size + 1))
        say("over:", coll.backend)
        say("apart:", coll.availability().of("allreduce", "shm").reason)


async def unknown() -> None:
    """Asks for a backend that there is none of."""
    try:
        async with aiodist.init(backend=sys.argv[2] if len(sys.argv) > 2 else None):
            pass
    except aiodist.ConfigError as error:
        say("unknown:", error)


PROGRAMS: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
    program.__name__: program
    for program in (
        world,
        alone,
        late,
        unavailable,
        without_mpi4py,
        users_mpi,
        too_low,
        twice,
        apart,
        unknown,
    )
}

if __name__ == "__main__":
    aiodist.run(PROGRAMS[sys.argv[1]])
