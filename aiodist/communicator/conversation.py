"""The conversation of the ranks about a failed operation: a state machine from statements to one verdict, without I/O.

If an operation fails on a rank, or signatures differ, every rank makes one *statement* about the number. The statement
has the signature and text of the operation, the cause of the failure on that rank, and the messages that the rank sent
and asked for. A rank that has not issued the number states this. Each rank collects until every other rank has made a
statement, is known to be dead, or has not answered within `LIVENESS_SECONDS`.

    first failure, or first statement of another rank - own statement - all are known - verdict
                                                                                      - late statements: drain only

The verdict is a pure function of the statements and of the exits, whose order is the same on all ranks. So ranks with
the same statements and exits raise the same error. A mismatch comes before a lost rank, a lost rank before a silent
one, a silent rank before one that one part found to have left, and that before another failure of a part. Each of these
causes can follow from an earlier one. A rank makes only one statement for a number, even if the operation fails later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from aiodist.backends.base import NAMED
from aiodist.communicator.fingerprint import merged
from aiodist.communicator.oplog import LEFT, Latest
from aiodist.control import LIVENESS_SECONDS, sides

UNANSWERED = f"did not answer within {LIVENESS_SECONDS:g} s"

_MOST_IN_A_ROW = 3

Lists = dict[int, list[int]]  # tag -> the sizes of messages, in bytes


class Cause(IntEnum):
    """The cause of an error at the end of an operation. Larger causes explain smaller ones."""

    NONE = 0
    FAILED = 1
    """The part of one rank failed: in a library, or in code of the user."""
    GONE = 2
    """Another rank has left, as the part of one rank found."""
    SILENT = 3
    """A rank did not answer."""
    LOST = 4
    """A rank died, or cannot be reached."""
    MISMATCH = 5
    """The ranks disagree."""


class Statement(NamedTuple):
    """The knowledge of one rank about an operation."""

    text: str = ""
    """The operation with its calling line, or the last operation of a rank that has not issued the number."""
    word: int | None = None
    """The signature of the operation, or None if the rank has no record of that operation."""
    issued: bool = True
    cause: Cause = Cause.NONE
    error: str = ""
    """The error of this rank's part, or "" without an error and for a difference of signatures."""
    begun: bool = False
    """True if the operation had begun, so that its output is unspecified."""
    bound: bool = False
    """True if the operation runs in a library or on a device, and cannot be stopped."""

    @classmethod
    def read(cls, fields: list[Any]) -> Statement:
        """Return the statement that arrived as JSON."""
        text, word, issued, cause, *rest = fields
        return cls(text, word, issued, Cause(cause), *rest)


class Verdict(NamedTuple):
    """How an operation ends on every rank."""

    cause: Cause
    rank: int = -1
    """The rank that is the cause: the first lost rank, else the lowest rank, or -1 if the ranks differ."""
    error: str = ""
    """The first error of the ranks that are the cause, or of any rank if the cause is silent ranks, or ""."""
    sides: str = ""
    """The operation of each rank, if the ranks differ."""
    since: int = -1
    """The number of the first mismatch in this row of mismatches."""
    begun: bool = False
    """True if the output of the operation is unspecified on some rank."""
    silent: tuple[int, ...] = ()
    """The ranks that did not answer."""
    abort: bool = False
    """True if the ranks abort the communicator by this verdict. The loss of a rank aborts it in any case."""


class Ask(NamedTuple):
    """Make this rank's statement, by `state`."""

    number: int


class SendStatement(NamedTuple):
    """Send this rank's statement to every other rank."""

    number: int
    statement: Statement


class StartTimer(NamedTuple):
    """Call `expire` after the liveness bound."""

    number: int


class Drain(NamedTuple):
    """Drain the messages between this rank and another one by the final lists of both."""

    number: int
    rank: int
    sent: Lists
    asked: Lists


class Conclude(NamedTuple):
    """End the operation on this rank."""

    number: int
    verdict: Verdict


class Clear(NamedTuple):
    """Allow another use of the operation's tag, since all messages of the operation are drained."""

    number: int


Action = Ask | SendStatement | StartTimer | Drain | Conclude | Clear


@dataclass(slots=True)
class _Case:
    """The conversation about one number."""

    statements: dict[int, Statement] = field(default_factory=dict)
    """The statements that came before the verdict, by rank."""
    answered: set[int] = field(default_factory=set)
    """The ranks with a statement, after the verdict too."""
    lists: dict[int, tuple[Lists, Lists]] = field(default_factory=dict)
    """The messages that other ranks sent and asked for, until this rank's own lists are final."""
    silent: set[int] = field(default_factory=set)
    """Ranks that have not answered within the liveness bound, in this conversation or in another one."""
    verdict: Verdict | None = None


class Conversations:
    """The conversations of one communicator on one rank.

    Each event returns the actions to perform, in order. Only the first statement of a rank about a number counts.
    Deaths and answers after a verdict do not change the verdict. Late answers are still drained.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self.cases: Latest[_Case] = Latest()
        """The conversations, by number."""
        self._open: Latest[_Case] = Latest()
        """Cases that wait for a verdict, or for the lists of other ranks."""
        self.gone: dict[int, bool] = {}
        """The ranks that left, each with True for a goodbye or False for a loss."""

    def state(self, number: int, statement: Statement) -> list[Action]:
        """Make the statement of this rank, unless the statement is made already."""
        case, actions = self._case(number)
        if self._rank in case.answered:
            return actions
        case.answered.add(self._rank)
        case.statements[self._rank] = statement
        actions.append(SendStatement(number, statement))
        for rank, (sent, asked) in case.lists.items():
            actions.append(Drain(number, rank, sent, asked))
        case.lists.clear()
        return actions + self._advance()

    def hear(self, rank: int, number: int, statement: Statement, sent: Lists, asked: Lists) -> list[Action]:
        """Handle the statement of another rank."""
        case, actions = self._case(number)
        if rank in case.answered:
            return actions
        case.answered.add(rank)
        if case.verdict is None and rank not in self.gone:  # a process that ends may still answer
            case.statements[rank] = statement
        if self._rank in case.answered:
            actions.append(Drain(number, rank, sent, asked))
        else:
            case.lists[rank] = sent, asked
            actions.append(Ask(number))
        return actions + self._advance()

    def leave(self, rank: int, *, clean: bool = False) -> list[Action]:
        """Handle the exit of another rank, which is dead, or has left with a goodbye if `clean`."""
        self.gone.setdefault(rank, clean)
        return self._advance()

    def expire(self, number: int) -> list[Action]:
        """Handle the end of the liveness bound. Ranks without an answer are silent in all open conversations."""
        if (case := self.cases.get(number)) is not None:
            silent = self._missing(case)
            for waiting in self._open.values():
                waiting.silent.update(silent)
        return self._advance()

    def is_open(self, number: int) -> bool:
        """Return True for a conversation about the number without a verdict."""
        case = self.cases.get(number)
        return case is not None and case.verdict is None

    def verdict(self, number: int) -> Verdict | None:
        """Return the verdict on an operation, or None if there is none yet."""
        case = self.cases.get(number)
        return None if case is None else case.verdict

    def _case(self, number: int) -> tuple[_Case, list[Action]]:
        """Return the conversation about a number, with the actions that open a new conversation."""
        case = self.cases.get(number)
        if case is not None:
            return case, []
        case = self.cases[number] = self._open[number] = _Case()
        return case, [StartTimer(number)]

    def _advance(self) -> list[Action]:
        """Conclude complete conversations in the order of the numbers, so that all ranks count the same mismatches."""
        actions: list[Action] = []
        blocked = False
        for number, case in sorted(self._open.items()):
            ordered = number < NAMED
            complete = self._rank in case.answered and case.silent.issuperset(self._missing(case))
            if case.verdict is None and complete and not (ordered and blocked):
                case.verdict = self._judge(number, case)
                actions.append(Conclude(number, case.verdict))
            blocked = blocked or (ordered and case.verdict is None)
            if case.verdict is not None and not self._missing(case):
                del self._open[number]
                actions.append(Clear(number))
        return actions

    def _missing(self, case: _Case) -> list[int]:
        """Return the ranks that may still answer."""
        return [rank for rank in self._others if rank not in case.answered and rank not in self.gone]

    def _judge(self, number: int, case: _Case) -> Verdict:
        verdict = judge(case.statements, tuple(self._missing(case)), self.gone)
        if verdict.cause is Cause.MISMATCH and verdict.rank < 0 and number < NAMED:
            since = number
            while self._differ(since - 1):
                since -= 1
            end = number + 1
            while self._differ(end):
                end += 1
            verdict = verdict._replace(since=since, abort=verdict.abort or end - since >= _MOST_IN_A_ROW)
        return verdict

    def _differ(self, number: int) -> bool:
        """Return True if the ranks are known to differ on an operation of the order."""
        verdict = self.verdict(number)
        return verdict is not None and verdict.cause is Cause.MISMATCH and verdict.rank < 0


def judge(
    statements: dict[int, Statement], silent: tuple[int, ...] = (), gone: dict[int, bool] | None = None
) -> Verdict:
    """Return the verdict on an operation by the statements of the ranks.

    `silent` are the ranks without an answer. `gone` are the ranks that left, in the order of the control channel, with
    True for a goodbye. Each rank gets the statements and the exit of another one in this order.
    """
    left = gone or {}
    unheard = {rank: clean for rank, clean in left.items() if rank not in statements}
    begun = any(one.begun for one in statements.values())
    bound = any(one.bound for one in statements.values())
    if any(one.cause is Cause.MISMATCH and not one.error for one in statements.values()) or _words_differ(statements):
        text = _sides(statements, silent, unheard)
        return Verdict(Cause.MISMATCH, sides=text, begun=begun, silent=silent, abort=bound)
    lost = [rank for rank, clean in left.items() if not clean]
    worst = max(
        *(one.cause for one in statements.values()),
        Cause.SILENT if silent else Cause.NONE,
        Cause.LOST if any(rank in unheard for rank in lost) else Cause.NONE,
    )
    causes = [rank for rank in sorted(statements) if statements[rank].cause is worst]
    errors = [statements[rank].error for rank in (sorted(statements) if worst is Cause.SILENT else causes)]
    error = next((error for error in errors if error), "")
    # Lost ranks with a statement count too, since the other ranks may have left because of the first lost rank.
    named = {Cause.LOST: lost, Cause.SILENT: sorted(silent)}.get(worst, causes)
    return Verdict(worst, named[0], error, begun=begun, silent=silent, abort=bound and worst is not Cause.LOST)


def _words_differ(statements: dict[int, Statement]) -> bool:
    met: int | None = None
    for statement in statements.values():
        if statement.word is not None:
            both = statement.word if met is None else merged(met, statement.word)
            if both is None:
                return True
            met = both
    return False


def _sides(statements: dict[int, Statement], silent: Iterable[int], gone: dict[int, bool]) -> str:
    """Return the operation of each rank. Ranks with the same operation and line are named together."""
    issued = {statement.text for statement in statements.values() if statement.issued}
    differ = len(issued) > 1 or sum(statement.issued for statement in statements.values()) == 1
    edited = "" if differ else ", edited in different ways"  # texts do not show the table of implementations
    said = dict.fromkeys(silent, UNANSWERED)
    said |= {rank: LEFT if clean else "lost" for rank, clean in gone.items()}
    for rank, statement in statements.items():
        if not statement.issued:
            said[rank] = f"not issued, after {statement.text}" if statement.text else "not issued"
        else:
            said[rank] = LEFT if statement.text == LEFT else f"{statement.text}{edited}"
    return sides(said)
