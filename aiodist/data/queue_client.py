"""One rank's side of a queue of shards: what it asked for, what it was handed, and what it has used."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiodist.data.queue_machine import Range, Share
from aiodist.data.queue_server import Lap, Wires
from aiodist.errors import AiodistError, MismatchError
from aiodist.handles import Handle, Progress

Ranges = list[Range]

_TELL_SECONDS = 0.02
"""After which the server knows what was used: a message costs 0.1 ms, and loops that only read make many batches."""


@dataclass(eq=False)
class _Asked:
    """An ask that was not answered yet."""

    handle: Handle[Ranges]
    waits_for: dict[int, str] = field(default_factory=dict)


class QueueClient:
    """On the loop's thread; answers come on the listener thread and are handed over to the loop."""

    def __init__(self, wires: Wires, terms: str, comm: str, timeout: float | None) -> None:
        """`terms` must be the same on all ranks; `timeout` is for an answer, in seconds."""
        self._wires = wires
        self._terms = terms
        self._comm = comm
        self._timeout = timeout
        self._progress = Progress.current()
        self._share = Share()
        self._lap = Lap(0, 0, 0)
        self._asks = 0
        self._pending: dict[int, _Asked] = {}
        self._told = 0
        """How many used records the server knows of."""
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
        asked = self._pending[number] = _Asked(handle)
        if self._timeout is not None:
            handle.set_deadline(self._timeout, lambda: asked.waits_for)
        self._wires.ask("take", self._lap, number, waits, self._terms)
        return handle

    def use(self, count: int) -> None:
        """Note that the next `count` records are used, and tell the server soon: once for many small batches."""
        self._share.use(self._share.total + count)
        if not self._telling:
            self._telling = True
            self._progress.loop.call_later(_TELL_SECONDS, self._tell)

    def _tell(self) -> None:
        self._telling = False
        if self._refusal is None and self._told != self._share.total:
            self._told = self._share.total
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
            asked.handle.reject(error)
        self._pending.clear()

    def _heard(self, _: int, message: list[Any]) -> None:
        """On the listener thread."""
        self._progress.on_loop(partial(self._answered, *message))

    def _answered(self, what: str, number: int, said: Any) -> None:  # noqa: ANN401
        if what == "hold":
            if number in self._pending:
                self._pending[number].waits_for = {rank: f"holds {count} records" for rank, count in said}
            return
        asked = self._pending.pop(number, None)
        if asked is None:
            return  # this rank gave back what was on its way
        if what == "hand":
            ranges = [Range(*each) for each in said]
            self._share.held.extend(ranges)
            asked.handle.resolve(ranges)
        else:
            asked.handle.reject(MismatchError(f"ranks disagree on a queue of shards: {said}", comm=self._comm))
