"""The cost of watching, on and off in turn in one job: `aiodist run -n 2 -m benchmarks.watch`; medians, and ratios."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import perf_counter

import torch

import aiodist
from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.watchdog import Watch
from aiodist.handles import Progress
from aiodist.nn import DataParallel
from aiodist.watch.arrivals import ArrivalTimes
from benchmarks import models
from benchmarks.training import Setting

_TURNS = 8
_SECONDS = 1.0


async def timed(call: Callable[[], Awaitable[object]], count: int, seconds: float, coll: Communicator) -> list[float]:
    """Return the seconds of `call` in each of many rows of `count` calls, the same number on all ranks."""
    taken = []
    until = perf_counter() + seconds
    while await coll.allreduce(int(perf_counter() < until), "min"):
        began = perf_counter()
        for _ in range(count):
            await call()
        taken.append((perf_counter() - began) / count)
    return taken


async def compare(
    what: str,
    call: Callable[[], Awaitable[object]],
    count: int,
    watched: Callable[[], AbstractAsyncContextManager[None]],
    coll: Communicator,
) -> None:
    """Print the median and the fastest tenth, with and without `watched`, in turn."""
    found: dict[bool, list[float]] = {False: [], True: []}
    await timed(call, count, _SECONDS, coll)
    for turn in range(2 * _TURNS):
        if turn % 4 in (1, 2):
            async with watched():
                found[True] += await timed(call, count, _SECONDS, coll)
        else:
            found[False] += await timed(call, count, _SECONDS, coll)
    for share, place in (("median", 4), ("quickest tenth", 0)):  # others at work disturb the second less
        off, on = (statistics.quantiles(found[which], n=10)[place] * 1e6 for which in (False, True))
        if coll.rank == 0:
            print(f"{what}, {share}: {off:.3f} us, watched {on:.3f} us: {on / off:.3f}")  # noqa: T201


@asynccontextmanager
async def _looked(watch: Watch) -> AsyncIterator[None]:
    """Let the rank check its pending operations in the block, as usual; see `_blind`."""
    vars(watch).pop("keep_watch")
    watch.watching = False
    yield
    _blind(watch)


def _blind(watch: Watch) -> None:
    """Stop the rank's checks of pending operations in the block."""
    vars(watch)["keep_watch"] = lambda: setattr(watch, "watching", True)


@asynccontextmanager
async def _noted(coll: Communicator) -> AsyncIterator[None]:
    arrivals = ArrivalTimes(coll)
    yield
    await arrivals.finish()
    arrivals.close()


async def main() -> None:
    """Measure an awaited small allreduce with arrival times, and a training step with a trace."""
    async with aiodist.init() as coll:
        t = torch.zeros(1)
        watch = Watch.of(Progress.current(), parts_of(coll).registry.channel)
        _blind(watch)
        looked = lambda: _looked(watch)  # noqa: E731
        await compare("nothing switched on, an awaited allreduce of 4 B", lambda: coll.allreduce(t), 1000, looked, coll)
        vars(watch).pop("keep_watch")
        watch.watching = False
        noted = lambda: _noted(coll)  # noqa: E731
        await compare("stragglers, an awaited allreduce of 4 B", lambda: coll.allreduce(t), 1000, noted, coll)
        setting = Setting.make("mlp", 32, coll)
        net = await DataParallel.create(models.build("mlp"), coll)
        opt = torch.optim.SGD(net.parameters(), lr=1e-6)
        with tempfile.TemporaryDirectory() as mine:
            folder = await coll.broadcast_object(mine)
            traced = lambda: aiodist.trace(coll, folder)  # noqa: E731
            step = lambda: net.step(lambda: setting.loss(net), opt)  # noqa: E731
            await compare("trace, a step of the mlp", step, 5, traced, coll)
            await coll.barrier()
        await net.aclose()


if __name__ == "__main__":
    aiodist.run(main)
