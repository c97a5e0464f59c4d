"""Reports late ranks: one rank logs all waits for ranks after some seconds, then once a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from aiodist.communicator.inquiry import ANSWER_SECONDS, Inquiry, Wait

REPORT_SECONDS = 10.0
"""Default age of a reported wait, in seconds."""
_PAUSE_SECONDS = 60.0  # between two reports
_TURN_SECONDS = 2.0  # time for a lower rank to report in place of this one
_COUNTED_SECONDS = 1.0  # shortest wait in a report, at most half of `after`
_SHOWN = 16

_log = logging.getLogger("aiodist")


class StallReporter:
    """Writes the reports of this rank, if this rank is the lowest waiting one."""

    def __init__(self, inquiry: Inquiry, ages: Callable[[], list[float]], waits: Callable[[], list[Wait]]) -> None:
        """`ages` returns the ages of this rank's waits in seconds, `waits` some of the waits, new ones first."""
        self.after: float | None = REPORT_SECONDS
        """Age of a reported wait, in seconds. None disables reports."""
        self.may_continue = ""
        """Reason why this rank may continue before its operations end, by the last check (empty if there is none)."""
        self._inquiry = inquiry
        self._ages = ages
        self._waits = waits
        self._asked: float | None = None

    @property
    def covered(self) -> float:
        """Latest start, by the loop's clock, of the waits that the last report covers."""
        return self._inquiry.reported - (self.after or 0.0) / 2

    def look(self, now: float) -> None:
        """Ask all ranks if a report is due, then report after some time for the answers."""
        due = [age for age in self._ages() if self._is_due(age, now)]
        if not due:
            self._asked = None
        elif self._asked is None:
            self._asked = now
            self._inquiry.ask(self._others(), "")
        elif now >= self._asked + (_TURN_SECONDS if self._is_anothers(now) else ANSWER_SECONDS):
            text = self._text(max(due))
            self._inquiry.announce_report()
            _log.warning(text)
            self._asked = None

    def _is_due(self, seconds: float, now: float) -> bool:
        """Return True if a wait of this age must be reported, first once and then each minute."""
        if self.after is None or seconds < self.after:
            return False
        return self.covered < now - seconds or now >= self._inquiry.reported + _PAUSE_SECONDS

    def _others(self) -> list[int]:
        channel = self._inquiry.channel
        return [rank for rank in range(channel.size) if rank != channel.rank and rank not in channel.exits()]

    def _is_anothers(self, now: float) -> bool:
        """Return True if a lower rank has a wait to report too, and so reports."""
        assert self._asked is not None
        known = (self._inquiry.answer(rank, self._asked) for rank in range(self._inquiry.channel.rank))
        waits = (wait for answer in known if answer is not None for wait in answer.waits)
        return any(self._is_due(wait.seconds + 2 * ANSWER_SECONDS, now) for wait in waits)

    def _text(self, seconds: float) -> str:
        """Return the report, with the waits of this rank, the states of late ranks, and the waits of other ranks."""
        assert self._asked is not None
        assert self.after is not None
        channel = self._inquiry.channel
        since = self._asked - ANSWER_SECONDS  # an outstanding question was not repeated
        waiting = {channel.rank: self._waits()}
        for rank in self._others():
            answer = self._inquiry.answer(rank, since)
            waiting[rank] = [] if answer is None else answer.waits
        counted = min(_COUNTED_SECONDS, self.after / 2)
        long = {rank: [wait for wait in waits if wait.seconds >= counted] for rank, waits in waiting.items()}
        wanted = {whom for waits in long.values() for wait in waits for whom in wait.ranks} - {channel.rank}
        lines = [f"rank {channel.rank} {wait}" for wait in long.pop(channel.rank)]
        lines += [f"rank {rank}: {self._inquiry.text(rank, since) or 'was not asked'}" for rank in sorted(wanted)]
        lines += [f"rank {rank} {wait}" for rank in sorted(long.keys() - wanted) for wait in long[rank]]
        more = [f"and {len(lines) - _SHOWN} more lines"] if len(lines) > _SHOWN else []
        if circle := _circle(waiting):
            chain = "".join(f" waits for rank {rank}, which" for rank in circle[1:])
            end = "a deadlock, unless a timer, a thread or a socket ends it"
            if self.may_continue:
                end += f"\n  (on rank {channel.rank}, {self.may_continue})"
            more.append(f"rank {circle[0]}{chain} waits for rank {circle[0]}: {end}")
        return "\n  ".join([f"an operation has waited for {seconds:.0f} s:", *lines[:_SHOWN], *more])


def _circle(waiting: Mapping[int, Sequence[Wait]]) -> list[int]:
    """Return ranks that wait for one another in a circle (empty if one of them may continue)."""
    left = {
        rank: [set() if wait.is_served else {*wait.ranks} for wait in waits] for rank, waits in waiting.items() if waits
    }
    while free := [rank for rank, waits in left.items() if not all(whom and whom <= left.keys() for whom in waits)]:
        for rank in free:
            del left[rank]
    path, rank = list[int](), min(left, default=0)
    while left and rank not in path:
        path.append(rank)
        rank = min(left[rank][0])
    return path[path.index(rank) :] if left else []
