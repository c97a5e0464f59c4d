"""The control channel of a rank: a small store of all ranks, messages, and the exits of ranks.

It works when the connections for data do not: for the meeting of ranks, unique ids, signatures and causes of failure.
There are two implementations: `client.SocketChannel` over a hub, with a listener thread in each rank, and
`local.InProcessChannel` for ranks that are tasks of one process.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from aiodist.control.rollcall import ROLL_CALL, RollCall, Then
from aiodist.control.roster import Exit
from aiodist.control.texts import name_ranks
from aiodist.control.thread import OwnProcess
from aiodist.errors import OperationTimeout
from aiodist.frames import EVERYBODY, pack, unpack


async def exchange(channel: Channel, what: str, mine: Any, seconds: float | None = None) -> list[Any]:  # noqa: ANN401
    """Return the value of every rank, by rank, in JSON's types. Every rank calls it, once for each name `what`.

    Cost: one round trip to the hub. Raises `OperationTimeout` with the ranks that brought no value within `seconds`.
    """
    if channel.size == 1:
        return [mine]
    try:
        async with asyncio.timeout(seconds):
            said = await channel.request("exchange", what, channel.size, json.dumps(mine))
    except TimeoutError:
        came = await channel.request("came", what)
        late = {rank: f"never came to {what!r}" for rank in range(channel.size) if rank not in came}
        message = f"{name_ranks(late)} did not come to {what!r} within {seconds:g} s"
        raise OperationTimeout(message, late=late, rank=channel.rank, op="exchange") from None
    return [json.loads(one) for one in said]


class ChannelClosed(RuntimeError):
    """A call on a channel after `aclose`."""


class Channel(ABC):
    """One rank's end of the control channel.

    In a forked child every call raises `RuntimeError`: the connection is the parent's. After `aclose` every call
    raises `ChannelClosed`, except `exits`, `fail` and `aclose`, which are no-ops then. If the hub is lost, `set`, `get`
    and `add` raise `PeerLost`. `send` and `broadcast` then drop the message, since `on_lost` reports the loss.

    One thread delivers messages and runs all callbacks. `subscribe` and `unsubscribe` change one dict entry, which is
    atomic, and post the rest to that thread. So there is no lock.
    """

    source = ""
    """Address of this host towards the hub, or "" within one process."""

    def __init__(self, rank: int, size: int, post: Callable[..., object], loop: asyncio.AbstractEventLoop) -> None:
        """`post(fn, *args)` calls on the thread that delivers, which runs `loop`."""
        self.rank = rank
        self.size = size
        self.names: dict[int, tuple[str, int]] = {}
        """Name and number of ranks of another job, for errors."""
        self._owner = OwnProcess()
        self._post = post
        self._loop = loop
        self._subscribers: dict[str, Callable[[int, Any], None]] = {}
        self._waiting: dict[str, deque[tuple[int, Any]]] = {}
        """Messages of topics without a subscriber, in order, by topic."""
        self._muted: set[str] = set()
        self._watchers: list[Callable[[Exit], None]] = []
        self._exits: dict[int, Exit] = {}
        self._roll_call = RollCall(loop, self.send, self._exits)
        self._subscribers[ROLL_CALL] = self._roll_call.heard

    async def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key` for all ranks, or raise `ValueError` for more than 48 MiB."""
        await self.request("set", key, bytes(value))

    async def get(self, key: str, *, timeout: float | None = None) -> bytes:
        """Return the value of `key`, after a wait until a rank sets it.

        Raises `OperationTimeout` after `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                value: bytes = await self.request("get", key)
        except TimeoutError:
            message = f"key {key!r} was not set within {timeout:g} s"
            raise OperationTimeout(message, rank=self.rank, op="get") from None
        return value

    async def add(self, key: str, amount: int = 1) -> int:
        """Add to the counter `key`, which starts at 0, and return the sum. The addition is atomic.

        `get` returns a counter as decimal digits. Raises `ValueError` if the value of `key` is no counter.
        """
        total: int = await self.request("add", key, amount)
        return total

    def send(self, dst: int, topic: str, payload: Any) -> None:  # noqa: ANN401
        """Send `payload` (JSON's types and bytes) to the subscriber of `topic` on rank `dst`, which may be this rank.

        Any thread may call it. It never blocks. Messages of one thread to one rank arrive in order. Raises `ValueError`
        for a rank outside the job or more than 64 MiB of JSON, bytes in base64, and `TypeError` for other types.
        """
        if not 0 <= dst < self.size:
            raise ValueError(f"rank {dst} of {self.size}: expected 0 <= rank < {self.size}")
        self._check_open()
        self._send(dst, pack([topic, payload]))

    def broadcast(self, topic: str, payload: Any) -> None:  # noqa: ANN401
        """Send to every other rank, as `send` does."""
        self._check_open()
        self._send(EVERYBODY, pack([topic, payload]))

    def subscribe(self, topic: str, fn: Callable[[int, Any], None]) -> None:
        """Call `fn(src, payload)` for each message of `topic`, also for earlier messages.

        `fn` runs on the listener thread, also while the main thread is stuck, and must be short. An exception of `fn`
        goes to the exception handler of that loop. Raises `ValueError` if the topic has a subscriber.
        """
        self._check_open()
        if self._subscribers.setdefault(topic, fn) is not fn:
            raise ValueError(f"topic {topic!r} has a subscriber already: unsubscribe it first")
        self._muted.discard(topic)
        self._post(self._drain, topic)

    def unsubscribe(self, topic: str) -> None:
        """End the subscription of `topic`. Its messages are dropped until the next `subscribe`."""
        self._check_open()
        self._muted.add(topic)
        self._subscribers.pop(topic, None)
        self._post(self._forget, topic)

    def on_lost(self, fn: Callable[[Exit], None]) -> None:
        """Call `fn(exit)` for each rank that leaves without a goodbye, also for earlier losses.

        The connection of the rank broke, its heartbeats stopped, or it reported a failure. A lost hub counts as the
        rank in whose process it ran, if any, then as `HUB`. `fn` runs on the thread of the subscribers.
        """
        self._check_open()
        self._post(self._watch, fn)

    def ask_alive(self, ranks: Iterable[int], then: Then) -> None:
        """Ask `ranks` if they are alive, and call `then` once with those that have not answered.

        `then` runs on the thread of the subscribers.

        The wait ends when each of them has answered or left, when one of them or the hub is lost, or after
        `LIVENESS_SECONDS`. A closed channel calls `then` at once, with no rank.
        """
        try:
            self._check_open()
        except RuntimeError:
            then([])
        else:
            self._post(self._roll_call.ask, set(ranks), then)

    def exits(self) -> Mapping[int, Exit]:
        """Return the exits of ranks that have left, by rank, also the clean ones."""
        self._owner.check()
        return dict(self._exits)

    @property
    @abstractmethod
    def asks(self) -> bool:
        """True if an answer of the hub is still expected."""

    @abstractmethod
    def fail(self, cause: str, traceback: str = "", exitcode: int = 1) -> None:
        """Report the failure of this rank to all, before it exits. Any thread may call it; it takes at most 1 s."""

    @abstractmethod
    async def aclose(self) -> None:
        """Say goodbye and end the listener thread. A second call is a no-op."""

    @abstractmethod
    def request(self, *question: Any) -> asyncio.Future[Any]:  # noqa: ANN401
        """Ask the hub, and return a future of the running loop with the answer. Cancelling it withdraws the question.

        Raises `ValueError` at the call for more than 64 MiB of JSON. The future raises `PeerLost` if the hub is lost.
        """

    @abstractmethod
    def _send(self, dst: int, body: bytes) -> None:
        """Send a message to one rank, or to all others (`EVERYBODY`)."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise `ChannelClosed` after the close, and `RuntimeError` in another process."""

    # On the thread that delivers.

    def _deliver(self, src: int, body: bytes) -> None:
        """Deliver a message to the subscriber of its topic, or keep it until there is one."""
        topic, payload = unpack(body)
        if topic not in self._muted:
            self._waiting.setdefault(topic, deque()).append((src, payload))
            self._drain(topic)

    def _left(self, exit: Exit) -> None:
        """Note the exit of a rank, if it is the first."""
        if exit.rank in self._exits:
            return
        if exit.rank in self.names:
            name, number = self.names[exit.rank]
            exit = replace(exit, name=name, number=number)
        self._exits[exit.rank] = exit
        if not exit.clean:
            for fn in tuple(self._watchers):
                self._call(fn, exit)
        self._roll_call.note_exits()

    def _drain(self, topic: str) -> None:
        waiting = self._waiting.get(topic)
        while waiting and (fn := self._subscribers.get(topic)):
            self._call(fn, *waiting.popleft())
        if not waiting:
            self._waiting.pop(topic, None)

    def _forget(self, topic: str) -> None:
        if topic in self._muted:
            self._waiting.pop(topic, None)

    def _watch(self, fn: Callable[[Exit], None]) -> None:
        self._watchers.append(fn)
        for exit in tuple(self._exits.values()):
            if not exit.clean:
                self._call(fn, exit)

    def _call(self, fn: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
        try:
            fn(*args)
        except BaseException as error:  # noqa: BLE001  (even SystemExit must not end the thread that listens)
            message = f"a callback of the control channel raised: {fn!r}"
            self._loop.call_exception_handler({"message": message, "exception": error})
