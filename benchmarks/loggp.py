"""A simulator of schedules with a LogGP clock.

LogGP: A. Alexandrov, M. F. Ionescu, K. E. Schauser, C. Scheiman, "LogGP: incorporating long messages into the LogP
model", SPAA 1995, https://doi.org/10.1145/215399.215427. A message of k bytes costs the sender's processor o. The
first byte enters the network then, the last one (k-1)G later; each byte arrives L after it entered. The receiver's
processor is busy for another o. A port waits g between the last byte of a message and the next message, in both
directions (as LogGOPSim, https://doi.org/10.1145/1851476.1851564). Contention within the network, and copies by the
processor, are not in the model.

In addition there are two networks, one inside a host and one between hosts, whose ports the ranks of a host share, and
seconds per byte to combine received data. Times are in seconds, lengths in bytes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from aiodist.errors import ConfigError
from aiodist.schedules import Copy, Recv, Schedule, Send, Step

__all__ = ["LogGP", "Machine", "Phase", "Program", "Run", "simulate"]


@dataclass(frozen=True)
class LogGP:
    """One network; raises `ConfigError` for impossible values."""

    latency: float
    """L: seconds of a byte in the network."""
    overhead: float
    """o: seconds of a processor for a message, at each end."""
    gap: float
    """g: seconds of a port between two messages."""
    byte_gap: float
    """G: seconds per byte of a long message at a port."""

    def __post_init__(self) -> None:
        for name in ("latency", "overhead", "gap", "byte_gap"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} {getattr(self, name)}: expected seconds, at least 0")
        if self.gap < self.byte_gap:
            raise ConfigError(
                f"gap {self.gap:g} s is shorter than the gap per byte, {self.byte_gap:g} s: expected at least that"
            )

    def stretch(self, nbytes: float) -> float:
        """Return the seconds from the first byte of a message to its last at a port: (k-1)G."""
        return max(nbytes - 1, 0) * self.byte_gap

    def message(self, nbytes: float) -> float:
        """Return the seconds that one message takes from rank to rank: o + (k-1)G + L + o."""
        return 2 * self.overhead + self.latency + self.stretch(nbytes)


@dataclass(frozen=True)
class Machine:
    """Hosts of `local` ranks each; the host of rank r is r // local."""

    between: LogGP
    """The network between hosts."""
    inside: LogGP
    """The network within a host; each rank has a port on it."""
    combine: float = 0.0
    """Seconds per byte to combine or copy on the rank's processor."""
    local: int = 1
    ports: int = 1
    """Ports of a host on the network between hosts; rank r uses port r % local % ports."""

    def __post_init__(self) -> None:
        if not 0 <= self.combine < float("inf"):
            raise ConfigError(f"combine {self.combine}: expected seconds per byte, at least 0")
        if not 1 <= self.ports <= self.local:
            raise ConfigError(f"{self.ports} ports: expected 1 to {self.local}, one for each rank of a host")

    def hosts(self, ranks: int) -> int:
        """Return the number of hosts of `ranks`; the last one may be partly filled."""
        return -(-ranks // self.local)


class Phase(NamedTuple):
    """A schedule and the ranks that it runs among: its peer i is rank `ranks[i]`."""

    schedule: Schedule
    ranks: Sequence[int]


Program = Sequence[Phase]
"""The phases of one rank; a phase starts after all lanes of the phase before have finished."""


class Run(NamedTuple):
    """The times and the traffic of a simulated run."""

    seconds: float
    """Time until the last rank has finished."""
    messages: tuple[int, ...]
    """Messages that each simulated rank sent."""
    nbytes: tuple[float, ...]
    """Bytes that each simulated rank sent."""


def simulate(
    programs: Sequence[Program], machine: Machine, *, ranks: int | None = None, first: int = 0, itemsize: float = 4
) -> Run:
    """Run the programs of ranks `first`, first + 1, …, all starting at 0.

    Fewer programs than `ranks` mean that ranks behave alike. With m programs, m and `first` multiples of the ranks of a
    host, rank r behaves as the simulated rank with the same r % m, and gets the messages to r. Lengths that differ by
    a remainder are then the sender's.

    Raises `ValueError` for a receive without a message, a message without a receive, and, if every rank is simulated,
    a receive of another length.
    """
    return _Simulation(programs, machine, ranks or len(programs), first, itemsize).run()


class _Lane:
    """One lane of a rank's current phase."""

    __slots__ = ("combines", "ends", "index", "left", "phase", "rank", "ranks", "steps")

    def __init__(self, rank: int, phase: int, index: int, steps: Iterator[Step], ranks: Sequence[int]) -> None:
        self.rank = rank
        self.phase = phase
        self.index = index
        self.steps = steps
        self.ranks = ranks
        self.left = 0  # pending transfers of this step
        self.ends = 0.0  # time of the last finished transfer
        self.combines = 0  # elements to combine after all transfers


class _Message:
    """A message in flight."""

    __slots__ = ("dst", "key", "lane", "nbytes", "network", "way_in", "way_out")

    def __init__(self, lane: _Lane, dst: int, nbytes: float, network: LogGP, ways: tuple[int, int]) -> None:
        self.lane = lane
        self.dst = dst
        self.key = (lane.rank, lane.phase, lane.index)
        self.nbytes = nbytes
        self.network = network
        self.way_out, self.way_in = ways


class _Simulation:
    """One run: events in order of time; each takes a processor or a port when that becomes free."""

    def __init__(self, programs: Sequence[Program], machine: Machine, ranks: int, first: int, itemsize: float) -> None:
        self.programs = programs
        self.machine = machine
        self.first = first
        self.itemsize = itemsize
        self.simulated = simulated = len(programs)
        self.alike = simulated < ranks
        # the time when each port can take a message: one inside the host for each rank, then those between hosts
        self.free_out = [0.0] * (simulated + machine.hosts(simulated) * machine.ports)
        self.free_in = list(self.free_out)
        self.free_cpu = [0.0] * simulated
        self.landed: list[dict[tuple[int, int, int], deque[_Message]]] = [{} for _ in range(simulated)]
        self.awaited: list[dict[tuple[int, int, int], deque[tuple[_Lane, Recv]]]] = [{} for _ in range(simulated)]
        self.lanes_left = [0] * simulated
        self.messages = [0] * simulated
        self.nbytes = [0.0] * simulated
        self.seconds = 0.0
        self.events: list[tuple[float, int, Callable[[float, Any], None], object]] = []
        self.order = count()  # of events at the same time

    def run(self) -> Run:
        """Return the result of the run."""
        for rank in range(self.simulated):
            self._open(0.0, rank, 0)
        events, pop = self.events, heapq.heappop
        while events:
            now, _, happen, what = pop(events)
            happen(now, what)
        self._check()
        return Run(self.seconds, tuple(self.messages), tuple(self.nbytes))

    def _check(self) -> None:
        for rank in range(self.simulated):
            for kind, queues in (("never receives from", self.landed), ("gets no message from", self.awaited)):
                if (peer := next((key[0] for key, queue in queues[rank].items() if queue), None)) is not None:
                    raise ValueError(f"rank {rank} {kind} rank {peer}: these programs do not fit together")

    def _at(self, time: float, happen: Callable[[float, Any], None], what: object) -> None:
        heapq.heappush(self.events, (time, next(self.order), happen, what))

    # --- a rank: phases, lanes, steps --------------------------------------------------------------------------------

    def _open(self, now: float, rank: int, phase: int) -> None:
        """Start a phase of a rank, or finish the rank."""
        while phase < len(self.programs[rank]):
            schedule, ranks = self.programs[rank][phase]
            if schedule.lanes:
                self.lanes_left[rank] = len(schedule.lanes)
                for index, steps in enumerate(schedule.lanes):
                    self._at(now, self._step, _Lane(rank, phase, index, steps(), ranks))
                return
            phase += 1
        self.seconds = max(self.seconds, now)

    def _step(self, now: float, lane: _Lane) -> None:
        """Start the next step of a lane: send its messages, and take the messages that have landed."""
        step = next(lane.steps, None)
        while step == ():
            step = next(lane.steps, None)
        if step is None:
            self.lanes_left[lane.rank] -= 1
            if not self.lanes_left[lane.rank]:
                self._open(now, lane.rank, lane.phase + 1)
            return
        lane.left = len(step) + 1  # this call counts too: the step cannot end before all transfers started
        lane.ends = now
        lane.combines = 0
        for move in step:
            if isinstance(move, Send):
                self._send(now, lane, move)
            elif isinstance(move, Recv):
                self._receive(now, lane, move)
            else:
                self._later(lane, move)
                lane.left -= 1
        self._finish(lane, now)

    def _later(self, lane: _Lane, move: Recv | Copy) -> None:
        lane.combines += move.stop - move.start

    def _finish(self, lane: _Lane, when: float) -> None:
        """Finish a transfer of a lane at time `when`; after the last one, combine and finish the step."""
        lane.ends = max(lane.ends, when)
        lane.left -= 1
        if lane.left == 0:
            self._at(lane.ends, self._combine if lane.combines else self._step, lane)

    def _combine(self, now: float, lane: _Lane) -> None:
        ready = self._work(lane.rank, now, lane.combines * self.itemsize * self.machine.combine)
        self._at(ready, self._step, lane)

    def _work(self, rank: int, now: float, seconds: float) -> float:
        """Use a rank's processor from `now`, or from the time when it is free; return the end."""
        done = max(self.free_cpu[rank], now) + seconds
        self.free_cpu[rank] = done
        return done

    # --- a message: from its sender through a network to its receiver ------------------------------------------------

    def _send(self, now: float, lane: _Lane, move: Send) -> None:
        rank, world = lane.rank, lane.ranks[move.peer]
        nbytes = (move.stop - move.start) * self.itemsize
        self.messages[rank] += 1
        self.nbytes[rank] += nbytes
        near = world // self.machine.local == (rank + self.first) // self.machine.local
        network = self.machine.inside if near else self.machine.between
        dst = world % self.simulated
        message = _Message(lane, dst, nbytes, network, (self._port(rank, near), self._port(dst, near)))
        ready = self._work(rank, now, network.overhead)
        if near or self.machine.ports == self.machine.local:
            self._inject(ready, message)
        else:
            self._at(ready, self._inject, message)  # ranks that share a port use it in order of time

    def _port(self, rank: int, near: bool) -> int:
        if near:
            return rank
        host, local = divmod(rank, self.machine.local)
        return self.simulated + host * self.machine.ports + local % self.machine.ports

    def _inject(self, ready: float, message: _Message) -> None:
        """Put a message into its network."""
        network = message.network
        enters = max(ready, self.free_out[message.way_out])
        leaves = enters + network.stretch(message.nbytes)
        self.free_out[message.way_out] = leaves + network.gap
        self._at(enters + network.latency, self._arrive, message)
        self._finish(message.lane, leaves)

    def _arrive(self, now: float, message: _Message) -> None:
        """Let the first byte arrive."""
        network = message.network
        lands = max(now, self.free_in[message.way_in]) + network.stretch(message.nbytes)
        self.free_in[message.way_in] = lands + network.gap
        self._at(lands, self._land, message)

    def _land(self, now: float, message: _Message) -> None:
        """Let the last byte arrive: finish a waiting receive, or keep the message."""
        waiting = self.awaited[message.dst].get(message.key)
        if waiting:
            self._take(now, *waiting.popleft(), message)
        else:
            self.landed[message.dst].setdefault(message.key, deque()).append(message)

    def _receive(self, now: float, lane: _Lane, move: Recv) -> None:
        key = (lane.ranks[move.peer] % self.simulated, lane.phase, lane.index)
        if move.combine:
            self._later(lane, move)
        there = self.landed[lane.rank].get(key)
        if there:
            self._take(now, lane, move, there.popleft())
        else:
            self.awaited[lane.rank].setdefault(key, deque()).append((lane, move))

    def _take(self, now: float, lane: _Lane, move: Recv, message: _Message) -> None:
        if message.nbytes != (move.stop - move.start) * self.itemsize and not self.alike:
            raise ValueError(f"rank {lane.rank}: {move}, and {message.nbytes} bytes were sent")
        self._finish(lane, self._work(lane.rank, now, message.network.overhead))
