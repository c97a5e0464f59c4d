"""The ranks of this job at one end of a bridge: rank 0 decides, and all ranks hear its decisions in one order."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from weakref import WeakMethod

from aiodist.backends.base import again
from aiodist.communicator import Communicator, parts_of
from aiodist.control import Exit
from aiodist.errors import AiodistError


class JobRanks:
    """The ranks of `coll`. Every rank makes one, in the same order among the calls that make communicators."""

    def __init__(self, coll: Communicator) -> None:
        parts = parts_of(coll)
        parts.dispatcher.check_usable()
        self.rank = coll.rank
        self.size = coll.size
        self.one_host = len(coll.topology.hosts) == 1
        self._ranks = parts.dispatcher.ranks
        self._channel = parts.registry.channel
        self._topic = parts.registry.next_name(coll, "bridge")
        self._loop = asyncio.get_running_loop()
        self._heard: asyncio.Queue[list[Any] | AiodistError] = asyncio.Queue()
        self._channel.subscribe(self._topic, self._hear)
        weak = WeakMethod(self._lost)  # the channel keeps its callbacks for the rest of the job

        def lost(exit: Exit) -> None:
            if (notify := weak()) is not None:
                notify(exit)

        self._channel.on_lost(lost)

    def tell(self, *decision: Any) -> None:  # noqa: ANN401
        """Send a decision of rank 0 to all ranks, this one too. Any thread may call it."""
        with suppress(RuntimeError):  # the world is closed, and no rank waits
            for rank in self._ranks:
                self._channel.send(rank, self._topic, list(decision))

    async def heard(self) -> list[Any]:
        """Return the next decision of rank 0. Raises `PeerLost` if a rank of this job is lost."""
        heard = await self._heard.get()
        if isinstance(heard, AiodistError):
            self._heard.put_nowait(heard)
            raise again(heard)
        return heard

    def close(self) -> None:
        """Hear no more."""
        with suppress(RuntimeError):
            self._channel.unsubscribe(self._topic)

    # On the thread of the channel.

    def _hear(self, _: int, decision: list[Any]) -> None:
        self._put(decision)

    def _lost(self, exit: Exit) -> None:
        if exit.rank in self._ranks or exit.rank < 0:
            self._put(exit.error())

    def _put(self, heard: list[Any] | AiodistError) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._heard.put_nowait, heard)
