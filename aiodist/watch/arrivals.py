"""Late ranks: each rank notes when it came to each collective, and the first rank compares.

Once a second, while something is issued, the first rank of the world asks all others when they came to their last
operations, and how their clocks stand. It tells them which rank came last to each that some had to wait for. So each
rank knows by itself what that was, and adds it up. How long a receive waits for its sender the rank notes itself; all
are told. All but the comparison goes on in the listener threads.
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
from aiodist.communicator.base import CAUSE, WaitingCall
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.oplog import OpLog, Record
from aiodist.communicator.watchdog import Watch
from aiodist.control.thread import settle_soon
from aiodist.handles import Handle, Progress, internals
from aiodist.handles.combinators import EndWaiter
from aiodist.watch.clock import Clock, Offset

_TOPIC = "arrivals"
_PAUSE = 1.0  # seconds between two comparisons
_PATIENCE = 2.0  # seconds for the answers
_ROUND_TRIPS = 4  # of clocks, each time
_SHOWN = 8
_SHORT = 1e-3  # seconds in which a receive waits for nobody
_MOST_LEFT = 1 << 14  # operations of a rank that others may still come to

_Stream = tuple[str, str]  # a communicator, and the name of an operation: "" for all that are in the order
Times = NDArray[np.int64]  # (operations, 2): their numbers, and nanoseconds


@dataclass(eq=False)
class _Followed:
    """One communicator of this rank, and what is known of it."""

    dispatcher: Dispatcher
    over: bool = False  # it was closed when the first rank was told of it last
    told: int = 0  # how many of its operations the first rank was told of, without those that have names
    named: dict[tuple[str, int], Record] = field(default_factory=dict)  # of the last ones, by name and use
    received: deque[tuple[str, int, float]] = field(default_factory=lambda: deque(maxlen=_MOST_LEFT))
    """Of receives that are over: the operation, its source, and how long it took; since it was told last."""
    seconds: list[float] = field(default_factory=list)
    by_operation: dict[str, list[float]] = field(default_factory=dict)
    compared: int = 0
    error: float = 0.0

    issued: int = 0  # how many there were when it was told last, with those

    @property
    def log(self) -> OpLog:
        """What was issued on it."""
        return self.dispatcher.oplog

    def find(self, name: str, number: int) -> Record | None:
        """Return the record of an operation, or of that use of a name; None where it is no longer kept."""
        return self.named.get((name, number)) if name else self.log.find(number)

    def tell(self) -> Iterator[tuple[str, bytes]]:
        """Yield when this rank came to what it has issued since the last time: in the order, and of each name."""
        since, self.told = self.told, self.log.seq
        self.issued = self.told + self.dispatcher.names.issued
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
        """Take in (number, last rank, seconds waited) of operations; return what is known now."""
        for number, last, waited in late.tolist():
            record = self.find(name, int(number))
            kind = "" if record is None else f"{record.what.kind} {name!r}" if name else record.what.kind
            self._add(kind, int(last), waited)
        self.compared += compared
        self.error = max(self.error, error)
        return self._known()

    def add_received(self, op: str, src: int, waited: float) -> WaitingCall:
        """Take in how long ranks waited for messages of `src`; return what is known now."""
        self._add(op, src, waited)
        return self._known()

    def time(self, handle: Handle[Any], src: int) -> None:
        """Note how long this receive, which begins, waits for rank `src`."""
        internals.add_observer(handle, EndWaiter(partial(self._received, src, perf_counter()), lambda *_: None))

    def _received(self, src: int, began: float, handle: Handle[Any]) -> None:
        waited = perf_counter() - began
        if waited >= _SHORT and not handle.cancelled():
            self.received.append((handle.op, src, waited))

    def tell_received(self) -> Iterator[tuple[str, int, float]]:
        """Yield how long receives of this rank waited since the last time: in each operation for each rank."""
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

    def _known(self) -> WaitingCall:
        self.seconds = self.seconds or [0.0] * len(self.dispatcher.ranks)
        by_operation = {kind: tuple(seconds) for kind, seconds in self.by_operation.items()}
        return WaitingCall(tuple(self.seconds), by_operation, self.compared, self.error)


class ArrivalTimes:
    """One rank's part in it."""

    def __init__(self, world: Communicator, *, report: bool = False) -> None:
        """With `report` rank 0 says at the end who waited for whom."""
        self._world = world
        registry = self._registry = parts_of(world).registry
        self._waited: dict[str, WaitingCall] = registry.waited
        self._channel = registry.channel
        self._ranks = parts_of(world).dispatcher.ranks
        self._clock = Clock(self._channel, "clock of arrivals", self._ranks)
        self._followed: dict[str, _Followed] = {}
        self._answers: dict[int, Sequence[list[Any]]] = {}
        """By rank: when it came to what, and how long its receives waited for whom."""
        self._all_told: asyncio.Future[None] | None = None
        self._left: dict[_Stream, dict[int, Times]] = {}
        """As the first rank: by rank of the world, when it came to what others have not come to."""
        self._says = report
        self._report = _Report(self._ranks)
        self._round = 0
        self._began = -_PAUSE
        self._task: asyncio.Task[None] | None = None
        for each in registry.dispatchers:
            self.follow(each)
        registry.on_open.append(self.follow)
        self._channel.subscribe(_TOPIC, self._heard)
        self._watch = Watch.of(Progress.current(), self._channel)
        if world.rank == 0:
            self._watch.on_look.append(self._look)

    def follow(self, dispatcher: Dispatcher) -> None:
        """Have the times of a communicator noted."""
        if len(dispatcher.ranks) > 1:
            dispatcher.oplog.timed = True
            dispatcher.names.arrivals = deque(maxlen=_MOST_LEFT)
            self._followed[dispatcher.name] = one = _Followed(dispatcher)
            dispatcher.on_receive = one.time

    def close(self) -> None:
        """Compare nothing any more."""
        if self._says and self._world.rank == 0:
            sys.stderr.write(f"{self}\n")
        self._ignore_looks()
        if self._task is not None:
            self._task.cancel()
        self._registry.on_open.remove(self.follow)
        for one in self._followed.values():
            one.log.timed, one.dispatcher.names.arrivals, one.dispatcher.on_receive = False, None, None
        self._clock.close()
        with suppress(RuntimeError):  # the channel is closed
            self._channel.unsubscribe(_TOPIC)

    def _ignore_looks(self) -> None:
        if self._look in self._watch.on_look:
            self._watch.on_look.remove(self._look)

    # --- as the first rank, on its loop ------------------------------------------------------------------------

    def _look(self) -> None:
        if perf_counter() - self._began >= _PAUSE and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._compare(), name="aiodist-arrivals")

    async def finish(self) -> None:
        """Compare for the last time; collective."""
        await self._world.barrier()
        if self._world.rank == 0:
            self._ignore_looks()
            if self._task is not None:
                await asyncio.wait([self._task])
            await self._compare()
        await self._world.barrier()

    async def _compare(self) -> None:
        """Ask all ranks when they came, and tell them for whom the others waited; raises nothing."""
        self._began = perf_counter()
        with suppress(TimeoutError, RuntimeError):  # a rank is stopped, or gone; the channel is closed
            offsets = await self._clock.measure(_ROUND_TRIPS)
            self._round += 1
            self._answers = {}
            self._all_told = asyncio.get_running_loop().create_future()
            self._channel.broadcast(_TOPIC, ["tell", self._round])
            async with asyncio.timeout(_PATIENCE):
                await self._all_told
            self._answers[self._channel.rank] = self._tell()
            late, received = self._compared(offsets), [each for _, told in self._answers.values() for each in told]
            self._channel.broadcast(_TOPIC, ["know", late, received])
            self._know(late, received)

    def _compared(self, offsets: dict[int, Offset]) -> list[Any]:
        """Return of each communicator what its ranks are to know, as `_Followed.add` takes it."""
        ranks_of: dict[str, list[int]] = {}
        for rank, (told, _) in self._answers.items():
            for comm, name, ranks, times in told:
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
        if what == "tell":
            with suppress(RuntimeError):  # the channel was closed
                self._channel.send(src, _TOPIC, ["told", content, *self._tell()])
        elif what == "know":
            self._know(content, more[0])
        elif content == self._round:
            self._answers[src] = more
            if len(self._answers) == len(self._ranks) - 1 and self._all_told is not None:
                settle_soon(self._all_told)

    def _tell(self) -> tuple[list[Any], list[Any]]:
        """Return, of each communicator, its ranks and when this one came to what was issued since the last time.

        And how long its receives waited for whom.
        """
        told, received = [], []
        for comm, one in list(self._followed.items()):
            if one.over:
                del self._followed[comm]
                continue
            one.over = one.dispatcher.refusal is not None
            before, ranks = one.issued, list(one.dispatcher.ranks)
            told += [[comm, name, ranks, times] for name, times in one.tell()]
            received += [[comm, *each] for each in one.tell_received()]
            self._report.issued += one.issued - before
        return told, received

    def _know(self, late: list[Any], received: list[Any]) -> None:
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
    """For which ranks of the world the others waited, on all communicators of this rank together."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.issued = 0
        self._seconds = dict.fromkeys(ranks, 0.0)
        self._lines: dict[tuple[int, Record | None], float] = {}
        """By rank, and by operation with its line, without its number."""
        self._compared = 0
        self._error = 0.0

    def add(self, one: _Followed, name: str, late: NDArray[np.float64], compared: int, error: float) -> None:
        """As `_Followed.add`, which has taken it in."""
        for number, last, waited in late.tolist():
            rank, record = one.dispatcher.ranks[int(last)], one.find(name, int(number))
            line = rank, None if record is None else Record(0, record.what, record.origin)
            self._seconds[rank] += waited
            self._lines[line] = self._lines.get(line, 0.0) + waited
        self._compared += compared
        self._error = max(self._error, error)

    def add_received(self, rank: int, waited: float) -> None:
        """As `_Followed.add_received`, which has taken it in."""
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
    """Return the numbers of the operations to which all ranks came, and (number, last rank, seconds waited) of some.

    These are the ones for which ranks waited for longer than the clocks may be wrong; waits of all are added up.
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
