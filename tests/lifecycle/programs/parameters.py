"""A parameter server with one rank that is killed: `parameters.py NAME POLICY`, on three ranks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from torch import Tensor

import aiodist
from aiodist.errors import AiodistError
from aiodist.ps import Asynchronous, Bounded, Embedding, ParameterServer, Policy, Quorum, Synchronous
from tests.support.blocking import rounds
from tests.support.programs import say
from tests.support.until import until

VICTIM = 2
LARGE = 300_000  # of float32: more than is carried in an entry
POLICIES: dict[str, Policy] = {
    "asynchronous": Asynchronous(),
    "bounded": Bounded(2),
    "quorum": Quorum(1, "sum"),
    "synchronous": Synchronous("sum"),
}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def threads() -> list[str]:
    """Return the threads that a parameter server has begun."""
    return [thread.name for thread in threading.enumerate() if "-ps-" in thread.name]


def mixed(t: Tensor) -> bool:
    """Look for two versions in one part of a tensor: what the dead had pushed may have come to one server only."""
    parts = t.chunk(2) if t.numel() == LARGE else (t,)
    return any(bool((part != part[0]).any()) for part in parts)


async def worker(policy: Policy) -> None:
    """Rank 2, a worker, is killed with pushes in flight; the others push 30 times more each."""
    async with asyncio.timeout(30), aiodist.init() as coll:
        w = {"small": torch.zeros(5), "large": coll.arena_empty(LARGE).zero_(), "private": torch.zeros(LARGE)}
        async with ParameterServer(coll, w, consistency=policy, servers=[0, 1], workers=[0, 1, 2]) as ps:
            values = {name: torch.ones_like(t) for name, t in w.items()}
            values["large"] = coll.arena_empty(LARGE).fill_(1)
            for _ in range(3):
                await ps.push_pull(list(w), list(values.values()))
            if coll.rank == VICTIM:
                for _ in range(20):
                    ps.push(list(w), list(values.values()))
                kill()
            steps = 0
            for _ in range(30):
                await ps.push(list(w), list(values.values()))
                assert not any(mixed(t) for t in await ps.pull())
                steps += 1
            say("steps:", steps)
            await ps.sync()
            await ps.barrier()
            await ps.pull()
            expected = 9 + 2 * 30  # and the pushes of the dead rank that arrived
            say("nothing lost:", all(expected <= int(t[0]) <= expected + 20 for t in w.values()))
            only = ps.statistics().dropped <= 20 * len(w)  # what comes after its death was noticed
        del w, values
        gc.collect()
        await until(lambda: not threads())
        say("left:", sorted(threads()), "only the dead's dropped:", only)


async def uneven(policy: Policy) -> None:
    """Rank 2 is killed where the others come to their end, with unlike numbers of pushes of two tensors."""
    async with asyncio.timeout(30), aiodist.init() as coll:
        names = ["a", "b"]
        w = {name: torch.zeros(LARGE) for name in names}
        async with ParameterServer(coll, w, consistency=policy, servers=[0, 1], workers=[0, 1, 2]) as ps:
            for name, count in zip(names, [(7, 1), (1, 7), (3, 3)][coll.rank], strict=True):
                for _ in range(count):
                    ps.push(name, torch.ones(LARGE)).add_done_callback(lambda done: done.exception())
            if coll.rank == VICTIM:
                await rounds()
                kill()
            await ps.sync()
            await ps.barrier()
            say("nothing lost:", all(8 <= int(t[0]) <= 11 for t in await ps.pull(names)))


async def server(policy: Policy) -> None:
    """Rank 2, which serves too, is killed while the others work: its parameters are lost, the others still work."""
    async with asyncio.timeout(40), aiodist.init() as coll:
        order = [int(rank) for rank in sys.argv[3]]
        async with ParameterServer(coll, consistency=policy, servers=order, workers=[0, 1], timeout=20.0) as ps:
            names = [f"w{i}" for i in range(24)]
            if ps.is_worker:
                await ps.init([*names, "cut"], [torch.zeros(4) for _ in names] + [torch.zeros(LARGE)])
                for _ in range(3):
                    await ps.push([*names, "cut"], [torch.ones(4) for _ in names] + [torch.ones(LARGE)])
                await ps.barrier()
                if coll.rank == 0:
                    await coll.send(torch.zeros(1), VICTIM)
            if coll.rank == VICTIM:
                await coll.recv(src=0)
                kill()
            pending: list[aiodist.Handle[Any]] = []
            cut = torch.ones(LARGE)
            while not (lost := [handle for handle in pending if handle.done() and handle.exception() is not None]):
                pending += [ps.push(name, torch.ones(4)) for name in names]
                pending += [ps.pull("cut", torch.empty(LARGE)), ps.push("cut", cut), ps.sync()]
                await rounds()
            say("heard:", named(lost[0].exception()))
            over = [await outcome(handle) for handle in pending]
            say("all over:", len(over) == len(pending))
            say("ends:", sorted(set(over)))
            later = {name: await outcome(ps.push(name, torch.ones(4))) for name in names}
            say("later:", sorted(set(later.values())))
            reads = {name: await outcome(ps.pull(name)) for name in names}
            say("the same are lost:", reads == later)
            say("cut:", await outcome(ps.pull("cut")), await outcome(ps.push("cut", torch.ones(LARGE))))
            say("sync:", await outcome(ps.sync()))
            say("barrier:", await outcome(ps.barrier()))
            say("init:", await outcome(ps.init("another", torch.zeros(LARGE))))
        await until(lambda: not threads())
        say("left:", threads())


async def tables(policy: Policy) -> None:
    """Rank 2, which serves, is killed while the others push and pull rows, and wait for the rows of a layer."""
    async with asyncio.timeout(40), aiodist.init() as coll:
        async with ParameterServer(coll, consistency=policy, servers=[0, 2], workers=[0, 1], timeout=20.0) as ps:
            if ps.is_worker:
                table = await ps.embedding("words", 8, init=0.0)
                layer = Embedding(table)
                ids = torch.arange(0, 1 << 40, 1 << 26)  # 128 KiB of ids, half of them on each server
                await table.push(ids, torch.ones(ids.numel(), 8))
                await ps.barrier()
                if coll.rank == 0:
                    await coll.send(torch.zeros(1), VICTIM)
            if coll.rank == VICTIM:
                await coll.recv(src=0)
                kill()
            pending: list[aiodist.Handle[Any]] = []
            while not (lost := [handle for handle in pending if handle.done() and handle.exception() is not None]):
                pending += [table.pull(ids), table.push(ids, torch.ones(ids.numel(), 8)), table.pull(ids[:3])]
                await rounds()
            say("heard:", named(lost[0].exception()))
            say("ends:", sorted({await outcome(handle) for handle in pending} - {"done"}))
            say("later:", await outcome(table.pull(ids)), await outcome(table.push(ids, torch.ones(ids.numel(), 8))))
            try:
                await asyncio.to_thread(layer, ids[:3])
            except AiodistError as error:
                say("layer:", named(error))
            synced = await outcome(ps.sync())  # of pushes that were accepted for a step it raises what became of them
            say("sync ends:", synced in ("done", "PeerLost"))
        await until(lambda: not threads())
        say("left:", threads())


async def outcome(handle: aiodist.Handle[Any]) -> str:
    try:
        await asyncio.wait_for(handle, 10)
    except TimeoutError:
        return "late"
    except (AiodistError, KeyError) as error:
        return named(error)
    return "done"


def named(error: BaseException | None) -> str:
    text = "" if f"server {VICTIM} " in str(error) else f": {error}"
    return f"{type(error).__name__}{text}"


async def raised(policy: Policy) -> None:
    """The body of rank 2 raises while the others push."""
    async with asyncio.timeout(30), aiodist.init() as coll:
        w = [torch.zeros(5), torch.zeros(LARGE)]
        async with ParameterServer(coll, w, consistency=policy) as ps:
            for i in range(1000):
                await ps.push(["0", "1"], [torch.ones(5), torch.ones(LARGE)])
                if i == 5 and coll.rank == VICTIM:
                    raise ValueError("the body of rank 2")


PROGRAMS: dict[str, Callable[[Policy], Coroutine[Any, Any, None]]] = {
    program.__name__: program for program in (worker, uneven, server, tables, raised)
}

if __name__ == "__main__":
    try:
        aiodist.run(PROGRAMS[sys.argv[1]], POLICIES[sys.argv[2]])
    except AiodistError as error:
        say("told:", type(error).__name__, "the body of rank 2" in str(error))
        say("still there:", threads())
        raise SystemExit(1) from None
