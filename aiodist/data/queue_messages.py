"""Messages between the queue's clients and its server on rank 0."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from threading import Lock
from typing import Any, NamedTuple

from aiodist.control import Channel, disagreement
from aiodist.data.queue_machine import Hand, Instruction, QueueMachine, Range, Share
from aiodist.errors import AiodistError, MismatchError
from aiodist.handles import Handle, Operation, Progress
from aiodist.pauses import deadline_clock

Ranges = list[Range]

_log = logging.getLogger("aiodist")

_AGAIN_SECONDS = 60.0  # between two reports of the same wait
_TELL_SECONDS = 0.02
"""Time between two reports of used records; a message costs 0.1 ms, and loops that only read make many batches."""


@dataclass(frozen=True)
class Wires:
    """The message channel of one queue."""

    channel: Channel
    ranks: Sequence[int]
    """World ranks of the queue, in order."""
    name: str

    @property
    def asks(self) -> str:
        return f"{self.name}: asks"

    @property
    def answers(self) -> str:
        return f"{self.name}: answers"

    def ask(self, what: str, *said: Any) -> None:  # noqa: ANN401
        self.channel.send(self.ranks[0], self.asks, [what, *said])

    def answer(self, rank: int, what: str, *said: Any) -> None:  # noqa: ANN401
        self.channel.send(self.ranks[rank], self.answers, [what, *said])


class Lap(NamedTuple):
    """The epoch of a rank. All ranks begin the same laps in the same order, each at its own time."""

    number: int
    """Number of epochs and loaded states begun before."""
    epoch: int
    loaded: int
    """CRC-32 of the loaded state, or 0."""

    def __str__(self) -> str:
        state = f", with the loaded state {self.loaded:08x}" if self.loaded else ""
        return f"epoch {self.epoch} after {self.number} others{state}"


class QueueServer:
    """Gives each message to the machine of its lap, and sends the answers.

    The server is on the first rank, on the listener thread of the control channel, so it answers while the program of
    that rank computes. The first request of any rank begins a lap.
    """

    def __init__(
        self,
        wires: Wires,
        terms: str,
        machine: Callable[[int, Iterable[Range]], QueueMachine],
        over: Callable[[], None],
    ) -> None:
        """`machine(epoch, used)` makes a machine. `over` is called once after all ranks have left, on any thread."""
        self._wires = wires
        self._terms = terms
        self._make = machine
        self._over = over
        self._lock = Lock()
        self._laps: dict[int, tuple[Lap, QueueMachine]] = {}
        self._reached = dict.fromkeys(range(len(wires.ranks)), 0)
        """Number of the last lap of each present rank."""
        wires.channel.subscribe(wires.asks, self._heard)

    @property
    def present(self) -> list[int]:
        return list(self._reached)

    def used(self, lap: Lap) -> list[Range]:
        """Return the records that ranks have reported as used in `lap`."""
        with self._lock:
            known, machine = self._laps.get(lap.number, (None, None))
            return machine.used if machine is not None and known == lap else []

    def lose(self, rank: int) -> None:
        """Hand the records of a lost rank to others (loop)."""
        with self._lock:
            for _, machine in self._laps.values():
                self._perform(machine.hand_back(rank, None))
            self._leave(rank)

    def unsubscribe(self) -> None:
        self._wires.channel.unsubscribe(self._wires.asks)

    def _heard(self, world_rank: int, message: list[Any]) -> None:
        """On the listener thread."""
        rank = self._wires.ranks.index(world_rank)
        what, *said = message
        with self._lock:
            if rank not in self._reached:
                return  # a lost rank, whose late messages do not count
            if what == "bye":
                self._leave(rank)
                return
            lap = Lap(*said[0])
            if what == "take":
                self._take(rank, lap, *said[1:])
                return
            known, machine = self._laps.get(lap.number, (None, None))
            if machine is not None and known == lap:  # else it holds nothing
                self._perform((machine.use if what == "used" else machine.hand_back)(rank, said[1]))

    def _take(self, rank: int, lap: Lap, number: int, waits: bool, terms: str, used: list[list[int]]) -> None:
        subject = f"queue {self._wires.name!r}"
        if terms != self._terms:
            self._wires.answer(rank, "refuse", number, disagreement(subject, {rank: terms, 0: self._terms}))
            return
        if lap.number not in self._laps:
            self._laps[lap.number] = lap, self._make(lap.epoch, (Range(*each) for each in used))
        known, machine = self._laps[lap.number]
        if known != lap:
            why = f"{disagreement(subject, {rank: str(lap)})}; another rank: {known}"
            self._wires.answer(rank, "refuse", number, why)
            return
        self._reached[rank] = lap.number
        oldest = min(self._reached.values())
        self._laps = {number: each for number, each in self._laps.items() if number >= oldest}
        self._perform(machine.take(rank, number, waits))

    def _perform(self, instructions: list[Instruction]) -> None:
        for told in instructions:
            if isinstance(told, Hand):
                self._wires.answer(told.rank, "hand", told.number, told.ranges)
            else:
                self._wires.answer(told.rank, "hold", told.number, list(told.holders.items()))

    def _leave(self, rank: int) -> None:
        self._reached.pop(rank, None)
        if not self._reached:
            self._over()


class QueueClient:
    """On the loop's thread; answers come on the listener thread and are handed over to the loop. One ask at a time."""

    def __init__(self, wires: Wires, terms: str, comm: str, *, timeout: float | None, report: float | None) -> None:
        """`terms` must be equal on all ranks.

        A missing answer is logged after `report` seconds, and an error after `timeout` seconds, each unless None.
        """
        self._wires = wires
        self._terms = terms
        self._comm = comm
        self._timeout = timeout
        self._report_after = report
        self._progress = Progress.current()
        self._share = Share()
        self.lap = Lap(0, 0, 0)
        """The lap of this rank."""
        self._before: Sequence[Range] = ()
        self._asks = 0
        self._asked: Operation[Ranges] | None = None
        """The last ask, which was not answered yet."""
        self._waits_for: dict[int, str] = {}
        self._reporter: asyncio.TimerHandle | None = None
        self._told = 0
        """How many used records the server knows of."""
        self._told_at = -inf
        self._telling = False
        self._refusal: AiodistError | None = None
        wires.channel.subscribe(wires.answers, self._heard)

    @property
    def used(self) -> list[Range]:
        return self._share.used

    def begin(self, lap: Lap, before: Sequence[Range]) -> None:
        """Return unused records, and begin a lap whose records `before` are used already."""
        self.hand_back()
        self.lap, self._before, self._share, self._told = lap, before, Share(), 0

    def take(self, *, waits: bool = False) -> Handle[Ranges]:
        """Return a handle of the next records' positions, empty where there are none to be had."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        self._asks += 1
        operation: Operation[Ranges] = Operation(self._progress, "records from the queue", self._asks, polled=False)
        self._asked = operation
        operation.handle.detach()  # a pass asks ahead, and may be left then
        self._waits_for = {}
        if self._timeout is not None:
            operation.set_deadline(self._timeout, lambda: self._waits_for)
        self._report_after_seconds(self._report_after)
        self._wires.ask("take", self.lap, self._asks, waits, self._terms, self._before)
        self._before = ()  # the server knows it now
        return operation.handle

    def _report_after_seconds(self, seconds: float | None) -> None:
        if seconds is not None:
            self._reporter = self._progress.loop.call_later(seconds, self._report)

    def _report(self) -> None:
        if deadline_clock.stands:
            self._report_after_seconds(self._report_after)
            return
        rank = self._wires.channel.rank
        whom = self._waits_for or {self._wires.ranks[0]: "has not answered"}
        late = "; ".join(f"rank {other} {what}" for other, what in whom.items())
        _log.warning("rank %d has long waited for records of %s: %s", rank, self._wires.name, late)
        self._report_after_seconds(_AGAIN_SECONDS)

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
            self._wires.ask("used", self.lap, self._told)

    def hand_back(self) -> None:
        """Return this rank's unused records, those of hand-outs in flight too."""
        if self._refusal is not None:
            return
        if not self._share.held and self._asked is None:
            self._tell()
            return
        self._share.hand_back()
        self._told = self._share.total
        self._wires.ask("hand back", self.lap, self._told)
        if (asked := self._answered()) is not None:
            asked.resolve([])

    def close(self, error: AiodistError, *, orderly: bool) -> None:
        """Refuse later calls, and end a pending request, with `error`. `orderly` returns unused records first."""
        if self._refusal is not None:
            return
        if orderly:
            self.hand_back()
            self._wires.ask("bye")
        self._refusal = error
        self._wires.channel.unsubscribe(self._wires.answers)
        if (asked := self._answered()) is not None:
            asked.reject(error)
            asked.mark_retrieved()  # only code that waits needs the error

    def _answered(self) -> Operation[Ranges] | None:
        """Return the pending request, and forget it."""
        if self._reporter is not None:
            self._reporter.cancel()
        asked, self._asked = self._asked, None
        return asked

    def _heard(self, _: int, message: list[Any]) -> None:
        """On the listener thread."""
        self._progress.on_loop(partial(self._hear, *message))

    def _hear(self, what: str, number: int, said: Any) -> None:  # noqa: ANN401
        if self._asked is None or number != self._asked.handle.seq:
            return  # this rank has returned these records
        if what == "hold":
            self._waits_for = {self._wires.ranks[rank]: f"holds {count} records" for rank, count in said}
            return
        asked = self._answered()
        assert asked is not None
        if what == "hand":
            ranges = [Range(*each) for each in said]
            self._share.held.extend(ranges)
            asked.resolve(ranges)
        else:
            asked.reject(MismatchError(said, comm=self._comm))
