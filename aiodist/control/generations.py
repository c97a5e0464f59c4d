"""One generation of ranks after another: who goes on when a rank was lost, and who joins them. No input, no output.

A job that is elastic has one session of the hub after another. The ranks of one *generation* ask to regroup; once all
of them that live have asked, the next is formed: they keep their order, and ranks that join come behind them. It begins
when each of its ranks has come to its session, and only then is the one before over: until then a rank that leaves, or
asks anew, ends what was formed, and they start over. So each rank that lives is in the current generation, or on its
way to the next from it. What comes from a session that is over, or was given up, is no news.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from aiodist.control.roster import Exit
from aiodist.control.texts import disagreement, name_ranks


@dataclass(frozen=True)
class Generation:
    """The ranks of an elastic job between two changes of who they are."""

    number: int
    """From 0; each has a higher one than all before, also than those that never began."""
    previous: tuple[int | None, ...]
    """For each rank its rank in the generation before; None of one that joined, as all of the first have."""

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.previous)

    @property
    def survivors(self) -> list[int]:
        """The ranks that they have in the generation before, of those who were there."""
        return [rank for rank in self.previous if rank is not None]

    @property
    def joiners(self) -> list[int]:
        """The ranks that were not there before."""
        return [rank for rank, before in enumerate(self.previous) if before is None]


class Refusal(StrEnum):
    """Why ranks are not told of a next generation."""

    OUTSIDE = "outside"  # the others have gone on without this rank
    DISAGREE = "disagree"
    LEFT = "left"  # a rank of the current generation has left; it can only shrink
    CANCELLED = "cancelled"  # one that was to join never came


class Form(NamedTuple):
    """Open a session for it, and start those who join."""

    generation: Generation


class Admit(NamedTuple):
    """Tell its survivors, by their ranks before, where it meets."""

    generation: Generation


class Refuse(NamedTuple):
    """Tell ranks of the current generation why there will be no next one now."""

    ranks: list[int]
    kind: Refusal
    why: str


class Cancel(NamedTuple):
    """It will never begin: end its session, and those who were to join."""

    generation: Generation
    why: str


Instruction = Form | Admit | Refuse | Cancel


class Regrouping:
    """The machine: each event returns what is to be done, in order."""

    def __init__(self, size: int) -> None:
        self.current = Generation(0, (None,) * size)
        self.begun = False
        """All ranks of the first have come; until then one that leaves may come again."""
        self.present = set(range(size))  # the ranks of the current generation that have not left
        self.asked: dict[int, int] = {}
        """Those that wait for an answer, and how many each wants to join."""
        self.forming: Generation | None = None
        self.came: set[int] = set()
        """The ranks that have come to the session of the one being formed, or of the first."""
        self._last = 0

    def outside(self, number: int, rank: int) -> str:
        """Return why a rank cannot ask any more; empty where it can."""
        inside = number == self.current.number and rank in self.present
        return "" if inside else f"the job has gone on to generation {self.current.number} without this rank"

    def ask(self, rank: int, joiners: int) -> list[Instruction]:
        """A rank of the current generation asks for the next one, with so many new ranks."""
        done = self._cancel(Refusal.CANCELLED, f"rank {rank} starts over")
        self.asked[rank] = joiners
        if joiners and len(self.present) < self.current.size:
            gone = set(range(self.current.size)) - self.present
            return [*done, self._refuse([rank], Refusal.LEFT, f"{name_ranks(gone)} left: shrink first")]
        return done + self._form()

    def joined(self, number: int, rank: int) -> list[Instruction]:
        """A rank has come to a session."""
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
        """A rank has left a session, or, of one that was to join, will never come to it."""
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
        """Return for whom `rank` of a generation waits; the answer to what it asked may be on its way.

        One that has not asked itself waits for nobody here: it may still open the world of its generation.
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
        """Give up what is being formed; those who wait for an answer are refused, the others come again."""
        if self.forming is None:
            return []
        cancelled, self.forming = self.forming, None
        refused = [self._refuse(list(self.asked), kind, why)] if self.asked else []
        return [Cancel(cancelled, why), *refused]

    def _refuse(self, ranks: list[int], kind: Refusal, why: str) -> Refuse:
        for rank in ranks:
            self.asked.pop(rank, None)
        return Refuse(ranks, kind, why)


Reply = Callable[[Any, Exception | None], object]


class Sessions(Protocol):
    """What opens and ends the sessions in which generations meet."""

    def form(self, generation: Generation, members: Members) -> Any:  # noqa: ANN401
        """Open a session, whose hub tells `members` of its ranks, and start those who join; return where it is."""

    def cancel(self, generation: Generation, why: str) -> None:
        """End a session that will never begin, and those who were to join it."""


class Generations:
    """Does what the machine says: for one job, in the process of its hub."""

    def __init__(self, size: int, sessions: Sessions) -> None:
        self.machine = Regrouping(size)
        self._sessions = sessions
        self._replies: dict[int, Reply] = {}
        self._places: dict[int, Any] = {}

    def ask(self, number: int, rank: int, joiners: int, reply: Reply) -> None:
        """See `Regrouping`; `reply` is given the place, or why there is none."""
        if why := self.machine.outside(number, rank):
            reply({"refused": Refusal.OUTSIDE, "why": why}, None)
            return
        self._replies[rank] = reply
        self.do(self.machine.ask(rank, joiners))

    def do(self, instructions: Iterable[Instruction]) -> None:
        """Carry them out, in order."""
        for instruction in instructions:
            match instruction:
                case Form(generation):
                    where = self._sessions.form(generation, Members(self, generation.number))
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


class Members(NamedTuple):
    """What one session tells of its ranks, as its hub does it."""

    generations: Generations
    number: int = 0

    def ask(self, rank: int, joiners: int, reply: Reply) -> None:
        """A rank asks for the next generation."""
        self.generations.ask(self.number, rank, joiners, reply)

    def missing(self, rank: int) -> dict[int, str]:
        """Return for whom it waits."""
        return self.generations.machine.missing(self.number, rank)

    def joined(self, rank: int) -> None:
        """A rank has come."""
        self.generations.do(self.generations.machine.joined(self.number, rank))

    def left(self, exit: Exit) -> None:
        """A rank has left."""
        self.generations.do(self.generations.machine.left(self.number, exit.rank, exit.cause))
