"""Which rank failed, and what the job's exit code is: no process, no socket, no clock of its own.

The rules:

1. A rank that ends with a non-zero code or by a signal, unasked, is a cause and is named at once. The first
   cause gives the job's exit code; signal n gives 128 + n.
2. Where the control channel knows of an earlier failure of another rank, that rank is the cause, and this one
   a consequence: it is waited for, at most `HOLD` seconds.
3. A rank that ends with code 0 after it said goodbye to the control channel is done, and the others may go on.
   One that left the channel without a goodbye is a failure while others still work; one that never joined is a
   failure when others still work `finish_within` seconds later. The exit code is 1.
4. What ended because the launcher or mpirun asked it to, or because its guard was killed, is no cause; if nothing
   else explains the end of the job, mpirun's own exit code or that rank is named after all.
5. After the first cause a rank is named too if it was not asked to stop and did not merely leave with code 1,
   as one does whose peers are lost.
6. Where the others are to keep going, none is a consequence: each that fails is named at once, and the first gives
   the code.
7. In an elastic job that has begun, none is a consequence either, and none a cause: each that fails is named at once.
   The job is over when fewer ranks have not failed than it needs; then all that failed are named again, and the first
   of them gives the code. Else the code is 0.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from aiodist.control.texts import name_ranks

if TYPE_CHECKING:
    from aiodist.control.roster import Roster
    from aiodist.elastic.sessions import ElasticSessions
    from aiodist.launch.commands import Job

HOLD = 1.5
_GOODBYE_TRAVELS = 0.5
_ASKED_BY_OTHERS = 1.0


class Left(Enum):
    """What the control channel knows of a rank."""

    NEVER_JOINED = 1
    CLEAN = 2
    OPEN = 3  # it joined and has not said goodbye


Known: TypeAlias = "Roster | ElasticSessions"
"""What the hub knows of ranks: those that came, and how each left."""


def how_left(roster: Known, rank: int) -> Left:
    """Return what the hub knows of a rank."""
    exit = roster.exits.get(rank)
    if exit is None:
        return Left.OPEN if rank in roster.joined else Left.NEVER_JOINED
    return Left.CLEAN if exit.clean else Left.OPEN


@dataclass(frozen=True)
class Ending:
    """How a rank ended: its exit code, or minus the signal; `told` when it need not be its own doing."""

    rank: int
    code: int
    told: bool = False

    @property
    def exit_code(self) -> int:
        """The code a shell would show."""
        return self.code if self.code >= 0 else 128 - self.code


def describe(code: int) -> str:
    """Return a return code in words.

    >>> describe(3), describe(-9)
    ('exit code 3', 'signal SIGKILL')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


class JobVerdict:
    """Hears how ranks end, and says in lines who failed; `code` is None as long as nobody did."""

    def __init__(self, job: Job, roster: Known) -> None:
        self.code: int | None = None
        self.working = set(range(job.ranks))
        self._job = job
        self._roster = roster
        self._servers = range(job.ranks - job.servers, job.ranks)
        self._least = None if job.elastic is None else job.elastic[0]  # how many ranks must not have failed
        self._size = job.ranks
        self._without: dict[int, Ending] = {}
        self._named: set[int] = set()
        self._suspects: dict[int, tuple[float, Ending]] = {}

    @property
    def due(self) -> float | None:
        """When `tick` has something to decide."""
        return None if self._over else min((due for due, _ in self._suspects.values()), default=None)

    @property
    def _over(self) -> bool:
        """What comes now is the end of the job."""
        return self.code is not None and not self._job.keep_going

    def started(self, rank: int) -> None:
        """There is one more rank."""
        self.working.add(rank)
        self._size += 1

    def dismissed(self, rank: int) -> list[str]:
        """A rank that was to join is not needed; return the lines to print."""
        self.working.discard(rank)
        self._size -= 1
        return self._too_few() if self.code is None else []

    def ended(self, ending: Ending, now: float, *, elastic: bool = False) -> list[str]:
        """Take in that a rank ended, of a job that was `elastic` by then; return the lines to print."""
        self.working.discard(ending.rank)
        if ending.code == 0:
            return self._left_early(ending, now)
        if elastic and self.code is None:
            self._named.add(ending.rank)
            self._without[ending.rank] = ending
            return [self._line(ending), *self._too_few()]
        if self._job.keep_going:
            if not self.working:
                self._suspects.clear()  # nobody is left who still worked
            return self._name(ending)
        if ending.told:
            self._suspects[ending.rank] = (now + _ASKED_BY_OTHERS, ending)
            return []
        return self._failed(ending, now)

    def tick(self, now: float) -> list[str]:
        """Judge the suspects whose time has come."""
        if self._over:
            return []
        lines: list[str] = []
        for rank, (due, ending) in list(self._suspects.items()):
            if due > now:
                continue
            if ending.code != 0:
                return lines + self._settle()
            del self._suspects[rank]
            if self.working and how_left(self._roster, rank) is not Left.CLEAN:
                lines.append(self._early(ending, self.working))
                if self._least is not None:
                    self._without[rank] = ending
                    lines += self._too_few()
        if lines and self.code is None and self._least is None:
            self.code = 1
        return lines

    def stopped_by_mpirun(self, code: int) -> list[str]:
        """Take in that mpirun ended with `code`, when no rank can be running; return the lines to print."""
        suspects = [ending for _, ending in self._suspects.values() if ending.code != 0]
        if self.code is not None or not (suspects or self.working):
            return []
        if not all(ending.told for ending in suspects):
            return self._settle()
        self.code = (code if code >= 0 else 128 - code) or 1
        return [f"mpirun: {describe(code)} before its ranks had ended"]

    def _first_failure(self) -> Ending | None:
        """Return how the first rank ended that the hub knows to have failed."""
        failed = (exit for exit in self._roster.exits.values() if not exit.clean)
        return next((Ending(exit.rank, exit.exitcode or 1) for exit in failed), None)

    def _failed(self, ending: Ending, now: float) -> list[str]:
        if self.code is not None:
            consequence = ending.code == 1 and how_left(self._roster, ending.rank) is not Left.NEVER_JOINED
            return [] if consequence else self._name(ending)
        first = self._first_failure()
        if first is not None and first.rank in self.working:
            self._suspects[ending.rank] = (now + HOLD, ending)
            return []
        early = [
            self._early(other, self.working | {ending.rank})
            for _, other in self._suspects.values()
            if other.code == 0 and how_left(self._roster, other.rank) is Left.OPEN
        ]
        return early + self._name(ending)

    def _too_few(self) -> list[str]:
        """Return the line that says that too few are left, if so."""
        left = self._size - len(self._without)
        if self._least is None or left >= self._least:
            return []
        self.code = next(iter(self._without.values())).exit_code or 1
        lost = name_ranks(self._without)
        return [f"{left} of at least {self._least} ranks are left: {lost} failed"]

    def _left_early(self, ending: Ending, now: float) -> list[str]:
        if not self.working:
            self._suspects = {rank: suspect for rank, suspect in self._suspects.items() if suspect[1].code != 0}
            return []
        left = how_left(self._roster, ending.rank)
        if left is not Left.CLEAN:
            patience = self._job.finish_within if left is Left.NEVER_JOINED else _GOODBYE_TRAVELS
            self._suspects[ending.rank] = (now + patience, ending)
        return []

    def _early(self, ending: Ending, others: set[int]) -> str:
        self._named.add(ending.rank)
        return f"{self._line(ending)}, while others still worked ({', '.join(map(str, sorted(others)))})"

    def _settle(self) -> list[str]:
        """Nothing more will be learnt: ranks that ended with a failure are named, the first of them gives the code."""
        if self.code is not None:
            return []
        failed = [ending for _, ending in self._suspects.values() if ending.code != 0]
        if not failed:
            return []
        first = self._first_failure()
        if first is not None and first.rank in self.working:
            return self._name(first)
        unasked = [ending for ending in failed if not ending.told]
        return [line for ending in (unasked or failed) for line in self._name(ending)]

    def _name(self, ending: Ending) -> list[str]:
        if self.code is None:
            self.code = ending.exit_code
        if ending.rank in self._named:
            return []
        self._named.add(ending.rank)
        return [self._line(ending)]

    def _line(self, ending: Ending) -> str:
        server = " (server)" if ending.rank in self._servers else ""
        return f"rank {ending.rank}{server}: {describe(ending.code)}"
