"""The generations of an elastic job: which ranks continue after a loss, and which ranks join. No I/O.

Each generation has a session of its own at a hub. Ranks ask to regroup. When all live ones have asked, the next
generation is formed: they keep their order, and new ranks follow. It begins when all its ranks have joined its session,
and only then does the current one end. A rank that leaves or asks again before ends the formed generation, and the
ranks start again. So each live rank is in the current generation, or moving from it to the next. Events of an ended
session are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from aiodist.control.roster import Exit, Reply
from aiodist.control.texts import disagreement, name_ranks
from aiodist.env import Generation


class Refusal(StrEnum):
    """Why there is no next generation for a rank that asks."""

    OUTSIDE = "outside"  # the others continue without this rank
    DISAGREE = "disagree"
    LEFT = "left"  # a rank of the current generation has left; it can only shrink
    CANCELLED = "cancelled"  # a new rank did not join


class Form(NamedTuple):
    """Open the session of a generation, and start its new ranks."""

    generation: Generation


class Admit(NamedTuple):
    """Send the address of a generation to its survivors."""

    generation: Generation


class Refuse(NamedTuple):
    """Refuse the next generation to ranks of the current one."""

    ranks: list[int]
    kind: Refusal
    why: str


class Cancel(NamedTuple):
    """End the session of a generation that never begins, and its new ranks."""

    generation: Generation
    why: str


Instruction = Form | Admit | Refuse | Cancel


class Regrouping:
    """The state machine: each event returns instructions, in order."""

    def __init__(self, size: int) -> None:
        self.current = Generation(0, (None,) * size)
        self.begun = False
        """True once all ranks of the first generation have joined. Before that a rank may leave and come again."""
        self.present = set(range(size))
        """Ranks of the current generation that have not left."""
        self.asked: dict[int, int] = {}
        """Number of new ranks that each waiting rank has asked for, by rank."""
        self.forming: Generation | None = None
        self.came: set[int] = set()
        """Ranks that have joined the session of the formed generation, or of the first one."""
        self._last = 0

    def outside(self, number: int, rank: int) -> str:
        """Return why a rank of generation `number` can no longer ask, or ""."""
        inside = number == self.current.number and rank in self.present
        return "" if inside else f"the job has continued with generation {self.current.number} without this rank"

    def ask(self, rank: int, joiners: int) -> list[Instruction]:
        """A rank of the current generation asks for the next one, with `joiners` new ranks."""
        done = self._cancel(Refusal.CANCELLED, f"rank {rank} starts over")
        self.asked[rank] = joiners
        if joiners and len(self.present) < self.current.size:
            gone = set(range(self.current.size)) - self.present
            return [*done, self._refuse([rank], Refusal.LEFT, f"{name_ranks(gone)} left: shrink first")]
        return done + self._form()

    def joined(self, number: int, rank: int) -> list[Instruction]:
        """A rank has joined the session of generation `number`."""
        forming = self.forming or self.current
        if number != forming.number or (forming is self.current and self.begun):
            return []
        self.came.add(rank)
        done: list[Instruction] = []
        if self.asked and self.came.issuperset(forming.joiners):
            done = self._admit()
        if len(self.came) == forming.size:
            self.begun = True
            self.current, self.forming = forming, None
            self.present = set(range(forming.size))
        return done

    def left(self, number: int, rank: int, why: str) -> list[Instruction]:
        """A rank has left a session, or a new rank will never join it."""
        if self.forming is not None and number == self.forming.number:
            return self._cancel(Refusal.CANCELLED, f"rank {rank} of the next generation left: {why}") + self._form()
        if not self.begun:
            self.came.discard(rank)
            return []
        if number != self.current.number or rank not in self.present:
            return []
        self.present.remove(rank)
        self.asked.pop(rank, None)
        done = self._cancel(Refusal.LEFT, f"rank {rank} left: {why}")
        if growing := [asker for asker, joiners in self.asked.items() if joiners]:
            done.append(self._refuse(growing, Refusal.LEFT, f"rank {rank} left: {why}"))
        return done + self._form()

    def missing(self, number: int, rank: int) -> dict[int, str]:
        """Return the ranks that `rank` of generation `number` waits for, each with the reason.

        A rank that has not asked waits for no rank here: it may still open its world.
        """
        if number != self.current.number:
            return {}
        if self.forming is not None:
            coming = set(self.forming.joiners) - self.came
            return {self.current.size + i: "it was started, and has not joined yet" for i, _ in enumerate(coming)}
        late = self.present - self.asked.keys() if rank in self.asked else ()
        return dict.fromkeys(late, "it has not asked to regroup")

    def _form(self) -> list[Instruction]:
        """Form the next generation if all have asked."""
        if not self.asked or self.asked.keys() != self.present:
            return []
        wanted = set(self.asked.values())
        if len(wanted) > 1:
            text = disagreement("the number of new ranks", {rank: str(n) for rank, n in self.asked.items()})
            return [self._refuse(list(self.asked), Refusal.DISAGREE, text)]
        self._last += 1
        self.forming = Generation(self._last, (*sorted(self.present), *(None,) * wanted.pop()))
        self.came = set()
        return [Form(self.forming), *([] if self.forming.joiners else self._admit())]

    def _admit(self) -> list[Instruction]:
        assert self.forming is not None
        self.asked.clear()
        return [Admit(self.forming)]

    def _cancel(self, kind: Refusal, why: str) -> list[Instruction]:
        """Cancel the formed generation. Waiting ranks are refused, and the others ask again."""
        if self.forming is None:
            return []
        cancelled, self.forming = self.forming, None
        refused = [self._refuse(list(self.asked), kind, why)] if self.asked else []
        return [Cancel(cancelled, why), *refused]

    def _refuse(self, ranks: list[int], kind: Refusal, why: str) -> Refuse:
        for rank in ranks:
            self.asked.pop(rank, None)
        return Refuse(ranks, kind, why)


class Sessions(Protocol):
    """Opens and ends the sessions of generations."""

    def form(self, generation: Generation, members: GenerationMembers) -> Any:  # noqa: ANN401
        """Open a session, whose hub reports to `members`, and start the new ranks. Return the address."""

    def cancel(self, generation: Generation, why: str) -> None:
        """End a session that never begins, and its new ranks."""


class Generations:
    """Performs the instructions of the machine, for one job, in the process of its hub."""

    def __init__(self, size: int, sessions: Sessions) -> None:
        self.machine = Regrouping(size)
        self._sessions = sessions
        self._replies: dict[int, Reply] = {}
        self._places: dict[int, Any] = {}

    def ask(self, number: int, rank: int, joiners: int, reply: Reply) -> None:
        """A rank asks for the next generation. `reply` gets its address, or the refusal."""
        if why := self.machine.outside(number, rank):
            reply({"refused": Refusal.OUTSIDE, "why": why}, None)
            return
        self._replies[rank] = reply
        self.do(self.machine.ask(rank, joiners))

    def do(self, instructions: Iterable[Instruction]) -> None:
        """Perform instructions, in order."""
        for instruction in instructions:
            match instruction:
                case Form(generation):
                    where = self._sessions.form(generation, GenerationMembers(self, generation.number))
                    self._places = {generation.number: where}
                case Admit(generation):
                    where = self._places[generation.number]
                    for rank, before in enumerate(generation.previous):
                        if before is not None:
                            self._replies.pop(before)({"rank": rank, "where": where, **vars(generation)}, None)
                case Refuse(ranks, kind, why):
                    for rank in ranks:
                        self._replies.pop(rank)({"refused": kind, "why": why}, None)
                case Cancel(generation, why):
                    self._sessions.cancel(generation, why)


class GenerationMembers(NamedTuple):
    """The reports of one session: see `Members`."""

    generations: Generations
    number: int = 0

    def ask(self, rank: int, joiners: int, reply: Reply) -> None:
        """Forward the question of a rank."""
        self.generations.ask(self.number, rank, joiners, reply)

    def missing(self, rank: int) -> dict[int, str]:
        """Return the ranks that a rank waits for."""
        return self.generations.machine.missing(self.number, rank)

    def joined(self, rank: int) -> None:
        """Note that a rank has joined."""
        self.generations.do(self.generations.machine.joined(self.number, rank))

    def left(self, exit: Exit) -> None:
        """Note that a rank has left."""
        self.generations.do(self.generations.machine.left(self.number, exit.rank, exit.cause))
