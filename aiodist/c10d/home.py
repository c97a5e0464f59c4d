"""Where the communicators of process groups live: the loop of an asyncio program, or one in a thread."""

from __future__ import annotations

import asyncio
import atexit
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any, TypeVar

import torch.distributed as dist
from anyio.from_thread import start_blocking_portal

from aiodist.communicator import Communicator
from aiodist.errors import AiodistError
from aiodist.world.opening import Introduction, Limits
from aiodist.world.runtime import opened

T = TypeVar("T")

_FORGOTTEN_SECONDS = 5.0


class Home:
    """The communicators of one default group, and of those that are made from it."""

    def __init__(self, world: Communicator, block: ExitStack | None = None) -> None:
        """`block` is what keeps the world open, and its loop; None: its program does."""
        self.world = world
        self.loop = world.parts.dispatcher.progress.loop
        self._block = block

    @classmethod
    def open(cls, store: dist.Store, rank: int, size: int, timeout: float) -> Home:
        """Open a world on a loop in a thread, whose ranks meet in `store`."""
        stack = ExitStack()
        portal = stack.enter_context(start_blocking_portal("asyncio", {"use_uvloop": True}, name="aiodist-loop"))
        with stack:
            meeting = Introduction(rank, size, _exchange(store, rank, size))
            block = opened(Limits(rendezvous=timeout), meeting=meeting, thread=True)
            world = stack.enter_context(portal.wrap_async_context_manager(block))
            home = cls(world, stack.pop_all())
            atexit.register(home._at_exit)
            return home

    def call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what a coroutine on the loop returns; for any thread but the loop's."""
        if self.world.parts.dispatcher.progress.owns_thread():
            raise RuntimeError("torch.distributed would block the event loop here: call it in a thread (to_thread)")
        return asyncio.run_coroutine_threadsafe(make(), self.loop).result()

    def group(self, name: str, ranks: Sequence[int]) -> Communicator:
        """Return a communicator of some of the world's `ranks`, which alone call it, with a `name` of its own."""
        safe = "".join(c if c.isalnum() else "-" for c in name)
        made: Communicator = self.call(lambda: self.world.parts.registry.among(self.world, f"c10d-{safe}", ranks))
        return made

    def release(self, communicator: Communicator) -> None:
        """Close what `group` returned, once its other ranks close theirs: nobody waits for that."""
        if communicator is not self.world:
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(lambda: self.loop.create_task(_close(communicator)))

    def close(self, error: BaseException | None = None) -> None:
        """Close the world with all that was made in it, and its loop. Collective, unless `error` ends the program."""
        block, self._block = self._block, None
        if block is not None:
            atexit.unregister(self._at_exit)
            block.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _at_exit(self) -> None:
        """The program ends without `destroy_process_group`; the others are told of an exception that ended it."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None:
            closing = asyncio.wait_for(self.world.parts.registry.close(self.world), _FORGOTTEN_SECONDS)
            try:
                asyncio.run_coroutine_threadsafe(closing, self.loop).result()
            except Exception as late:  # noqa: BLE001  - the process has its exit code already
                error = late
        with suppress(Exception):
            self.close(error)  # else the loop's thread, which Python stops, would be waited for when this is collected


async def _close(communicator: Communicator) -> None:
    with suppress(AiodistError):
        await communicator.aclose()


def _exchange(store: dist.Store, rank: int, size: int) -> Callable[[bytes], Coroutine[Any, Any, list[bytes]]]:
    """Return what gives each rank the words of all, by torch's store."""
    rounds = count()

    async def exchange(said: bytes) -> list[bytes]:
        number = next(rounds)
        store.set(f"aiodist/{number}/{rank}", said.decode())
        return await asyncio.to_thread(lambda: [store.get(f"aiodist/{number}/{other}") for other in range(size)])

    return exchange
