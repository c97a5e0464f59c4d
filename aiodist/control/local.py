"""The control channel for ranks that are tasks of one process: the same rules, no sockets, no threads."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiodist.control.channel import Channel, ChannelClosed
from aiodist.control.roster import Exit, Members, Store
from aiodist.control.thread import settle
from aiodist.frames import EVERYBODY, FrameKind, frame, pack


def in_process(size: int, members: Members | None = None) -> list[InProcessChannel]:
    """Return the channels of `size` ranks that share the running loop. `members` gets reports as from `Hub`."""
    if size < 1:
        raise ValueError(f"{size} ranks: expected at least 1")
    hub = _InProcessHub(members)
    hub.channels += [InProcessChannel(hub, rank, size) for rank in range(size)]
    return list(hub.channels)


class _InProcessHub:
    """The common part of the channels of one process, on the running loop."""

    def __init__(self, members: Members | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.members = members
        self.store = Store()
        self.numbers = itertools.count()
        self.channels: list[InProcessChannel] = []
        self.exits: list[Exit] = []
        """Exits of ranks, in the order in which each channel takes them."""
        self._thread = threading.get_ident()

    def leave(self, exit: Exit) -> None:
        """Report an exit to every other rank, in the same order on all ranks."""
        self.exits.append(exit)
        for channel in self.channels:
            self.post(channel._take_exit)
        if self.members is not None:
            self.post(self.members.left, exit)

    def answer(self, question: Sequence[Any], waiter: tuple[int, int], reply: Callable[..., None]) -> None:
        """Answer a question, as `Hub` does."""
        match question:
            case ["regroup", int(joiners)] if self.members is not None:
                self.members.ask(waiter[0], joiners, reply)
            case ["late"] if self.members is not None:
                reply(list(self.members.missing(waiter[0]).items()), None)
            case _:
                self.store.answer(question, waiter, reply)

    def post(self, fn: Callable[..., None], /, *args: Any) -> None:  # noqa: ANN401
        """Call `fn(*args)` on the loop, in the order of these calls, unless the loop is closed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            here = threading.get_ident() == self._thread
            (self.loop.call_soon if here else self.loop.call_soon_threadsafe)(fn, *args)


class InProcessChannel(Channel):
    """A `Channel` to ranks on the same loop. Each coroutine yields at least once, so a loop of them blocks no task."""

    def __init__(self, hub: _InProcessHub, rank: int, size: int) -> None:
        super().__init__(rank, size, hub.post, hub.loop)
        self._hub = hub
        self._open = True
        self._failed = False
        self._killed = False
        self._asked: set[asyncio.Future[Any]] = set()
        self._taken = 0
        """Number of exits that this channel has taken."""

    def request(self, *question: Any) -> asyncio.Future[Any]:  # noqa: ANN401
        self._check_open()
        if asyncio.get_running_loop() is not self._hub.loop:
            raise RuntimeError("this control channel belongs to another event loop")
        frame(FrameKind.REQUEST, body=pack(list(question)))  # over 64 MiB is an error here too
        waiter = (self.rank, next(self._hub.numbers))
        answer: asyncio.Future[Any] = self._hub.loop.create_future()
        self._asked.add(answer)
        answer.add_done_callback(partial(self._answered, waiter))
        self._hub.answer(question, waiter, partial(self._hub.post, settle, answer))
        return answer

    @property
    def asks(self) -> bool:
        return bool(self._asked)

    def fail(self, cause: str, traceback: str = "", exitcode: int = 1) -> None:
        self._owner.check()
        if self._open and not self._failed:
            self._failed = True
            self._hub.leave(Exit(self.rank, False, cause, traceback, exitcode))

    def kill(self, cause: str) -> None:
        """Leave as a killed process does, without further messages."""
        self.fail(cause)
        self._killed = True

    async def aclose(self) -> None:
        self._owner.check()
        if self._open:
            if not self._failed:
                self._hub.leave(Exit(self.rank, clean=True, cause="it closed the channel", exitcode=0))
            self._open = False
            self._roll_call.close()
            for answer in self._asked:
                settle(answer, None, self._closed())

    def _answered(self, waiter: tuple[int, int], answer: asyncio.Future[Any]) -> None:
        self._asked.discard(answer)
        if answer.cancelled():
            self._hub.store.cancel(*waiter)

    def _take_exit(self) -> None:
        exit = self._hub.exits[self._taken]
        self._taken += 1
        if self._open and exit.rank != self.rank:
            self._left(exit)

    def _deliver(self, src: int, body: bytes) -> None:
        if self._open:
            super()._deliver(src, body)

    def _send(self, dst: int, body: bytes) -> None:
        frame(FrameKind.MESSAGE, body=body)  # over 64 MiB is an error here too
        others = (rank for rank in range(self.size) if rank != self.rank)
        for rank in () if self._killed else others if dst == EVERYBODY else (dst,):
            self._hub.post(self._hub.channels[rank]._deliver, self.rank, body)

    def _check_open(self) -> None:
        self._owner.check()
        if not self._open:
            raise self._closed()

    def _closed(self) -> ChannelClosed:
        return ChannelClosed(f"the control channel of rank {self.rank} is closed")
