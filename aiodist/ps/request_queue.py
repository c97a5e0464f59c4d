"""The queue of a client's requests: they get their numbers, and leave in the order in which they were made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count

from aiodist.errors import AiodistError
from aiodist.ps.context import Context

Sender = Callable[[], object]
"""Puts a request, or a part of one, into the coalescer; called with the transport lock held."""


class RequestQueue:
    """Numbers requests, and has them leave in order: issued on the loop's thread, sent with the transport lock held."""

    def __init__(self, context: Context, lost: Callable[[int], None], first: int) -> None:
        """`lost(rank)` is told of a request to a rank that is gone; `first` is the number of the first one."""
        self.context = context
        self._lost = lost
        self._numbers = count(first)
        self._begun = 0  # on the loop's thread
        self._ended = 0  # with the transport lock held
        self._gathered: list[Sender] | None = None

    def number(self) -> int:
        """Return the number of the next request; from any thread."""
        return next(self._numbers)

    @property
    def behind(self) -> bool:
        """Requests wait for others that are being encoded."""
        return self._begun != self._ended

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have what is issued in the block leave at once, in as few frames as may be; no such block lies in another."""
        gathered: list[Sender] = []
        self._gathered = gathered
        try:
            yield
        finally:
            self._gathered = None
            if gathered:
                self.issue(gathered)

    def issue(self, senders: Sequence[Sender]) -> None:
        """Send requests now, or behind those that are being encoded."""
        if self._gathered is not None:
            self._gathered.extend(senders)
        elif self.behind:
            self.issue_later(lambda: None, lambda _: self.send(senders))
        else:
            self.context.progress.start(partial(self.send, senders))

    def issue_later(self, work: Callable[[], None], then: Callable[[BaseException | None], None]) -> None:
        """Have the service thread do `work`, then `then(error)` send what came of it; what comes later waits behind."""
        if gathered := self._gathered:
            self._gathered = None
            self.issue(gathered[:])
            gathered.clear()
            self._gathered = gathered
        self._begun += 1

        def over(error: BaseException | None) -> None:
            self._ended += 1
            then(error)

        self.context.progress.start(partial(self.context.service.run, work, over))

    def send(self, senders: Sequence[Sender]) -> None:
        """Send requests now; with the transport lock held."""
        for sender in senders:
            sender()
        self.context.coalescer.flush()

    def put(self, dst: int, kind: int, head: bytes, data: bytes = b"") -> None:
        """Put one entry, unless its rank is gone; with the transport lock held."""
        if dst in self.context.gone:
            self._lost(dst)
        else:
            self.context.coalescer.put(dst, kind, head, data, request=True)

    def located(self, error: BaseException) -> BaseException:
        """Return `error`, which says where it happened."""
        if isinstance(error, AiodistError):
            error.located(rank=self.context.rank, comm=self.context.name, op=None)
        return error
