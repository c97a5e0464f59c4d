"""The control channel for ranks that are tasks of one process: the same rules, no sockets, no threads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from aiodist.control.exits import Exit
from aiodist.control.inbox import Listening, Subscriptions
from aiodist.control.store import Store
from aiodist.control.wire import Kind, frame, pack, unpack
from aiodist.errors import OperationTimeout

if TYPE_CHECKING:
    from aiodist.control.channel import Channel

__all__ = ["InProcessChannel", "InProcessHub", "in_process"]


def in_process(size: int) -> list[Channel]:
    """Return the channels of `size` ranks that share the running loop."""
    return list(InProcessHub(size).channels)


class InProcessHub:
    """What the channels of one process share, on the running loop. `lose` plays the death of a rank."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"{size} ranks: expected at least 1")
        self.loop = asyncio.get_running_loop()
        self.store = Store()
        self.numbers = itertools.count()
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self.channels = [InProcessChannel(self, rank, size) for rank in range(size)]

    def lose(self, rank: int, cause: str) -> None:
        """Have `rank` leave without a goodbye: the others are told, and it hears nothing any more."""
        self.leave(Exit(rank, clean=False, cause=cause))
        self.channels[rank].cut()

    def leave(self, exit: Exit) -> None:
        """Tell every other rank how one left."""
        for channel in self.channels:
            if channel.rank != exit.rank:
                self.post(channel.left, exit)

    def post(self, fn: Callable[..., None], /, *args: Any) -> None:  # noqa: ANN401
        """Call `fn(*args)` on the loop, in the order of these calls; dropped when the loop is closed."""
        if threading.get_ident() == self._thread:
            if not self.loop.is_closed():
                self.loop.call_soon(fn, *args)
            return
        with contextlib.suppress(RuntimeError):  # closed meanwhile: nobody is left to hear it
            self.loop.call_soon_threadsafe(fn, *args)

    def check_process(self) -> None:
        """Raise `RuntimeError` in a forked child."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"the control channel belongs to process {self._pid}: a forked child has none")

    def check_loop(self) -> None:
        """Raise `RuntimeError` on another loop than the one the ranks share."""
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError("this control channel belongs to another event loop")


class InProcessChannel(Listening):
    """A `Channel` to ranks on the same loop. Its coroutines yield once: no loop over them starves others."""

    def __init__(self, hub: InProcessHub, rank: int, size: int) -> None:
        super().__init__(rank, size, Subscriptions(hub.post, self._report))
        self._hub = hub
        self._open = True
        self._failed = False
        self._waiting: set[asyncio.Future[bytes]] = set()

    async def set(self, key: str, value: bytes) -> None:
        """See `Channel.set`."""
        self._check_open()
        self._hub.check_loop()
        frame(Kind.REQUEST, body=pack(["set", key, bytes(value)]))  # over 64 MiB is an error here too
        self._hub.store.set(key, bytes(value))
        await asyncio.sleep(0)

    async def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """See `Channel.get`."""
        self._check_open()
        self._hub.check_loop()
        found: asyncio.Future[bytes] = self._hub.loop.create_future()
        waiter = (self._rank, next(self._hub.numbers))
        self._hub.store.get(key, waiter, partial(_settle, found))
        self._waiting.add(found)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.sleep(0)
                return await found
        except TimeoutError:
            message = f"key {key!r} was not set within {timeout:g} s"
            raise OperationTimeout(message, rank=self._rank, op="get") from None
        finally:
            self._waiting.discard(found)
            self._hub.store.cancel(waiter)

    async def add(self, key: str, amount: int = 1) -> int:
        """See `Channel.add`."""
        self._check_open()
        self._hub.check_loop()
        total = self._hub.store.add(key, amount)
        await asyncio.sleep(0)
        return total

    async def delete(self, key: str) -> None:
        """See `Channel.delete`."""
        self._check_open()
        self._hub.check_loop()
        self._hub.store.delete(key)
        await asyncio.sleep(0)

    def send(self, dst: int, topic: str, payload: Any) -> None:  # noqa: ANN401
        """See `Channel.send`."""
        self._check_rank(dst)
        self._send((dst,), topic, payload)

    def broadcast(self, topic: str, payload: Any) -> None:  # noqa: ANN401
        """See `Channel.broadcast`."""
        self._send((rank for rank in range(self._size) if rank != self._rank), topic, payload)

    def exits(self) -> Mapping[int, Exit]:
        """See `Channel.exits`."""
        self._hub.check_process()
        return dict(self._inbox.exits)

    def fail(self, cause: str, traceback: str = "", exitcode: int = 1) -> None:
        """See `Channel.fail`."""
        self._hub.check_process()
        if self._open and not self._failed:
            self._failed = True
            self._hub.leave(Exit(self._rank, False, cause, traceback, exitcode))

    async def aclose(self) -> None:
        """See `Channel.aclose`."""
        self._hub.check_process()
        if self._open:
            if not self._failed:
                self._hub.leave(Exit(self._rank, clean=True, cause="it closed the channel", exitcode=0))
            self.cut()

    # What the hub does to it, on the loop.

    def left(self, exit: Exit) -> None:
        """Hear that a rank left."""
        if self._open:
            self._inbox.left(exit)

    def cut(self) -> None:
        """Hear nothing any more."""
        self._open = False
        for found in tuple(self._waiting):
            if not found.done():
                found.set_exception(self._closed())

    def _hear(self, src: int, body: bytes) -> None:
        if self._open:
            topic, payload = unpack(body)
            self._inbox.deliver(src, topic, payload)

    def _send(self, ranks: Iterable[int], topic: str, payload: Any) -> None:  # noqa: ANN401
        self._check_open()
        body = pack([topic, payload])  # so that what cannot travel is an error here too, and nothing is shared
        frame(Kind.MESSAGE, body=body)
        for rank in ranks:
            self._hub.post(self._hub.channels[rank]._hear, self._rank, body)

    def _check_open(self) -> None:
        self._hub.check_process()
        if not self._open:
            raise self._closed()

    def _closed(self) -> RuntimeError:
        return RuntimeError(f"the control channel of rank {self._rank} is closed")

    def _report(self, message: str, error: BaseException) -> None:
        self._hub.loop.call_exception_handler({"message": message, "exception": error})


def _settle(found: asyncio.Future[bytes], value: bytes) -> None:
    if not found.done():
        found.set_result(value)
