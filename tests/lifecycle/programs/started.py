"""Scripts without asyncio, one function each: `with aiodist.start() as coll:`."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import sys
import threading
import time
from typing import IO

import torch

import aiodist
from aiodist import nn
from aiodist.communicator import parts_of


def say(text: str) -> None:
    """Write a whole line at once, from whichever thread."""
    os.write(1, f"{text}\n".encode())


def calls() -> None:
    """Collectives, messages, objects, gathers, and communicators made of the world."""
    with aiodist.start() as coll:
        r, p = coll.rank, coll.size
        handle = coll.allreduce(torch.full((3,), r + 1.0))
        assert handle.wait().tolist() == [sum(range(1, p + 1))] * 3
        assert handle.result() is handle.wait()
        both = [coll.allreduce(float(r)), coll.allgather(torch.tensor([r]))]
        assert both[1].wait(timeout=30)[p - 1].item() == p - 1
        assert both[0].wait() == sum(range(p))
        sending = coll.send(torch.arange(5.0) + r, (r + 1) % p, tag=3)
        receiving = coll.recv(tag=3)
        assert torch.equal(receiving.wait(), torch.arange(5.0) + (r - 1) % p)
        assert receiving.source == (r - 1) % p
        sending.wait()
        assert coll.broadcast_object({"of": p - 1} if r == p - 1 else None, p - 1).wait() == {"of": p - 1}
        half = coll.split(r % 2).wait()
        assert half.allreduce(1.0).wait() == len(range(r % 2, p, 2))
        again = coll.dup().wait()
        assert again.allreduce(2.0).wait() == 2.0 * p
        assert coll.group(range(p)).wait().allreduce(1.0).wait() == p
        assert coll.hierarchy(str(r)).wait()[1].intra.size == 1
        coll.portal.call(again.aclose)
        say(f"sum: {int(both[0].result())}")
    try:
        coll.allreduce(1.0)
    except aiodist.CommunicatorClosed as error:
        say(f"then: {type(error).__name__}")


def uneven() -> None:
    """The first rank makes a call that the others do not: they close."""
    with aiodist.start() as coll:
        if coll.rank == 0:
            coll.allreduce(1).wait()


def trains() -> None:
    """What is made of coroutines runs by the portal, equal to one process on the joined batch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    with aiodist.start() as coll:
        net: nn.DataParallel = coll.portal.call(nn.DataParallel.create, model, coll)
        x = torch.randn(6, 4)[coll.rank :: coll.size]
        opt = torch.optim.SGD(net.parameters(), lr=0.1)

        async def step() -> float:
            return float(await net.step(lambda: net(x).square().mean(), opt))

        losses = [coll.portal.call(step) for _ in range(3)]
        assert losses[2] < losses[1] < losses[0]
        weights = coll.allgather(model.weight.detach().clone()).wait()
        assert all(torch.equal(weight, weights[0]) for weight in weights)
        coll.portal.call(net.aclose)
    say("trained")


def raised() -> None:
    """An exception of one rank ends the others, which wait in their threads."""
    with aiodist.start() as coll:
        coll.allreduce(1.0).wait()
        if coll.rank == 1:
            raise ValueError("rank 1 has had enough")
        try:
            coll.allreduce(1.0).wait()
        except aiodist.PeerError as error:
            say(f"heard: {type(error).__name__}: {str(error).splitlines()[0]}")
            raise


def interrupted() -> None:
    """Ctrl-C while the main thread waits for a message that never comes."""
    with aiodist.start() as coll:
        coll.barrier().wait()
        if coll.rank == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        say(f"raised: {time.time()}")
        coll.recv(src=1 - coll.rank).wait()


class Released(logging.Handler):
    """Releases a lock once something is logged."""

    def __init__(self, lock: IO[str]) -> None:
        super().__init__()
        self._lock = lock

    def emit(self, record: logging.LogRecord) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)


def late() -> None:
    """Rank 1 computes while the other waits: the report has the line that it is at."""
    with aiodist.start(report_after=0.4) as coll:
        told = open("told", "w")  # noqa: SIM115
        if coll.rank == 0:
            fcntl.flock(told, fcntl.LOCK_EX)
            logging.basicConfig(handlers=[logging.StreamHandler(), Released(told)])
        coll.barrier().wait()
        if coll.rank == 1:
            fcntl.flock(told, fcntl.LOCK_EX)
        coll.barrier().wait()


def threads() -> None:
    """Threads that take turns are served; two at the same time get an error."""
    with aiodist.start() as coll:
        total: list[float] = []

        def one(value: float) -> None:
            total.append(coll.allreduce(value).wait())

        for value in (1.0, 2.0):
            thread = threading.Thread(target=one, args=(value,))
            thread.start()
            thread.join()
        say(f"turns: {total}")
        issuing = parts_of(coll).dispatcher.lifetime.issuing
        assert issuing is not None
        issuing.begin()
        caught: list[str] = []

        def meanwhile() -> None:
            try:
                coll.allreduce(1.0)
            except RuntimeError as error:
                caught.append(str(error))

        thread = threading.Thread(target=meanwhile, name="other")
        thread.start()
        thread.join()
        issuing.end()
        say(f"told: {'MainThread' in caught[0] and 'other' in caught[0]}")


def within_a_loop() -> None:
    """As in a notebook: a loop runs in the thread that starts it."""

    async def cell() -> float:
        with aiodist.start() as coll:
            return coll.allreduce(1.0).wait()

    say(f"cell: {asyncio.run(cell()):g}")


def left_open() -> None:
    """As in a notebook that ends: the block was not left, and Python collects it at exit."""
    globals()["kept"] = block = aiodist.start()
    say(f"sum: {block.__enter__().allreduce(1.0).wait():g}")


def left_open_by_an_error() -> None:
    """The same, where an exception ends one rank."""
    globals()["kept"] = block = aiodist.start()
    coll = block.__enter__()
    coll.barrier().wait()
    if coll.rank == 1:
        raise ValueError("rank 1 has had enough")
    try:
        coll.barrier().wait(timeout=30)
    except aiodist.RemoteError as error:
        say(f"heard: {str(error).splitlines()[0]}")


def no_portal() -> None:
    """A world of `init(thread=True)` has none."""

    async def main() -> None:
        async with aiodist.init(thread=True) as coll:
            try:
                getattr(coll, "portal")  # noqa: B009  - only a ThreadedCommunicator has it
            except RuntimeError as error:
                say(str(error))

    aiodist.run(main)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
