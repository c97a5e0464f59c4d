"""Reads the numbers of a rank for metrics, and answers scrapes for all ranks on rank 0.

A thread looks each second. A read takes no lock that the program takes, and each number has one writer, so a scrape
never blocks the program, and does not wait for its event loop.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from time import monotonic, time
from typing import Any

from aiodist.communicator import Communicator, parts_of
from aiodist.communicator.counts import Count
from aiodist.communicator.dispatcher import Dispatcher
from aiodist.communicator.resources import MOST_CLOSED
from aiodist.control import Channel
from aiodist.errors import BackendUnavailable
from aiodist.handles import internals
from aiodist.handles.timers import Quiet
from aiodist.threads import OwnThread
from aiodist.watch.exposition import Collector, MetricsServer, Otlp, Sample, Target

LOOK_SECONDS = 1.0
"""Time between two looks of the thread, in seconds."""
_TOPIC = "metrics"
_LAGS = 15  # looks
_WRITE_LOOKS = 5  # between two files
_ANSWER_SECONDS = 1.0  # longest wait of a scrape for the other ranks
_UP = Sample("aiodist_rank_up", 1)


@contextmanager
def measured(world: Communicator, where: str, otlp_interval: float | None = None) -> Iterator[int]:
    """Publish the numbers of this rank in the block, at the place `where` (see `Target`), and by OTLP if wanted.

    The block gives the port of this rank's endpoint, or 0 without one.
    """
    target, channel = Target.parse(where, otlp=otlp_interval is not None), parts_of(world).registry.channel
    meter, rank, port = RankNumbers(world), channel.rank, 0
    with ExitStack() as stack:
        if otlp_interval is not None:
            with nullcontext() if target == Target() else suppress(BackendUnavailable):
                stack.callback(Otlp(rank, lambda: [_UP, *meter.read()], otlp_interval).close)
        if target.folder is not None:
            target.folder.mkdir(parents=True, exist_ok=True)
            collector, path = Collector(lambda: {rank: [_UP, *meter.read()]}), target.folder / f"rank-{rank}.prom"
            meter.write = lambda: collector.write(path)
            stack.callback(meter.write)
        if target.port is not None:
            answers = _Answers(channel, meter)
            stack.callback(answers.close)
            if rank == 0:
                endpoint = MetricsServer(target, Collector(answers.ask).registry)
                stack.callback(endpoint.close)
                port = endpoint.server_address[1]
                if target.port == 0:
                    sys.stderr.write(f"metrics: http://{target.host or socket.gethostname()}:{port}/metrics\n")
        meter.start()
        stack.callback(meter.close)  # first, so that the last file is the newest
        yield port


class RankNumbers(Quiet):
    """The numbers of one rank."""

    def __init__(self, world: Communicator) -> None:
        registry = parts_of(world).registry
        self.write: Callable[[], object] = lambda: None
        """Function called every five seconds."""
        self._loop = registry.resources.progress.loop
        self._members, self._tallies = registry.members, registry.resources.tallies
        self._reading = threading.Lock()
        """A lock of readers, which the program never takes."""
        self._open: dict[str, Dispatcher] = {}
        self._counts: dict[str, dict[str, Count]] = {}
        """Counts at the last read by communicator, also of closed ones."""
        self._last: dict[tuple[str, str], float] = {}
        """Unix time of the last operation, by communicator and kind."""
        self._lags: deque[float] = deque(maxlen=_LAGS)
        self._asked: float | None = None
        """Time of the request for a callback that has not run yet, or None."""
        self._ended = threading.Event()
        self._thread = OwnThread("aiodist-meter", self._run)

    def start(self) -> None:
        """Count the operations of all communicators from now on, and start the thread (loop's thread)."""
        for each in self._members.dispatchers:
            self._follow(each)
        self._members.on_open.append(self._follow)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._members.on_open.remove(self._follow)
        self._ended.set()
        self._thread.join()

    def _follow(self, dispatcher: Dispatcher) -> None:
        dispatcher.count()
        self._open[dispatcher.name] = dispatcher

    def _run(self) -> None:
        looks = 0
        while not self._ended.wait(LOOK_SECONDS):
            looks += 1
            if self._asked is None:
                self._asked = monotonic()
                with suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._beat, self._asked)
            self.read()
            if looks % _WRITE_LOOKS == 0:
                self.write()

    def _beat(self, asked: float) -> None:
        self._lags.append(monotonic() - asked)
        self._asked = None

    def read(self) -> list[Sample]:
        """Return the numbers (any thread)."""
        asked = self._asked
        lag = max([*self._lags.copy(), 0.0 if asked is None else monotonic() - asked])
        found = [Sample("aiodist_event_loop_lag_seconds", lag)]
        with self._reading:
            for name, dispatcher in self._open.copy().items():
                found += self._read(name, dispatcher)
            for name in [name for name in self._counts if name not in self._open][:-MOST_CLOSED]:
                for kind in self._counts.pop(name):
                    self._last.pop((name, kind), None)
            for name, counts in self._counts.items():
                for kind, count in counts.items():
                    found.append(Sample("aiodist_operations_total", count.operations, name, kind))
                    found.append(Sample("aiodist_bytes_total", count.nbytes, name, kind))
                    found.append(Sample("aiodist_wait_seconds_total", count.waited, name, kind))
                    if (last := self._last.get((name, kind))) is not None:
                        found.append(Sample("aiodist_last_operation_timestamp_seconds", last, name, kind))
        for name, tally in self._tallies.copy().items():
            with suppress(RuntimeError):  # a dict has grown meanwhile: the next read has the numbers
                found += [Sample(metric, value, name) for metric, value in tally().items()]
        return found

    def _read(self, name: str, dispatcher: Dispatcher) -> Iterator[Sample]:
        """Read the counts of an open communicator, and yield the operations in flight."""
        closed = dispatcher.lifetime.refusal is not None  # before the counts, which do not change later
        counts, before = dispatcher.count().read(), self._counts.get(name, {})
        for kind, count in counts.items():
            if count.operations != (before[kind].operations if kind in before else 0):
                self._last[name, kind] = time()
        self._counts[name] = counts
        if closed:
            self._open.pop(name, None)
            return
        pending = Counter(handle.op for handle in dispatcher.operations if internals.is_pending(handle))
        for kind in counts.keys() | pending.keys():
            yield Sample("aiodist_in_flight_operations", pending[kind], name, kind)


class _Answers:
    """Asks all ranks for their numbers, and answers on the listener thread, also while the program is stuck."""

    def __init__(self, channel: Channel, meter: RankNumbers) -> None:
        self._channel = channel
        self._meter = meter
        self._number = 0
        self._answers: dict[int, list[Sample]] = {}
        self._news = threading.Event()
        channel.subscribe(_TOPIC, self._heard)

    def close(self) -> None:
        """Answer no more."""
        with suppress(RuntimeError):  # the channel is closed
            self._channel.unsubscribe(_TOPIC)

    def ask(self) -> dict[int, list[Sample]]:
        """Return the numbers of each rank, of a rank without an answer only that it is not up (endpoint's thread)."""
        channel = self._channel
        self._number += 1
        answers = self._answers = {channel.rank: self._meter.read()}
        until = monotonic() + _ANSWER_SECONDS
        with suppress(RuntimeError):  # the channel is closed
            channel.broadcast(_TOPIC, ["ask", self._number, []])
            while len(answers) < channel.size - len(channel.exits()) and (left := until - monotonic()) > 0:
                self._news.wait(left)
                self._news.clear()
        return {
            rank: [_UP, *answers[rank]] if rank in answers else [_UP._replace(value=0)] for rank in range(channel.size)
        }

    def _heard(self, src: int, message: list[Any]) -> None:
        what, number, samples = message
        if what == "ask":
            with suppress(RuntimeError):  # the channel was closed
                self._channel.send(src, _TOPIC, ["answer", number, self._meter.read()])
        elif number == self._number:
            self._answers[src] = [Sample(*each) for each in samples]
            self._news.set()
