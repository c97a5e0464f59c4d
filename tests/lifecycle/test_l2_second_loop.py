"""L2: a second event loop of a thread issues nothing: every call raises, alike on all ranks, and counts nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import aiodist
from aiodist import Communicator
from aiodist.data import IndexShards, ShardQueue
from aiodist.nn import DataParallel, LocalSGD, assert_synchronized, synchronize_parameters
from aiodist.ps import ParameterServer
from tests.support.calls import CALLS, another_loop, drawn, error_of

_TEXT = "belongs to another thread or event loop: call it on the loop it was opened on"

Doors = dict[str, Callable[[], Any]]


def doors_of(coll: Communicator, kind: str, size: int, named: bool) -> Doors:
    """Return every call of a communicator, and those whose way depends on what they are given."""
    t = torch.ones(size)
    more: dict[str, Any] = {"name": "by name"} if named else {}
    calls: Doors = {f"{kind}.{name}": partial(call, coll) for name, call in CALLS.items()}
    calls |= {
        f"{kind}.allreduce of {size}": lambda: coll.allreduce(t, **more),
        f"{kind}.allreduce out": lambda: coll.allreduce(t, out=torch.ones(size), **more),
        f"{kind}.allreduce of a list": lambda: coll.allreduce([t, torch.ones(3)], **more),
        f"{kind}.allreduce of a number": lambda: coll.allreduce(1, **more),
        f"{kind}.broadcast of {size}": lambda: coll.broadcast(t, **more),
        f"{kind}.allgather of {size}": lambda: coll.allgather(t, **more),
        f"{kind}.send of {size}": lambda: coll.send(t, coll.rank),
        f"{kind}.recv of a list": lambda: coll.recv([t]),
        f"{kind}.barrier": lambda: coll.barrier(**more),
        f"{kind}.messages": lambda: coll.messages(),
        f"{kind}.selector": lambda: coll.selector.set_limit("large_bytes", 1 << 22),
        f"{kind}.aclose": lambda: coll.aclose(),
    }
    return calls


async def _others(coll: Communicator, stack: AsyncExitStack, folder: Path) -> Doors:
    """Return the calls of the objects that use a communicator."""
    module = nn.Linear(3, 1)
    net = await DataParallel.create(nn.Linear(3, 1), coll)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    ps = await stack.enter_async_context(ParameterServer(coll, {"w": torch.zeros(3)}))
    table = await ps.embedding("rows", 3)
    queue = ShardQueue(IndexShards(10, 2), coll)
    levels = await coll.hierarchy("a")
    ids, x = torch.tensor([1]), torch.ones(2, 3)
    local = await LocalSGD.create(net, opt, every=2)
    second = ParameterServer(coll, {"w": torch.zeros(3)})
    stack.push_async_callback(coll.barrier)
    stack.push_async_callback(net.aclose)
    stack.push_async_callback(queue.aclose)
    return {
        "hierarchy.below": lambda: levels.below("b"),
        "hierarchy.span": lambda: levels.span(),
        "create": lambda: DataParallel.create(module, coll),
        "net.step": lambda: net.step(lambda: net(x).sum(), opt),
        "net.submit": lambda: net.submit(int),
        "net.backward": lambda: net.backward(net(x).sum()),
        "net.backward_iter": lambda: net.backward_iter(net(x).sum()),
        "net.join": lambda: net.join().__aenter__(),
        "net.synchronize_buffers": lambda: net.synchronize_buffers(),
        "net.rebind": lambda: net.rebind(coll),
        "net.aclose": lambda: net.aclose(),
        "LocalSGD.flush": lambda: local.flush(),
        "synchronize_parameters": lambda: synchronize_parameters(module, coll),
        "assert_synchronized": lambda: assert_synchronized(module, coll),
        "save": lambda: aiodist.save(folder, net, opt),
        "load": lambda: aiodist.load(folder, net, opt),
        "save of a module": lambda: aiodist.save(folder, module, coll=coll),
        "ps.enter": lambda: second.__aenter__(),
        "ps.init": lambda: ps.init("new", torch.zeros(2)),
        "ps.embedding": lambda: ps.embedding("new", 2),
        "ps.push": lambda: ps.push("w", x[0]),
        "ps.pull": lambda: ps.pull("w"),
        "ps.push_pull": lambda: ps.push_pull("w", x[0]),
        "ps.prefetch": lambda: ps.prefetch("w"),
        "ps.integrate": lambda: ps.integrate(lambda a, b: None, "w"),
        "ps.configure": lambda: ps.configure("w", lr=0.1),
        "ps.sync": lambda: ps.sync(),
        "ps.barrier": lambda: ps.barrier(),
        "ps.save": lambda: ps.save(folder),
        "ps.load": lambda: ps.load(folder),
        "ps.free": lambda: ps.free("w"),
        "ps.pushing": lambda: ps.pushing("w"),
        "ps.rebind": lambda: ps.rebind(coll),
        "ps.exit": lambda: ps.__aexit__(None, None, None),
        "table.pull": lambda: table.pull(ids),
        "table.push": lambda: table.push(ids, x[:1]),
        "queue": lambda: ShardQueue(IndexShards(10, 2), coll),
        "queue.pass": lambda: queue.counted_pass(),
        "queue.iterate": lambda: aiter(queue),
        "queue.set_epoch": lambda: queue.set_epoch(1),
        "queue.load": lambda: queue.load_state_dicts([queue.state_dict()]),
        "queue.agree": lambda: queue.agree(0),
        "queue.rebind": lambda: queue.rebind(coll),
        "queue.aclose": lambda: queue.aclose(),
    }


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2)
@pytest.mark.ranks(2, backend=("openmpi", "mpich", "gloo", "shm"))
async def test_l2_no_call_on_another_loop_of_the_thread_is_issued(coll: Communicator, tmp_path: Path) -> None:
    threaded = await coll.dup(thread=True)
    for each in (coll, threaded):
        for size in (1, 1 << 20):  # each way has a plan
            await each.allreduce(torch.ones(size))
    async with AsyncExitStack() as stack:
        others = await _others(coll, stack, tmp_path)
        every = sorted(doors_of(coll, "coll", 1, False) | doors_of(threaded, "thread", 1, False) | others)
        examples = st.tuples(st.sampled_from(every), st.sampled_from([0, 1, 5000, 1 << 20]), st.booleans())
        for name, numel, named in [*((each, 1, False) for each in every), *drawn(examples, 40)]:
            doors = doors_of(coll, "coll", numel, named) | doors_of(threaded, "thread", numel, named) | others
            if name not in doors:
                continue
            before = (coll.seq, threaded.seq, coll.statistics(), threaded.statistics())
            with another_loop():
                error = error_of(doors[name])
            assert isinstance(error, RuntimeError), (name, error)
            assert _TEXT in str(error), (name, error)
            assert (coll.seq, threaded.seq, coll.statistics(), threaded.statistics()) == before, name
        for each in (coll, threaded):  # all are in step
            assert await each.allreduce(1, timeout=20) == coll.size
            assert await each.allreduce(1, name="named", timeout=20) == coll.size
        assert await aiodist.gather(coll.sendrecv(torch.ones(1), coll.rank, coll.rank), coll.barrier()) == [1, None]


@pytest.mark.ranks(2, backend=("openmpi", "shm"))
async def test_l2_a_second_loop_of_another_thread_issues_on_what_is_made_for_it(coll: Communicator) -> None:
    ours = await coll.dup(thread=True)

    async def elsewhere() -> int:
        await asyncio.sleep(0)
        return ours.allreduce(1).wait(20)

    assert await asyncio.to_thread(asyncio.run, elsewhere()) == coll.size


def test_l2_a_loop_that_runs_again_issues_on() -> None:
    """The same loop, run by hand between the runs of another one."""
    with asyncio.Runner() as first, asyncio.Runner() as second:
        coll = first.run(aiodist.open())

        async def call() -> Any:
            return await coll.allreduce(torch.ones(1))

        async def refused() -> Exception | None:
            return error_of(lambda: coll.allreduce(torch.ones(1)))

        for _ in range(3):
            assert first.run(call()).item() == 1
            assert _TEXT in str(second.run(refused()))
        assert _TEXT in str(second.run(_closing(coll)))
        first.run(coll.aclose())


async def _closing(coll: Communicator) -> Exception | None:
    return error_of(coll.aclose)
