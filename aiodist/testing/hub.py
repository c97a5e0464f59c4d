"""The messages among ranks of one process, delivered in an order that a seed draws."""

from __future__ import annotations

from asyncio import _get_running_loop
from collections import defaultdict
from collections.abc import Iterator
from random import Random

from aiodist.backends.base import tell
from aiodist.backends.local import Address, LocalHub, LocalMessage, gone
from aiodist.backends.matching import TransportReceive
from aiodist.handles.progress import Progress
from aiodist.types import ANY


class DrawnHub(LocalHub):
    """A `LocalHub` whose deliveries wait for the loop, in an order drawn from `seed`.

    If it `holds`, a receive from `ANY` takes no message while a rank can continue, so that all messages that may come
    first are there. The loop then calls `release`: of the first messages of all senders, the one with the greatest
    drawn weight goes next. With some seeds each message has its own weight, with others all of a sender to a rank have
    the same. So a message may be the last, however many steps the others depend on.
    """

    def __init__(self, seed: int, *, holds: bool = False) -> None:
        super().__init__()
        self._random = Random(seed)
        self._holds = holds
        self._open: defaultdict[Address, list[TransportReceive]] = defaultdict(list)
        """Held receives from `ANY`. Their tags have no other receives."""
        self._weights: dict[object, float] = {}
        self._by_sender = self._random.random() < 0.5
        self.progress: Progress | None = None
        """The progress of the loop of all ranks, which starts the deliveries."""

    def post(self, at: Address, receive: TransportReceive) -> None:
        """See `LocalHub`."""
        if self._holds and receive.src == ANY:
            self._open[at].append(receive)
        else:
            super().post(at, receive)

    def abort(self, at: Address) -> None:
        """See `LocalHub`."""
        comm, rank = at
        tell((receive.done, gone(rank, comm)) for receive in self._open.pop(at, ()))
        super().abort(at)

    def release(self) -> bool:
        """Let one receive from `ANY` take a message (lock held). Return False if no message waits for one."""
        found = {message: (at, receive) for at, receive, message in self._candidates()}
        if not found:
            return False
        message = max(found, key=lambda message: self._weight(found[message][0], message))
        at, receive = found[message]
        self._open[at].remove(receive)
        self.waiting[at].cancel_messages([message])
        self._weights.pop(message, None)
        self.deliver(message, receive)
        return True

    def _weight(self, at: Address, message: LocalMessage) -> float:
        return self._weights.setdefault((at, message.src) if self._by_sender else message, self._random.random())

    def _candidates(self) -> Iterator[tuple[Address, TransportReceive, LocalMessage]]:
        """Yield the first message of each sender and tag, with the first receive from `ANY` that takes it."""
        for at, receives in self._open.items():
            first = {receive.tag: receive for receive in reversed(receives)}
            messages = self.waiting[at].messages if first else []
            heads = {(message.src, message.tag): message for message in reversed(messages) if message.tag in first}
            for message in reversed(heads.values()):
                yield at, first[message.tag], message

    def deliver(self, message: LocalMessage, receive: TransportReceive) -> None:
        """Copy the bytes of `message` in a later turn of the loop, in a drawn order."""
        progress = self.progress
        assert progress is not None
        self._ready.append((message, receive))
        loop = progress.loop
        schedule = loop.call_soon if loop is _get_running_loop() else loop.call_soon_threadsafe
        schedule(lambda: progress.start(self._copy_next))

    def _copy_next(self) -> None:
        if self._ready:
            self._ready.rotate(self._random.randrange(len(self._ready)))
            super()._copy_next()
