"""The client of one rank: its pushes, pulls and calls, what servers say to them, and what happens when one is gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from aiodist.backends.base import DTYPES, Done
from aiodist.collectives.program import Program
from aiodist.errors import AiodistError
from aiodist.handles import Handle
from aiodist.ps import wire
from aiodist.ps.calls import Calls, error_of
from aiodist.ps.codes import Codes
from aiodist.ps.context import Context
from aiodist.ps.names import NameEntry, Span
from aiodist.ps.pulls import Pulls
from aiodist.ps.pushes import Pushes
from aiodist.ps.request_queue import RequestQueue
from aiodist.ps.wire import Kind

__all__ = ["Client"]


class Client:
    """What the calls of a parameter server ask for; what is `heard` comes with the transport lock held."""

    def __init__(self, context: Context, own: dict[tuple[int, int], Tensor], shown: Callable[[int], Tensor]) -> None:
        """`own` is where the server of this very rank finds what is pushed to it, `shown` its shards' memory."""
        self._context = context
        self.queue = RequestQueue(context, self.lose)
        self.codes = Codes(context)
        self.calls = Calls(self.queue)
        self.pushes = Pushes(self.queue, self.codes, own, self._one_over)
        self.pulls = Pulls(self.queue, self.codes, shown, self._one_over)
        self.programs: set[Handle[Any]] = set()
        """Calls of several steps that are not over."""
        self._watched: dict[NameEntry, Done] = {}

    @property
    def busy(self) -> bool:
        """Something is not over."""
        return bool(self.pushes.busy or self.pulls.busy or self.programs)

    def late(self) -> dict[int, str]:
        """Return the servers that have not answered, and what they were asked."""
        return self.calls.late() | self.pulls.late() | self.pushes.late()

    def filling(self, entry: NameEntry, value: Tensor, spans: Sequence[Span]) -> Program[None]:
        """Make the shards `spans` of `entry` and give them the first values."""
        servers = [span.rank for span in entry.spans]
        yield [
            self.calls.tell(
                span.rank,
                "make",
                key=entry.key,
                name=entry.name,
                dtype=DTYPES.index(entry.dtype),
                numel=span.stop - span.start,
                servers=servers,
                rule=entry.rule_number,
                codec=entry.codec is not None,
            )
            for span in spans
        ]
        yield [partial(self.pushes.fill, entry, span, value) for span in spans]

    def waits(self) -> None:
        """Tell all servers that this worker waits until its pushes are applied."""
        number = self.queue.number()

        def say() -> None:
            if not self.pushes.busy:
                return
            body = json.dumps({"op": "sync", "n": number}).encode()
            for rank in self._context.servers:
                if rank not in self._context.gone:
                    self._context.coalescer.put(rank, Kind.CALL, body, request=True)

        self.queue.issue((say,))

    def when_over(self, entry: NameEntry, done: Done) -> None:
        """Call `done` when all pushes and pulls of one tensor are over, and nothing is kept of it."""
        if entry.open:
            self._watched[entry] = done
            return
        self.codes.forget(entry)
        done(None)

    def _one_over(self, entry: NameEntry) -> None:
        if self._watched and not entry.open and (done := self._watched.pop(entry, None)) is not None:
            self.when_over(entry, done)

    def heard(self, src: int, kind: int, body: memoryview) -> None:
        """Take one entry that is meant for a client."""
        if kind == Kind.DONE:
            number, _, stage = wire.Done.unpack(body)
            self.pushes.done(src, number, stage)
        elif kind == Kind.DATA:
            self.pulls.data(src, body)
        else:
            said = json.loads(bytes(body))
            error = error_of(said, src)
            answered = self.calls.answered(src, said, error)
            if error is not None and not answered and not self.pushes.refuse(said["n"], error):
                self.pulls.refuse(said["n"], src, error)

    def lose(self, rank: int) -> None:
        """`rank` died: what it should have answered never comes."""
        error = self._context.lost(rank)
        self.pushes.lose(rank, error)
        self.pulls.lose(rank, error)
        self.calls.lose(rank, error)

    def abort(self, error: AiodistError) -> None:
        """Fail everything."""
        self.pushes.abort(error)
        self.pulls.abort(error)
        self.calls.abort(error)
        for handle in list(self.programs):  # those too that have not begun
            if not handle.done():
                handle.reject(error)
