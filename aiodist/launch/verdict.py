"""The failed ranks and the exit code of a job, without I/O and without a clock.

The rules:

1. A rank is a cause if it ends with a non-zero code or by a signal, without a request to stop. It is named without a
   wait. The first cause gives the job's exit code; signal n gives 128 + n.
2. If the control channel has an earlier failure of another rank, that rank is the cause, and this one a consequence.
   The verdict waits for the cause, at most `HOLD` seconds.
3. A rank that ends with code 0 after a goodbye to the control channel has finished, and the others may continue. A rank
   that left the channel without a goodbye is a failure while others still work. A rank that never joined is a failure
   if others still work `finish_within` seconds later. The exit code is 1.
4. A rank that ended after a request of the launcher or mpirun, or after a kill of its guard, is no cause. If there is
   no other reason for the end of the job, mpirun's exit code or that rank is named.
5. After the first cause, a further rank is named if it was not asked to stop, unless it left with code 1, as a rank
   does after the loss of a peer.
6. With `keep_going`, no rank is a consequence: each failed rank is named without a wait, and the first gives the code.
7. In an elastic job that has begun, a failed rank is named without a wait, and is neither cause nor consequence. The
   job has failed when fewer ranks are left than it needs. Then all failed ranks are named again, and the first gives
   the code. Otherwise the code is 0.
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
    """The state of a rank at the control channel."""

    NEVER_JOINED = 1
    CLEAN = 2
    OPEN = 3  # joined, without a goodbye


Known: TypeAlias = "Roster | ElasticSessions"
"""The ranks that joined the hub, and their exits."""


def how_left(roster: Known, rank: int) -> Left:
    """Return the state of a rank at the hub."""
    exit = roster.exits.get(rank)
    if exit is None:
        return Left.OPEN if rank in roster.joined else Left.NEVER_JOINED
    return Left.CLEAN if exit.clean else Left.OPEN


@dataclass(frozen=True)
class Ending:
    """The end of a rank."""

    rank: int
    code: int
    """Exit code, or minus the signal."""
    told: bool = False
    """True if the rank was asked to stop, or its guard was killed."""

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
    """Returns lines that name failed ranks, from the ends of ranks. `code` is None before a failure."""

    def __init__(self, job: Job, roster: Known) -> None:
        self.code: int | None = None
        self.working = set(range(job.ranks))
        self._job = job
        self._roster = roster
        self._servers = range(job.ranks - job.servers, job.ranks)
        self._least = None if job.elastic is None else job.elastic[0]
        """Fewest ranks of an elastic job."""
        self._size = job.ranks
        self._without: dict[int, Ending] = {}
        self._named: set[int] = set()
        self._suspects: dict[int, tuple[float, Ending]] = {}

    @property
    def due(self) -> float | None:
        """Time of the next decision of `tick`, or None."""
        return None if self._ending else min((due for due, _ in self._suspects.values()), default=None)

    @property
    def _ending(self) -> bool:
        """True after the cause of the job's end."""
        return self.code is not None and not self._job.keep_going

    def started(self, rank: int) -> None:
        """Add one rank."""
        self.working.add(rank)
        self._size += 1

    def dismissed(self, rank: int) -> list[str]:
        """Remove a new rank that is not needed. Return the lines to print."""
        self.working.discard(rank)
        self._size -= 1
        return self._too_few() if self.code is None else []

    def ended(self, ending: Ending, now: float, *, elastic: bool = False) -> list[str]:
        """Take the end of a rank, of a job that has begun if `elastic`. Return the lines to print."""
        self.working.discard(ending.rank)
        if ending.code == 0:
            return self._left_early(ending, now)
        if elastic and self.code is None:
            self._named.add(ending.rank)
            self._without[ending.rank] = ending
            return [self._line(ending), *self._too_few()]
        if self._job.keep_going:
            if not self.working:
                self._suspects.clear()  # no rank works any more
            return self._name(ending)
        if ending.told:
            self._suspects[ending.rank] = (now + _ASKED_BY_OTHERS, ending)
            return []
        return self._failed(ending, now)

    def tick(self, now: float) -> list[str]:
        """Decide on suspects after their wait. Return the lines to print."""
        if self._ending:
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
        """Take the end of mpirun with `code`, after all its ranks. Return the lines to print."""
        suspects = [ending for _, ending in self._suspects.values() if ending.code != 0]
        if self.code is not None or not (suspects or self.working):
            return []
        if not all(ending.told for ending in suspects):
            return self._settle()
        self.code = (code if code >= 0 else 128 - code) or 1
        return [f"mpirun: {describe(code)} before its ranks had ended"]

    def _first_failure(self) -> Ending | None:
        """Return the end of the first rank that failed at the hub."""
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
        """Return the line for too few remaining ranks, if so."""
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
        waits = self._job.debug is not None and left is Left.NEVER_JOINED  # a debugger may hold the others for long
        if left is not Left.CLEAN and not waits:
            patience = self._job.finish_within if left is Left.NEVER_JOINED else _GOODBYE_TRAVELS
            self._suspects[ending.rank] = (now + patience, ending)
        return []

    def _early(self, ending: Ending, others: set[int]) -> str:
        self._named.add(ending.rank)
        return f"{self._line(ending)}, while others still worked ({', '.join(map(str, sorted(others)))})"

    def _settle(self) -> list[str]:
        """Name the ranks that ended with a failure, without further waits. The first gives the code."""
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
