"""A rank's end of the channel over a hub: a listener thread with one connection."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

from aiodist.control.channel import Channel, ChannelClosed
from aiodist.control.link import Link, Pulse
from aiodist.control.roster import HUB, Exit
from aiodist.control.texts import name_ranks
from aiodist.control.thread import settle, settle_soon
from aiodist.errors import OperationTimeout
from aiodist.frames import Frame, FrameKind, WireError, frame, pack, unpack

if TYPE_CHECKING:
    from aiodist.control.places import Place
    from aiodist.control.thread import LoopThread

_FAIL_TIMEOUT = 0.9
_BYE_TIMEOUT = 2.0
_TRACEBACK_LIMIT = 256 << 10

_Resolve = Callable[[Any, "Exception | None"], None]


class SocketChannel(Channel):
    """A `Channel` whose other end is a hub.

    Methods of the listener thread have a heading of their own. Any thread may call the others. A send appends to a
    deque, and wakes the thread once for several sends, since the wake-up is most of the cost.
    """

    _of_process: ClassVar[WeakSet[SocketChannel]] = WeakSet()

    def __init__(self, rank: int, size: int, thread: LoopThread, place: Place | None = None) -> None:
        self.place = place
        """Meeting point of the ranks."""
        super().__init__(rank, size, thread.call, thread.loop)
        self._of_process.add(self)
        self._thread = thread
        self._outbox: deque[bytes] = deque()
        self._flushing = False
        self._numbers = itertools.count()
        self._replies: dict[int, _Resolve] = {}
        self._lost: Exit | None = None
        self._closing = False
        self._link: Link | None = None
        self._host_rank = HUB
        self.ready: asyncio.Future[None] = thread.loop.create_future()
        """Done when all ranks have joined (listener thread)."""
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # no log if not awaited

    @property
    def asks(self) -> bool:
        return bool(self._replies)

    def fail(self, cause: str, traceback: str = "", exitcode: int = 1) -> None:
        self._owner.check()
        if self._closing or self._lost:
            return
        told = threading.Event()
        body = pack(["fail", cause, traceback[-_TRACEBACK_LIMIT:], exitcode])
        self._ask(body, lambda value, error: told.set())
        if not self._thread.is_current():  # the answer comes on this thread: it cannot wait for it
            told.wait(_FAIL_TIMEOUT)

    async def aclose(self) -> None:
        self._owner.check()
        try:
            if not self._closing and not self._lost:
                said = self.request("bye", "it closed the channel")
                self._closing = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_BYE_TIMEOUT):
                        # Any answer is enough: the hub may have left first.
                        await asyncio.gather(said, return_exceptions=True)
        finally:
            self._closing = True
            await self._thread.aclose()

    def request(self, *question: Any) -> asyncio.Future[Any]:  # noqa: ANN401
        self._check_open()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        number = self._ask(pack(list(question)), partial(settle_soon, answer))
        answer.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        return answer

    def _send(self, dst: int, body: bytes) -> None:
        self._write(frame(FrameKind.MESSAGE, dst, body))

    def _ask(self, body: bytes, resolve: _Resolve) -> int:
        number = next(self._numbers) & 0x7FFFFFFF
        data = frame(FrameKind.REQUEST, number, body)
        self._replies[number] = resolve
        self._write(data)
        # The thread first notes the loss of the hub, then empties the table. So one of the two sees this entry.
        if self._lost and self._replies.pop(number, None):
            resolve(None, self._gone())
        return number

    def _cancel(self, number: int) -> None:
        if self._replies.pop(number, None):
            self._write(frame(FrameKind.CANCEL, number))

    def _write(self, data: bytes) -> None:
        self._outbox.append(data)
        if not self._flushing:
            self._flushing = True
            self._thread.call(self._flush)

    def _check_open(self) -> None:
        self._owner.check()
        # A subscriber may answer during the close: its message is dropped.
        if self._closing and not self._thread.is_current():
            raise self._gone()

    @classmethod
    def is_joined(cls, place: Place, rank: int) -> bool:
        """Return True if this process has joined the job at `place` as `rank`."""
        return any(
            (channel.place, channel.rank) == (place, rank) and channel.is_welcome and channel._is_open()
            for channel in tuple(cls._of_process)
        )

    @classmethod
    def cut(cls, rank: int | None = None) -> None:
        """Break the connections of this process to hubs, or that of one `rank` (for tests)."""
        for channel in tuple(cls._of_process):
            if channel._is_open() and channel._link is not None and rank in (None, channel.rank):
                channel._thread.call(channel._link.abort, "it was cut")

    @classmethod
    def stall(cls, seconds: float) -> None:
        """Block the listener threads of this process, in seconds (for tests)."""
        for channel in tuple(cls._of_process):
            if channel._is_open():
                channel._thread.call(time.sleep, seconds)

    def _is_open(self) -> bool:
        return not self._closing and self._lost is None and self._owner.is_here()

    # On the listener thread.

    @property
    def is_welcome(self) -> bool:
        """True after the welcome of the hub."""
        return self._link is not None

    def welcomed(self, link: Link, settings: Mapping[str, Any]) -> None:
        """Own the connection after the welcome of the hub."""
        self._link, self.source = link, link.source
        self._host_rank = HUB if settings["host_rank"] is None else settings["host_rank"]
        link.on_frame = self._hear
        link.on_closed = self._hub_gone
        pulse = Pulse(settings["heartbeat"], lambda: (link,))
        self._thread.stack.push_async_callback(self._leave, link, pulse)

    def abort(self, cause: str) -> None:
        """Report to the hub why this rank no longer waits for the others."""
        self._ask(pack(["bye", cause]), lambda value, error: None)

    async def _leave(self, link: Link, pulse: Pulse) -> None:
        pulse.cancel()
        self._closing = True
        self._roll_call.close()
        self._flush()
        link.close("this rank left")
        await link.wait_closed(_BYE_TIMEOUT)

    def _flush(self) -> None:
        self._flushing = False  # first, so that a later send wakes the thread again
        waiting = []
        while self._outbox:
            waiting.append(self._outbox.popleft())
        if waiting and self._link is not None:
            self._link.write(b"".join(waiting))

    def _hear(self, received: Frame) -> None:
        match received.kind:
            case FrameKind.MESSAGE:
                self._deliver(received.number, received.body)
            case FrameKind.REPLY:
                error, value = unpack(received.body)
                if resolve := self._replies.pop(received.number, None):
                    resolve(value, None if error is None else ValueError(error))
            case FrameKind.EXIT:
                self._left(Exit(**unpack(received.body)))
            case FrameKind.READY:
                settle(self.ready, None, None)
            case FrameKind.CLOSING:
                notice = unpack(received.body)
                if not self.ready.done() and notice["late"]:
                    late = dict(notice["late"])
                    message = f"{notice['cause']}, before {name_ranks(late)} had come"
                    self.ready.set_exception(OperationTimeout(message, late=late, rank=self.rank, op="connect"))
                rank = HUB if notice["clean"] else self._host_rank
                self._lose(Exit(rank, clean=notice["clean"], cause=notice["cause"]))
            case FrameKind.PING:
                pass
            case kind:
                raise WireError(f"a frame of kind {kind} from the hub")

    def _hub_gone(self, cause: str) -> None:
        where = "" if self._host_rank == HUB else f", which rank {self._host_rank} hosted,"
        self._lose(Exit(self._host_rank, clean=False, cause=f"the hub{where} was lost: {cause}"))

    def _lose(self, exit: Exit) -> None:
        if self._lost is None:
            hub = replace(exit, rank=HUB, host=exit.rank)
            earlier = self._exits.get(exit.rank)
            if earlier is not None and not earlier.clean:
                exit = earlier  # the rank with the hub has reported the cause before
            elif earlier is not None:
                exit = replace(exit, rank=HUB)  # the rank has said goodbye before, and its hub still served
            self._lost = exit
            if not self._closing:
                self._left(exit)
                self._left(hub)  # communicators without that rank would learn of no later loss
        settle(self.ready, None, self._gone())
        while self._replies:
            _, resolve = self._replies.popitem()
            resolve(None, self._gone())

    def _gone(self) -> Exception:
        if self._closing or self._lost is None:
            return ChannelClosed(f"the control channel of rank {self.rank} is closed")
        return self._lost.error()
