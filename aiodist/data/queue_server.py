"""The server of a queue of shards: on the first rank it answers what all ranks ask, while the program computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

from aiodist.control import Channel
from aiodist.data.queue_machine import Hand, HandBack, Instruction, QueueMachine, Range, Take, Used


@dataclass(frozen=True)
class Wires:
    """What carries the messages of one queue."""

    channel: Channel
    ranks: Sequence[int]
    """The world ranks of the queue's, in order."""
    name: str

    @property
    def asks(self) -> str:
        """The topic of what ranks tell the first one."""
        return f"{self.name}: asks"

    @property
    def answers(self) -> str:
        """The topic of what the first rank tells the others."""
        return f"{self.name}: answers"

    def ask(self, what: str, *said: Any) -> None:  # noqa: ANN401
        """Tell the first rank something."""
        self.channel.send(self.ranks[0], self.asks, [what, *said])

    def answer(self, rank: int, what: str, *said: Any) -> None:  # noqa: ANN401
        """Tell `rank` something."""
        self.channel.send(self.ranks[rank], self.answers, [what, *said])


class Lap(NamedTuple):
    """Which epoch ranks are in. All ranks begin the same laps in the same order, each at its own time."""

    number: int
    """How many epochs and loaded states were begun before."""
    epoch: int
    loaded: int
    """The CRC-32 of the state that was loaded; 0: none."""

    def __str__(self) -> str:
        state = f", with the loaded state {self.loaded:08x}" if self.loaded else ""
        return f"epoch {self.epoch} after {self.number} others{state}"


class QueueServer:
    """Messages go into the machine of their lap, and what it says goes back.

    It lives on the first rank, and works on the listener thread of the control channel: so nobody waits for what that
    rank's program does, on its loop or elsewhere. A lap begins when the first rank that is in it asks for records.
    """

    def __init__(
        self,
        wires: Wires,
        terms: str,
        machine: Callable[[int, Iterable[Range]], QueueMachine],
        over: Callable[[], None],
    ) -> None:
        """`machine(epoch, used)` makes one; `over` is called once when all ranks have left, on any thread."""
        self._wires = wires
        self._terms = terms
        self._make = machine
        self._over = over
        self._lock = Lock()
        self._laps: dict[int, tuple[Lap, QueueMachine]] = {}
        self._reached = dict.fromkeys(range(len(wires.ranks)), 0)
        """The number of the last lap of each rank that is there."""
        wires.channel.subscribe(wires.asks, self._heard)

    @property
    def present(self) -> list[int]:
        """The ranks that have not left."""
        return list(self._reached)

    def used(self, lap: Lap) -> list[Range]:
        """Return what was used in `lap`, as far as ranks have said."""
        with self._lock:
            known, machine = self._laps.get(lap.number, (None, None))
            return machine.used if machine is not None and known == lap else []

    def lose(self, rank: int) -> None:
        """`rank` is gone: others get what it held; on the loop."""
        with self._lock:
            for _, machine in self._laps.values():
                self._perform(machine.handle(HandBack(rank, None)))
            self._leave(rank)

    def unsubscribe(self) -> None:
        """Hear nothing any more."""
        self._wires.channel.unsubscribe(self._wires.asks)

    def _heard(self, world_rank: int, message: list[Any]) -> None:
        """On the listener thread."""
        rank = self._wires.ranks.index(world_rank)
        what, *said = message
        with self._lock:
            if rank not in self._reached:
                return  # it was lost: what was on its way counts no more
            if what == "bye":
                self._leave(rank)
                return
            lap = Lap(*said[0])
            if what == "take":
                self._take(rank, lap, *said[1:])
                return
            known, machine = self._laps.get(lap.number, (None, None))
            if machine is not None and known == lap:  # else it holds nothing
                self._perform(machine.handle((Used if what == "used" else HandBack)(rank, said[1])))

    def _take(self, rank: int, lap: Lap, number: int, waits: bool, terms: str, used: list[list[int]]) -> None:
        if terms != self._terms:
            self._wires.answer(rank, "refuse", number, f"rank {rank} has {terms}; rank 0 has {self._terms}")
            return
        if lap.number not in self._laps:
            self._laps[lap.number] = lap, self._make(lap.epoch, (Range(*each) for each in used))
        known, machine = self._laps[lap.number]
        if known != lap:
            self._wires.answer(rank, "refuse", number, f"rank {rank} is in {lap}; another rank is in {known}")
            return
        self._reached[rank] = lap.number
        oldest = min(self._reached.values())
        self._laps = {number: each for number, each in self._laps.items() if number >= oldest}
        self._perform(machine.handle(Take(rank, number, waits)))

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
