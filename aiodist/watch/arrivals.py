"""Finds late ranks: the first rank compares the arrival times of all ranks at each collective.

Once a second, while operations are pending, the first rank of the world measures the clocks of the others, and asks for
the arrival times at the last operations. The first rank then sends all ranks, for each late operation, the rank that
came last and the seconds waited. Each rank adds up these seconds by the lines of its own log. A rank measures the waits
of its own receives, and the first rank sends these waits to all. Everything except the comparison runs in the listener
threads.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.facts import CAUSE, WaitingCall
from aiodist.communicator.oplog import IssueRecord, OpLog
from aiodist.communicator.watchdog import Watch
from aiodist.control.thread import settle_soon
from aiodist.handles import Handle, Progress, internals
from aiodist.handles.combinators import EndWaiter
from aiodist.watch.clock import Clock, Offset

_TOPIC = "arrivals"
_PAUSE = 1.0  # seconds between two comparisons
_ANSWER_SECONDS = 2.0  # longest wait for the answers
_ROUND_TRIPS = 4  # per measurement of the clocks
_SHOWN = 8
_SHORT = 1e-3  # seconds (shorter waits of receives are not counted)
_MOST_LEFT = 1 << 14  # operations of a rank that others have not reached

_Stream = tuple[str, str]  # (communicator, name of an operation), or "" for operations without a name
Times = NDArray[np.int64]  # (operations, 2): numbers, and nanoseconds


@dataclass(eq=False)
class _Followed:
    """One communicator of this rank, with its waits."""

    dispatcher: Dispatcher
    closed: bool = False  # closed at the last report
    reported: int = 0  # operations without a name that the first rank knows
    named: dict[tuple[str, int], IssueRecord] = field(default_factory=dict)  # last named operations, by name and use
    received: deque[tuple[str, int, float]] = field(default_factory=lambda: deque(maxlen=_MOST_LEFT))
    """Finished receives since the last report: operation, source, and seconds."""
    seconds: list[float] = field(default_factory=list)
    by_operation: dict[str, list[float]] = field(default_factory=dict)
    compared: int = 0
    error: float = 0.0

    issued: int = 0  # operations at the last report, with named ones

    @property
    def log(self) -> OpLog:
        """Log of the operations."""
        return self.dispatcher.oplog

    def find(self, name: str, number: int) -> IssueRecord | None:
        """Return the record of an operation or of a use of a name, or None for a discarded one."""
        return self.named.get((name, number)) if name else self.log.find(number)

    def new_arrivals(self) -> Iterator[tuple[str, bytes]]:
        """Yield the arrival times since the last report: first of operations without a name, then by name."""
        since, self.reported = self.reported, self.log.seq
        self.issued = self.reported + self.dispatcher.names.issued
        yield "", self.log.arrivals(since)
        arrivals, found = self.dispatcher.names.arrivals, dict[str, list[tuple[int, int]]]()
        while arrivals:
            use, came = arrivals.popleft()
            found.setdefault(use.name, []).append((use.count, came))
            assert use.record is not None
            self.named[use.name, use.count] = use.record
        while len(self.named) > _MOST_LEFT:
            del self.named[next(iter(self.named))]
        for name, times in found.items():
            yield name, np.array(times, np.int64).tobytes()

    def add(self, name: str, late: NDArray[np.float64], compared: int, error: float) -> WaitingCall:
        """Add late operations, each as (number, last rank, seconds waited). Return the sums."""
        for number, last, waited in late.tolist():
            record = self.find(name, int(number))
            kind = "" if record is None else f"{record.what.kind} {name!r}" if name else record.what.kind
            self._add(kind, int(last), waited)
        self.compared += compared
        self.error = max(self.error, error)
        return self._sums()

    def add_received(self, op: str, src: int, waited: float) -> WaitingCall:
        """Add seconds that ranks waited for messages of `src`. Return the sums."""
        self._add(op, src, waited)
        return self._sums()

    def time(self, handle: Handle[Any], src: int) -> None:
        """Measure the wait of a starting receive for rank `src`."""
        internals.add_observer(handle, EndWaiter(partial(self._received, src, perf_counter()), lambda *_: None))

    def _received(self, src: int, began: float, handle: Handle[Any]) -> None:
        waited = perf_counter() - began
        if waited >= _SHORT and not handle.cancelled():
            self.received.append((handle.op, src, waited))

    def new_receives(self) -> Iterator[tuple[str, int, float]]:
        """Yield the waits of this rank's receives since the last report: operation, source, and seconds."""
        found: dict[tuple[str, int], float] = {}
        while self.received:
            op, src, waited = self.received.popleft()
            found[op, src] = found.get((op, src), 0.0) + waited
        yield from ((op, src, waited) for (op, src), waited in found.items())

    def _add(self, kind: str, rank: int, waited: float) -> None:
        size = len(self.dispatcher.ranks)
        self.seconds = self.seconds or [0.0] * size
        self.seconds[rank] += waited
        self.by_operation.setdefault(kind, [0.0] * size)[rank] += waited

    def _sums(self) -> WaitingCall:
        self.seconds = self.seconds or [0.0] * len(self.dispatcher.ranks)
        by_operation = {kind: tuple(seconds) for kind, seconds in self.by_operation.items()}
        return WaitingCall(tuple(self.seconds), by_operation, self.compared, self.error)


class ArrivalTimes:
    """One rank's part in the comparison."""

    def __init__(self, world: Communicator, *, report: bool = False) -> None:
        """True for `report` lets rank 0 print the late ranks at the end."""
        self._world = world
        registry = self._registry = parts_of(world).registry
        self._waited: dict[str, WaitingCall] = registry.resources.waited
        self._channel = registry.channel
        self._ranks = parts_of(world).dispatcher.ranks
        self._clock = Clock(self._channel, "clock of arrivals", self._ranks)
        self._followed: dict[str, _Followed] = {}
        self._answers: dict[int, Sequence[list[Any]]] = {}
        """Arrival times and waits of receives, by rank."""
        self._all_answered: asyncio.Future[None] | None = None
        self._left: dict[_Stream, dict[int, Times]] = {}
        """On the first rank: arrival times at operations that not all ranks have reached, by world rank."""
        self._prints = report
        self._report = _Report(self._ranks)
        self._round = 0
        self._began = -_PAUSE
        self._task: asyncio.Task[None] | None = None
        for each in registry.members.dispatchers:
            self.follow(each)
        registry.members.on_open.append(self.follow)
        self._channel.subscribe(_TOPIC, self._heard)
        self._watch = Watch.of(Progress.current(), self._channel)
        if world.rank == 0:
            self._watch.on_look.append(self._look)

    def follow(self, dispatcher: Dispatcher) -> None:
        """Record the arrival times of a communicator."""
        if len(dispatcher.ranks) > 1:
            dispatcher.oplog.timed = True
            dispatcher.names.arrivals = deque(maxlen=_MOST_LEFT)
            self._followed[dispatcher.name] = one = _Followed(dispatcher)
            dispatcher.watchdog.on_receive = one.time

    def close(self) -> None:
        """Stop the comparisons."""
        if self._prints and self._world.rank == 0:
            sys.stderr.write(f"{self}\n")
        self._ignore_looks()
        if self._task is not None:
            self._task.cancel()
        self._registry.members.on_open.remove(self.follow)
        for one in self._followed.values():
            one.log.timed, one.dispatcher.names.arrivals, one.dispatcher.watchdog.on_receive = False, None, None
        self._clock.close()
        with suppress(RuntimeError):  # the channel is closed
            self._channel.unsubscribe(_TOPIC)

    def _ignore_looks(self) -> None:
        if self._look in self._watch.on_look:
            self._watch.on_look.remove(self._look)

    # --- on the first rank, on its loop ------------------------------------------------------------------------

    def _look(self) -> None:
        if perf_counter() - self._began >= _PAUSE and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._compare(), name="aiodist-arrivals")

    async def finish(self) -> None:
        """Compare a last time. Collective."""
        await self._world.barrier()
        if self._world.rank == 0:
            self._ignore_looks()
            if self._task is not None:
                await asyncio.wait([self._task])
            await self._compare()
        await self._world.barrier()

    async def _compare(self) -> None:
        """Compare the arrival times of all ranks, and send the late ranks to all. Raises nothing."""
        self._began = perf_counter()
        with suppress(TimeoutError, RuntimeError):  # a rank is stopped or lost, or the channel is closed
            offsets = await self._clock.measure(_ROUND_TRIPS)
            self._round += 1
            self._answers = {}
            self._all_answered = asyncio.get_running_loop().create_future()
            self._channel.broadcast(_TOPIC, ["ask", self._round])
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._all_answered
            self._answers[self._channel.rank] = self._answer()
            late, received = self._compared(offsets), [each for _, waits in self._answers.values() for each in waits]
            self._channel.broadcast(_TOPIC, ["result", late, received])
            self._add(late, received)

    def _compared(self, offsets: dict[int, Offset]) -> list[Any]:
        """Return the late ranks of each communicator, as arguments of `_Followed.add`."""
        ranks_of: dict[str, list[int]] = {}
        for rank, (arrivals, _) in self._answers.items():
            for comm, name, ranks, times in arrivals:
                ranks_of[comm] = ranks
                came = np.frombuffer(times, np.int64).reshape(-1, 2).copy()
                came[:, 1] += round(offsets[rank].seconds * 1e9)
                left = self._left.setdefault((comm, name), {})
                left[rank] = np.concatenate([left[rank], came])[-_MOST_LEFT:] if rank in left else came
        self._left = {stream: left for stream, left in self._left.items() if stream[0] in ranks_of}
        found = []
        for (comm, name), left in self._left.items():
            ranks = ranks_of[comm]
            error = 2 * max(offsets[rank].error for rank in ranks)
            if error < float("inf") and left.keys() >= set(ranks):
                numbers, late = lateness([left[rank] for rank in ranks], error)
                if len(numbers):
                    found.append([comm, name, late.tobytes(), len(numbers), error])
                    for rank in ranks:
                        left[rank] = left[rank][left[rank][:, 0] > numbers[-1]]
        return found

    # --- on the listener threads ---------------------------------------------------------------------------------

    def _heard(self, src: int, message: list[Any]) -> None:
        what, content, *more = message
        if what == "ask":
            with suppress(RuntimeError):  # the channel was closed
                self._channel.send(src, _TOPIC, ["answer", content, *self._answer()])
        elif what == "result":
            self._add(content, more[0])
        elif content == self._round:
            self._answers[src] = more
            if len(self._answers) == len(self._ranks) - 1 and self._all_answered is not None:
                settle_soon(self._all_answered)

    def _answer(self) -> tuple[list[Any], list[Any]]:
        """Return the new arrival times and the new waits of receives, of all communicators."""
        arrivals, received = [], []
        for comm, one in list(self._followed.items()):
            if one.closed:
                del self._followed[comm]
                continue
            one.closed = one.dispatcher.lifetime.refusal is not None
            before, ranks = one.issued, list(one.dispatcher.ranks)
            arrivals += [[comm, name, ranks, times] for name, times in one.new_arrivals()]
            received += [[comm, *each] for each in one.new_receives()]
            self._report.issued += one.issued - before
        return arrivals, received

    def _add(self, late: list[Any], received: list[Any]) -> None:
        for comm, op, src, waited in received:
            if (one := self._followed.get(comm)) is not None:
                self._waited[comm] = one.add_received(op, src, waited)
                self._report.add_received(one.dispatcher.ranks[src], waited)
        for comm, name, rows, compared, error in late:
            if (one := self._followed.get(comm)) is not None:
                late_ones = np.frombuffer(rows).reshape(-1, 3)
                self._waited[comm] = one.add(name, late_ones, compared, error)
                self._report.add(one, name, late_ones, compared, error)

    def __str__(self) -> str:
        return str(self._report)


class _Report:
    """Waits for each rank of the world, summed over all communicators of this rank."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.issued = 0
        self._seconds = dict.fromkeys(ranks, 0.0)
        self._lines: dict[tuple[int, IssueRecord | None], float] = {}
        """Seconds by rank, and by operation with line (the record without the number)."""
        self._compared = 0
        self._error = 0.0

    def add(self, one: _Followed, name: str, late: NDArray[np.float64], compared: int, error: float) -> None:
        """Add late operations, as `_Followed.add` does."""
        for number, last, waited in late.tolist():
            rank, record = one.dispatcher.ranks[int(last)], one.find(name, int(number))
            line = rank, None if record is None else IssueRecord(0, record.what, record.origin)
            self._seconds[rank] += waited
            self._lines[line] = self._lines.get(line, 0.0) + waited
        self._compared += compared
        self._error = max(self._error, error)

    def add_received(self, rank: int, waited: float) -> None:
        """Add seconds of receives, as `_Followed.add_received` does."""
        self._seconds[rank] += waited
        self._lines[rank, None] = self._lines.get((rank, None), 0.0) + waited

    def __str__(self) -> str:
        clocks = f"by clocks to {self._error * 1e6:.0f} us"
        text = [f"who waited for whom: {self._compared} of {self.issued} collectives compared, {clocks}"]
        total = sum(self._seconds.values())
        for rank, waited in sorted(self._seconds.items(), key=lambda each: -each[1])[:_SHOWN]:
            if waited > 0:
                text.append(f"  others waited for rank {rank}: {waited:.3f} s, {waited / total:.0%} of all waiting")
        most = CAUSE * total
        cause = next((rank for rank, waited in self._seconds.items() if waited >= most > 0), None)
        if cause is not None:
            where = next((line for (r, line), waited in self._lines.items() if r == cause and waited >= most), None)
            text.append(
                f"  the cause is rank {cause}{'' if where is None else f', which comes late to {where.text()}'}"
            )
        elif total:
            text.append("  no rank alone is the cause")
        return "\n".join(text)


def lateness(came: Sequence[Times], error: float) -> tuple[Times, NDArray[np.float64]]:
    """Return the numbers of operations that all ranks have reached, and (number, last rank, seconds) of late ones.

    An operation is late if the arrivals differ by more than the error of the clocks. Seconds are summed over ranks.
    """
    numbers = reduce(np.intersect1d, [one[:, 0] for one in came])
    times = np.stack([_times(one, numbers) for one in came])  # (ranks, operations)
    last = times.argmax(0)
    counts = times.max(0) - times.min(0) > error * 1e9
    waited = (times.max(0) - times).sum(0) * 1e-9
    return numbers, np.stack([numbers, last, waited], 1)[counts].astype(np.float64)


def _times(one: Times, numbers: Times) -> Times:
    _, first = np.unique(one[:, 0], return_index=True)
    one = one[first]
    times: Times = one[np.searchsorted(one[:, 0], numbers), 1]
    return times
