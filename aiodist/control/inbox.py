"""What arrives at a rank: messages for subscribers, and news of ranks that left."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiodist.control.roster import Exit


class Subscriptions:
    """Hands each message to the subscriber of its topic, in order, and keeps it until there is one.

    `deliver`, `left` and all callbacks run on the delivering thread. The other methods may be called from anywhere:
    they change one dict entry, which is atomic, and have `post` run the rest on that thread; so there is no lock.
    """

    def __init__(self, post: Callable[..., object], loop: asyncio.AbstractEventLoop) -> None:
        self._post = post
        self._loop = loop
        self._subscribers: dict[str, Callable[[int, Any], None]] = {}
        self._waiting: dict[str, deque[tuple[int, Any]]] = {}
        self._muted: set[str] = set()
        self._watchers: list[Callable[[Exit], None]] = []
        self.exits: dict[int, Exit] = {}

    def subscribe(self, topic: str, fn: Callable[[int, Any], None]) -> None:
        """See `Channel.subscribe`."""
        if self._subscribers.setdefault(topic, fn) is not fn:
            raise ValueError(f"topic {topic!r} has a subscriber already: unsubscribe it first")
        self._muted.discard(topic)
        self._post(self._drain, topic)

    def unsubscribe(self, topic: str) -> None:
        """See `Channel.unsubscribe`."""
        self._muted.add(topic)
        self._subscribers.pop(topic, None)
        self._post(self._forget, topic)

    def on_lost(self, fn: Callable[[Exit], None]) -> None:
        """See `Channel.on_lost`."""
        self._post(self._watch, fn)

    def deliver(self, src: int, topic: str, payload: Any) -> None:  # noqa: ANN401
        """Give a message to its subscriber, or keep it. On the delivering thread."""
        if topic not in self._muted:
            self._waiting.setdefault(topic, deque()).append((src, payload))
            self._drain(topic)

    def left(self, exit: Exit) -> None:
        """Note that a rank left; what was known first stays. On the delivering thread."""
        if exit.rank in self.exits:
            return
        self.exits[exit.rank] = exit
        if not exit.clean:
            for fn in tuple(self._watchers):
                self._call(fn, exit)

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
        for exit in tuple(self.exits.values()):
            if not exit.clean:
                self._call(fn, exit)

    def _call(self, fn: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
        try:
            fn(*args)
        except BaseException as error:  # noqa: BLE001  (even SystemExit must not end the thread that listens)
            message = f"a callback of the control channel raised: {fn!r}"
            self._loop.call_exception_handler({"message": message, "exception": error})
