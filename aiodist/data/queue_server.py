"""The server of a queue of shards: on the first rank it answers what all ranks ask, while the program computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

from aiodist.control import Channel
from aiodist.data.queue_machine import Event, Hand, HandBack, Hold, Instruction, Lost, QueueMachine, Range, Take, Used


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
    """How many epochs were begun before."""
    loads: int
    """How often a state was loaded until then."""
    epoch: int


class QueueServer:
    """Messages go into the machine of their lap, and what it says goes back.

    It lives on the first rank, and works on the listener thread of the control channel: so nobody waits for what that
    rank's program does, on its loop or elsewhere. A lap begins with the first message of any rank that is in it. Where
    a state was loaded it begins when this rank has loaded that too; what comes before waits.
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
        self._loads = 0
        self._early: list[tuple[int, Lap, Take]] = []
        self._closed = False
        wires.channel.subscribe(wires.asks, self._heard)

    def unsubscribe(self) -> None:
        """Hear nothing any more."""
        self._wires.channel.unsubscribe(self._wires.asks)

    # --- from the loop ---------------------------------------------------------------------------------------

    def load(self, lap: Lap, used: Iterable[Range]) -> None:
        """Begin a lap in which some records were used before."""
        with self._lock:
            self._loads = lap.loads
            self._begin(lap, used)

    def lose(self, rank: int) -> None:
        """`rank` is gone: others get what it held."""
        with self._lock:
            for _, machine in self._laps.values():
                self._perform(machine.handle(Lost(rank)))
            self._forget_early(rank)
            self._leave(rank)

    def close(self) -> None:
        """Load no state any more: who waits for that is refused."""
        with self._lock:
            self._closed = True
            early, self._early = self._early, []
            for rank, lap, take in early:
                self._wait_for_load(rank, lap, take)

    # --- messages, on the listener thread --------------------------------------------------------------------

    def _heard(self, world_rank: int, message: list[Any]) -> None:
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
                _, number, waits, terms = said
                if terms != self._terms:
                    self._refuse(rank, number, f"rank {rank} has {terms}; rank 0 has {self._terms}")
                else:
                    self._do(rank, lap, Take(rank, number, waits))
            elif what == "used":
                self._do(rank, lap, Used(rank, said[1]))
            else:
                self._do(rank, lap, HandBack(rank, said[1]))

    def _do(self, rank: int, lap: Lap, event: Event) -> None:
        if lap.number not in self._laps:
            if not isinstance(event, Take):
                self._forget_early(rank)  # nor does it hold anything of a lap that has not begun
                return
            if lap.loads != self._loads:
                self._wait_for_load(rank, lap, event)
                return
            self._begin(lap, ())
        known = self._laps[lap.number]
        if known[0] != lap:
            if isinstance(event, Take):
                self._refuse(
                    rank, event.number, f"rank {rank} is in {_text(lap)}; another rank is in {_text(known[0])}"
                )
            return
        self._reached[rank] = lap.number
        oldest = min(self._reached.values())
        for number in [number for number in self._laps if number < oldest]:
            del self._laps[number]
        self._perform(known[1].handle(event))

    def _begin(self, lap: Lap, used: Iterable[Range]) -> None:
        self._laps[lap.number] = lap, self._make(lap.epoch, used)
        early, self._early = self._early, []
        for each in early:
            self._do(*each)  # those of later laps wait again

    def _forget_early(self, rank: int) -> None:
        self._early = [each for each in self._early if each[0] != rank]

    def _wait_for_load(self, rank: int, lap: Lap, take: Take) -> None:
        if lap.loads < self._loads:
            self._refuse(rank, take.number, f"rank {rank} is in {_text(lap)}; rank 0 has loaded {self._loads} states")
        elif self._closed:
            self._refuse(rank, take.number, f"rank {rank} is in {_text(lap)}; rank 0 has closed the queue before that")
        else:
            self._early.append((rank, lap, take))

    def _perform(self, instructions: list[Instruction]) -> None:
        for told in instructions:
            if isinstance(told, Hand):
                self._wires.answer(told.rank, "hand", told.number, told.ranges)
            else:
                assert isinstance(told, Hold)
                self._wires.answer(told.rank, "hold", told.number, list(told.holders.items()))

    def _refuse(self, rank: int, number: int, why: str) -> None:
        self._wires.answer(rank, "refuse", number, why)

    def _leave(self, rank: int) -> None:
        self._reached.pop(rank, None)
        if not self._reached:
            self._over()

    @property
    def present(self) -> list[int]:
        """The ranks that have not left."""
        return list(self._reached)


def _text(lap: Lap) -> str:
    loaded = f" and {lap.loads} loaded states" if lap.loads else ""
    return f"epoch {lap.epoch} after {lap.number} others{loaded}"
