"""A simulator of schedules with a LogGP clock: how long a collective takes on machines that are not here.

LogGP: A. Alexandrov, M. F. Ionescu, K. E. Schauser, C. Scheiman, "LogGP: incorporating long messages into the LogP
model", SPAA 1995, https://doi.org/10.1145/215399.215427. A message of k bytes costs its sender's processor o; the
first byte enters the network then, the last one (k-1)G later; each byte arrives L after it entered; the receiver's
processor is busy for another o. The next message of a port follows g after the last byte of the one before, on the
way out and on the way in (so does LogGOPSim, https://doi.org/10.1145/1851476.1851564). Contention within the network
is not part of the model, nor are copies of the transport that a processor makes byte by byte.

To that we add what a collective of several ranks on a host needs: two networks, one inside a host and one between
hosts, whose ports a host's ranks share, and seconds per byte for combining what was received.

Times are in seconds, lengths in bytes. Nothing here starts ranks or touches data.
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
    """One network; raises `ConfigError` for values that no network has."""

    latency: float
    """L: seconds from a byte's entering the network to its arrival."""
    overhead: float
    """o: seconds for which a processor is busy with a message, at either end."""
    gap: float
    """g: seconds between the last byte of a message and the first one of the next, at a port."""
    byte_gap: float
    """G: seconds per byte of a long message at a port."""

    def __post_init__(self) -> None:
        for name in ("latency", "overhead", "gap", "byte_gap"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} {getattr(self, name)}: expected seconds, at least 0")
        if self.gap < self.byte_gap:
            raise ConfigError(
                f"gap {self.gap:g} s is shorter than the gap per byte, {self.byte_gap:g} s: a byte is a message too"
            )

    def stretch(self, nbytes: float) -> float:
        """Return the seconds from the first byte of a message to its last at a port: (k-1)G."""
        return max(nbytes - 1, 0) * self.byte_gap

    def message(self, nbytes: float) -> float:
        """Return the seconds that one message takes from rank to rank: o + (k-1)G + L + o."""
        return 2 * self.overhead + self.latency + self.stretch(nbytes)


@dataclass(frozen=True)
class Machine:
    """Hosts of `local` ranks each; rank r lies on host r // local."""

    between: LogGP
    """The network between hosts."""
    inside: LogGP
    """The network within a host; each rank has a port on it."""
    combine: float = 0.0
    """Seconds per byte for combining what was received, and for copying, on the rank's processor."""
    local: int = 1
    ports: int = 1
    """How many a host has on the network between them; rank r uses number r % local % ports."""

    def __post_init__(self) -> None:
        if not 0 <= self.combine < float("inf"):
            raise ConfigError(f"combine {self.combine}: expected seconds per byte, at least 0")
        if not 1 <= self.ports <= self.local:
            raise ConfigError(f"{self.ports} ports: expected 1 to {self.local}, one for each rank of a host")

    def hosts(self, ranks: int) -> int:
        """Return how many hosts `ranks` fill; the last one may have fewer than the others."""
        return -(-ranks // self.local)


class Phase(NamedTuple):
    """A schedule and the ranks that it runs among: its peer i is rank `ranks[i]`."""

    schedule: Schedule
    ranks: Sequence[int]


Program = Sequence[Phase]
"""What one rank does: each phase begins when all lanes of the one before are over."""


class Run(NamedTuple):
    """What a simulated run took."""

    seconds: float
    """Until the last rank is done."""
    messages: tuple[int, ...]
    """How many each simulated rank sent."""
    nbytes: tuple[float, ...]
    """How many bytes each simulated rank sent."""


def simulate(
    programs: Sequence[Program], machine: Machine, *, ranks: int | None = None, first: int = 0, itemsize: float = 4
) -> Run:
    """Run the programs of ranks `first`, first + 1, …, all starting at 0, and return what that took.

    Fewer programs than `ranks` say that ranks are alike: with m programs, m and `first` multiples of the ranks of a
    host, rank r does at any time as the one of them with the same r % m does. So a message to r goes to that one, and
    lengths that differ by what does not divide evenly are the senders'.

    Raises `ValueError` for a receive that nothing is sent for, a message that nobody receives, and, where every rank
    is simulated, one that is longer or shorter than its receive.
    """
    return _Simulation(programs, machine, ranks or len(programs), first, itemsize).run()


class _Lane:
    """One lane of a rank's present phase."""

    __slots__ = ("combines", "ends", "index", "left", "phase", "rank", "ranks", "steps")

    def __init__(self, rank: int, phase: int, index: int, steps: Iterator[Step], ranks: Sequence[int]) -> None:
        self.rank = rank
        self.phase = phase
        self.index = index
        self.steps = steps
        self.ranks = ranks
        self.left = 0  # transfers of this step
        self.ends = 0.0  # when the last one that is over was over
        self.combines = 0  # elements, once all are over


class _Message:
    """One on its way."""

    __slots__ = ("dst", "key", "lane", "nbytes", "network", "way_in", "way_out")

    def __init__(self, lane: _Lane, dst: int, nbytes: float, network: LogGP, ways: tuple[int, int]) -> None:
        self.lane = lane
        self.dst = dst
        self.key = (lane.rank, lane.phase, lane.index)
        self.nbytes = nbytes
        self.network = network
        self.way_out, self.way_in = ways


class _Simulation:
    """One run: events in the order of time; each takes a processor or a port as soon as that is free."""

    def __init__(self, programs: Sequence[Program], machine: Machine, ranks: int, first: int, itemsize: float) -> None:
        self.programs = programs
        self.machine = machine
        self.first = first
        self.itemsize = itemsize
        self.simulated = simulated = len(programs)
        self.alike = simulated < ranks
        # A port inside for each rank, then those between hosts: when each can take the next message.
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
        """Return what it took."""
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
            for kind, queues in (("never receives from", self.landed), ("waits in vain for", self.awaited)):
                if (peer := next((key[0] for key, queue in queues[rank].items() if queue), None)) is not None:
                    raise ValueError(f"rank {rank} {kind} rank {peer}: these programs do not fit together")

    def _at(self, time: float, happen: Callable[[float, Any], None], what: object) -> None:
        heapq.heappush(self.events, (time, next(self.order), happen, what))

    # --- a rank: phases, lanes, steps --------------------------------------------------------------------------------

    def _open(self, now: float, rank: int, phase: int) -> None:
        """Begin a phase of a rank, or end the rank."""
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
        """Begin a lane's next step: its messages are handed over in turn, and what is there already is taken."""
        step = next(lane.steps, None)
        while step == ():
            step = next(lane.steps, None)
        if step is None:
            self.lanes_left[lane.rank] -= 1
            if not self.lanes_left[lane.rank]:
                self._open(now, lane.rank, lane.phase + 1)
            return
        lane.left = len(step) + 1  # with this call, so that the step does not end before all of it has begun
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
        self._over(lane, now)

    def _later(self, lane: _Lane, move: Recv | Copy) -> None:
        lane.combines += move.stop - move.start

    def _over(self, lane: _Lane, when: float) -> None:
        """A transfer of a lane is over at `when`; the step is when the last one is and all is combined."""
        lane.ends = max(lane.ends, when)
        lane.left -= 1
        if lane.left == 0:
            self._at(lane.ends, self._combine if lane.combines else self._step, lane)

    def _combine(self, now: float, lane: _Lane) -> None:
        ready = self._work(lane.rank, now, lane.combines * self.itemsize * self.machine.combine)
        self._at(ready, self._step, lane)

    def _work(self, rank: int, now: float, seconds: float) -> float:
        """Take a rank's processor for so long, from `now` or as soon as it is free; return when it is done."""
        done = max(self.free_cpu[rank], now) + seconds
        self.free_cpu[rank] = done
        return done

    # --- a message: out of its sender, into its network, to its receiver ---------------------------------------------

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
            self._at(ready, self._inject, message)  # ranks that share a port get it in the order of time

    def _port(self, rank: int, near: bool) -> int:
        if near:
            return rank
        host, local = divmod(rank, self.machine.local)
        return self.simulated + host * self.machine.ports + local % self.machine.ports

    def _inject(self, ready: float, message: _Message) -> None:
        """A message enters its network."""
        network = message.network
        enters = max(ready, self.free_out[message.way_out])
        leaves = enters + network.stretch(message.nbytes)
        self.free_out[message.way_out] = leaves + network.gap
        self._at(enters + network.latency, self._arrive, message)
        self._over(message.lane, leaves)

    def _arrive(self, now: float, message: _Message) -> None:
        """The first byte is there."""
        network = message.network
        lands = max(now, self.free_in[message.way_in]) + network.stretch(message.nbytes)
        self.free_in[message.way_in] = lands + network.gap
        self._at(lands, self._land, message)

    def _land(self, now: float, message: _Message) -> None:
        """The last byte is there: the message is taken, or lies until it is."""
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
        self._over(lane, self._work(lane.rank, now, message.network.overhead))
