"""One rank's side of a queue of shards: what it asked for, what it was handed, and what it has used."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from aiodist.data.queue_machine import Range, Share
from aiodist.data.queue_server import Lap, Wires
from aiodist.errors import AiodistError, MismatchError
from aiodist.handles import Handle, Progress

Ranges = list[Range]

_log = logging.getLogger("aiodist")

_AGAIN_SECONDS = 60.0  # between two reports of the same wait
_TELL_SECONDS = 0.02
"""Between two words of what was used: a message costs 0.1 ms, and loops that only read make many batches."""


@dataclass(eq=False)
class _Asked:
    """An ask that was not answered yet."""

    handle: Handle[Ranges]
    report: asyncio.TimerHandle | None = None
    waits_for: dict[int, str] = field(default_factory=dict)


class QueueClient:
    """On the loop's thread; answers come on the listener thread and are handed over to the loop."""

    def __init__(self, wires: Wires, terms: str, comm: str, *, timeout: float | None, report: float | None) -> None:
        """`terms` must be the same on all ranks. An answer that has not come is an error after `timeout` seconds.

        After `report` seconds `logging` is told of it. None is never, for both.
        """
        self._wires = wires
        self._terms = terms
        self._comm = comm
        self._timeout = timeout
        self._report_after = report
        self._progress = Progress.current()
        self._share = Share()
        self._lap = Lap(0, 0, 0)
        self._asks = 0
        self._pending: dict[int, _Asked] = {}
        self._told = 0
        """How many used records the server knows of."""
        self._told_at = -inf
        self._telling = False
        self._refusal: AiodistError | None = None
        wires.channel.subscribe(wires.answers, self._heard)

    @property
    def lap(self) -> Lap:
        """Where this rank is."""
        return self._lap

    @property
    def used(self) -> list[Range]:
        """The positions that this rank has used in this lap."""
        return self._share.used

    def begin(self, lap: Lap) -> None:
        """Give back what is held, and go on to another lap."""
        self.hand_back()
        self._lap, self._share, self._told = lap, Share(), 0

    def take(self, *, waits: bool = False) -> Handle[Ranges]:
        """Return a handle of the next records' positions, empty where there are none to be had."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        number = self._asks
        self._asks += 1
        handle: Handle[Ranges] = Handle(self._progress, "records from the queue", number)
        handle.polled = False
        handle.detach()  # a pass asks ahead, and may be left then
        asked = self._pending[number] = _Asked(handle)
        if self._timeout is not None:
            handle.set_deadline(self._timeout, lambda: asked.waits_for)
        self._report_later(asked, self._report_after)
        self._wires.ask("take", self._lap, number, waits, self._terms)
        return handle

    def _report_later(self, asked: _Asked, seconds: float | None) -> None:
        if seconds is not None:
            asked.report = self._progress.loop.call_later(seconds, self._report, asked)

    def _report(self, asked: _Asked) -> None:
        """Say for whom this rank waits."""
        rank = self._wires.channel.rank
        whom = asked.waits_for or {self._wires.ranks[0]: "has not answered, or not made or loaded its queue yet"}
        late = "; ".join(f"rank {other} {what}" for other, what in whom.items())
        _log.warning("rank %d has long waited for records of %s: %s", rank, self._wires.name, late)
        self._report_later(asked, _AGAIN_SECONDS)

    def use(self, count: int) -> None:
        """Note that the next `count` records are used, and tell the server soon: once for many small batches."""
        self._share.use(self._share.total + count)
        if not self._telling:
            self._telling = True
            loop = self._progress.loop
            loop.call_later(max(0.0, self._told_at + _TELL_SECONDS - loop.time()), self._tell)

    def _tell(self) -> None:
        self._telling = False
        if self._refusal is None and self._told != self._share.total:
            self._told, self._told_at = self._share.total, self._progress.loop.time()
            self._wires.ask("used", self._lap, self._told)

    def hand_back(self) -> None:
        """Give back what is handed to this rank, or on its way, and not used."""
        if self._refusal is not None:
            return
        if not self._share.held and not self._pending:
            self._tell()
            return
        self._share.hand_back()
        pending, self._pending = self._pending, {}
        self._told = self._share.total
        self._wires.ask("hand back", self._lap, self._told)
        for asked in pending.values():
            _cancel_report(asked)
            asked.handle.resolve([])

    def close(self, error: AiodistError, *, orderly: bool) -> None:
        """Refuse every later call with `error`; unless it is `orderly`, so end those that wait."""
        if self._refusal is not None:
            return
        if orderly:
            self.hand_back()
            self._wires.ask("bye")
        self._refusal = error
        self._wires.channel.unsubscribe(self._wires.answers)
        for asked in self._pending.values():
            _cancel_report(asked)
            asked.handle.reject(error)
            asked.handle.exception()  # who waits is told, and if nobody does it is no news
        self._pending.clear()

    def _heard(self, _: int, message: list[Any]) -> None:
        """On the listener thread."""
        self._progress.on_loop(partial(self._answered, *message))

    def _answered(self, what: str, number: int, said: Any) -> None:  # noqa: ANN401
        if what == "hold":
            if number in self._pending:
                self._pending[number].waits_for = {
                    self._wires.ranks[rank]: f"holds {count} records" for rank, count in said
                }
            return
        asked = self._pending.pop(number, None)
        if asked is None:
            return  # this rank gave back what was on its way
        _cancel_report(asked)
        if what == "hand":
            ranges = [Range(*each) for each in said]
            self._share.held.extend(ranges)
            asked.handle.resolve(ranges)
        else:
            asked.handle.reject(MismatchError(f"ranks disagree on a queue of shards: {said}", comm=self._comm))


def _cancel_report(asked: _Asked) -> None:
    if asked.report is not None:
        asked.report.cancel()
