"""The transport of a communicator after one of three ranks is killed: `survivors.py NAME`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import aiodist
from aiodist.communicator import parts_of
from aiodist.errors import BackendError
from aiodist.handles import Progress
from aiodist.testing.seams.transport import Done, Transport
from aiodist.types import ANY
from tests.support.programs import say
from tests.support.until import until

DEAD = 2
SHORT, LONG = 16, 1 << 20  # of float32
SECONDS = 10.0
REQUEST, REPLY, LAST, ANNOUNCED = range(1, 5)


class Mail:
    """Sends and receives over the transport itself."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self._transport = transport
        self._progress = Progress.current()

    def send(self, value: float, dst: int, tag: int, numel: int = SHORT) -> asyncio.Future[float]:
        t = torch.full((numel,), float(value))
        return self._start(partial(self._transport.isend, t, dst, tag), t)

    def receive(self, src: int, tag: int, numel: int = SHORT) -> asyncio.Future[float]:
        t = torch.zeros(numel)
        return self._start(partial(self._transport.irecv, t, src, tag), t)

    def _start(self, call: Callable[[Done], None], t: Tensor) -> asyncio.Future[float]:
        """Return a future of the last element."""
        over: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        def settle(error: BaseException | None) -> None:
            assert not over.done(), "done was called twice"
            if error is None:
                over.set_result(t[-1].item())
            else:
                over.set_exception(error)

        self._progress.start(lambda: call(lambda error: self._progress.post(lambda: settle(error))))
        return over


async def outcome(over: asyncio.Future[float]) -> str:
    """Return the outcome, in words; raise TimeoutError if the operation hangs."""
    try:
        return f"{await asyncio.wait_for(over, SECONDS):g}"
    except BackendError as error:
        return f"fails, names rank {DEAD}: {f'rank {DEAD} ' in str(error)}"


@asynccontextmanager
async def three() -> AsyncIterator[Mail]:
    """Open the world and a duplicate of it, over whose transport things go."""
    async with aiodist.init() as world:
        yield Mail(parts_of(await world.dup()).transport)
        await until(lambda: parts_of(world).dispatcher.lifetime.refusal is not None)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def goes_on() -> None:
    """Rank 2 is killed while the others have receives posted, and sends to it in flight."""
    async with three() as mail:
        anyone = mail.receive(ANY, REQUEST)
        if mail.rank == DEAD:
            for other in (0, 1):
                await mail.send(7, other, LAST)
                mail.send(8, other, ANNOUNCED, LONG)
                assert await mail.receive(other, REPLY) == other
            kill()
        other = 1 - mail.rank
        pending = {
            "posted to receive from it": mail.receive(DEAD, REQUEST),
            "long send to it": mail.send(3, DEAD, ANNOUNCED, LONG),
        }
        # Messages of one sender arrive in order: what was sent before this one is here.
        assert await mail.receive(DEAD, LAST) == 7
        mail.send(mail.rank, DEAD, REPLY)
        say("posted to receive from any:", await outcome(anyone))
        for name, over in pending.items():
            say(f"{name}:", await outcome(over))
        anyone = mail.receive(ANY, REQUEST)
        for numel in (SHORT, LONG):
            await exchange(mail, other, numel)
        for i in range(100):
            mail.send(i, other, REQUEST)
            assert await asyncio.wait_for(anyone, SECONDS) == i
            anyone = mail.receive(ANY, REQUEST)
            sent = [mail.send(i, DEAD, tag, numel) for tag, numel in ((LAST, SHORT), (ANNOUNCED, LONG))]
            assert [(await outcome(one)).startswith("fails") for one in sent] == [True, True]
        say("then a short send to it:", await outcome(mail.send(1, DEAD, LAST)))
        say("then a long send to it:", await outcome(mail.send(1, DEAD, ANNOUNCED, LONG)))
        say("then a receive from it:", await outcome(mail.receive(DEAD, REPLY)))
        say("what it had only announced:", await outcome(mail.receive(DEAD, ANNOUNCED, LONG)))
        say("still waiting:", not anyone.done())
    say("closed:", await outcome(anyone))


async def exchange(mail: Mail, other: int, numel: int) -> None:
    """Both send to one another and receive, by name and from any source."""
    for src in (other, ANY):
        sent, received = mail.send(mail.rank, other, REPLY, numel), mail.receive(src, REPLY, numel)
        say(f"{numel} from {'any' if src == ANY else 'it'}:", await outcome(sent), await outcome(received))


async def kept() -> None:
    """Messages that rank 2 sent before its end are received afterwards, and the next receive raises the loss."""
    async with three() as mail:
        if mail.rank == DEAD:
            for other in (0, 1):
                await mail.send(7, other, REQUEST)
                await mail.send(8, other, LAST)
                assert await mail.receive(other, REPLY) == other
            kill()
        assert await mail.receive(DEAD, LAST) == 8
        pending = mail.receive(DEAD, ANNOUNCED)
        mail.send(mail.rank, DEAD, REPLY)
        say("it is gone:", await outcome(pending))
        for _ in range(2):
            say("from any:", await outcome(mail.receive(ANY, REQUEST)))
        await exchange(mail, 1 - mail.rank, SHORT)  # the other rank was notified too
        anyone = mail.receive(ANY, REQUEST)
        mail.send(mail.rank, 1 - mail.rank, REQUEST)
        say("then from any:", await outcome(anyone))
        await exchange(mail, 1 - mail.rank, SHORT)  # the other has received all of it


PROGRAMS: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
    program.__name__: program for program in (goes_on, kept)
}

if __name__ == "__main__":
    aiodist.run(PROGRAMS[sys.argv[1]])
