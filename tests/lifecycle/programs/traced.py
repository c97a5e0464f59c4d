"""Programs for tests of `aiodist run --trace` and `--stragglers`: `traced.py NAME`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import aiodist
from aiodist.nn import DataParallel
from aiodist.testing.seams.progress import reducer_of
from tests.support.blocking import blocked_until
from tests.support.programs import say
from tests.support.until import until


def held(net: DataParallel, _layer: nn.Module, _inputs: object, out: torch.Tensor) -> None:
    """Hold backward at this layer's output until two buckets of the pass are reduced.

    The first passes are not held: the first one learns the order of the gradients and reduces at its end.
    """

    def stay(_: torch.Tensor) -> None:
        last = reducer_of(net).last
        blocked_until(lambda: last is None or len(last.times.spans) >= 2)

    if net.statistics().passes >= 2:
        out.register_hook(stay)


async def trained() -> None:
    """Steps whose backward continues only after two reductions, from the third step on."""
    async with aiodist.init() as coll:
        torch.manual_seed(coll.rank)
        layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())]
        net = await DataParallel.create(nn.Sequential(*layers), coll, bucket_bytes=1 << 18, first_bucket_bytes=1 << 18)
        layers[1].register_forward_hook(partial(held, net))
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        async with aiodist.data.prefetch([torch.randn(512, 256)] * 6) as batches:
            async for x in batches:
                with aiodist.span("step"):
                    await net.step(lambda x=x: net(x).square().mean(), opt)
        await net.aclose()


async def killed() -> None:
    """Rank 1 is killed in the midst of it."""
    async with aiodist.init() as coll:
        for _ in range(3):
            await coll.allreduce(torch.ones(100))
        written = Path(os.environ["AIODIST_TRACE"], f"rank-{coll.rank}.jsonl")
        await until(lambda: written.read_text().count('"allreduce"') == 3)
        if coll.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await coll.allreduce(torch.ones(100))


async def raised() -> None:
    """Rank 1 raises, once rank 0 waits for it."""
    async with aiodist.init() as coll:
        await coll.allreduce(torch.ones(100))
        with aiodist.span("last"):
            if coll.rank == 1:
                await coll.recv(torch.empty(1), 0)
                raise ValueError("boom")
            last = coll.allreduce(torch.ones(100))
            if coll.rank == 0:
                await coll.send(torch.ones(1), 1)
            await last


async def late() -> None:
    """Rank 1 comes 200 ms late now and then; all other waits are short."""
    async with aiodist.init() as coll:
        for i in range(200):
            if coll.rank == 1 and i % 20 == 19:
                time.sleep(0.2)  # noqa: ASYNC251  # a promise of seconds: W5
            await coll.allreduce(torch.ones(2))
            await coll.barrier()


async def late_in_turn() -> None:
    """Each rank comes late equally often."""
    async with aiodist.init() as coll:
        for i in range(4 * coll.size):
            if coll.rank == i % coll.size:
                time.sleep(0.05)  # noqa: ASYNC251  # a promise of seconds: W5
            await coll.allreduce(torch.ones(2))


def _compared(coll: aiodist.Communicator) -> int:
    waited = coll.statistics().waited
    return 0 if waited is None else waited.compared


async def asked() -> None:
    """Every rank knows it, by the keyword of `init`."""
    async with aiodist.init(stragglers=True) as coll:
        side = await coll.dup()
        late = {"allreduce": 0.0, "broadcast": 0.0}
        for i in range(5):
            kind = "allreduce" if i % 2 else "broadcast"
            began = time.perf_counter()
            if side.rank == 1:
                time.sleep(0.2)  # noqa: ASYNC251  # a promise of seconds: W5
            late[kind] += time.perf_counter() - began
            await (side.allreduce(torch.ones(2)) if i % 2 else side.broadcast(torch.ones(3)))
        async with asyncio.timeout(20):
            while not await coll.allreduce(int(_compared(side) >= 5), "min"):
                pass
        waited = side.statistics().waited
        assert waited is not None
        _, late = await coll.allgather_object(late)
        seconds = {kind: seconds[1] for kind, seconds in waited.by_operation.items() if seconds[1] > 0.1}
        say("waited:", waited.cause, waited.compared, *[f"{k} {s} {late[k]}" for k, s in sorted(seconds.items())])


PROGRAMS = {program.__name__: program for program in (trained, killed, raised, late, late_in_turn, asked)}

if __name__ == "__main__":
    aiodist.run(PROGRAMS[sys.argv[1]])
