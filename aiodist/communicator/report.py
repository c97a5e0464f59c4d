"""Reports of late ranks: after a while one rank logs who waits for whom, once a minute as long as it lasts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from aiodist.communicator.inquiry import Inquiry, Wait

REPORT_SECONDS = 10.0
"""How long an operation is waited for before it is reported."""
_AGAIN_SECONDS = 60.0
_ANSWER_SECONDS = 0.3
_TURN_SECONDS = 2.0  # how long the ranks below this one have to report in its place
_COUNTED_SECONDS = 1.0  # what is waited for longer is in a report, and told where it is half of what is reported
_SHOWN = 16

_log = logging.getLogger("aiodist")


class StallReporter:
    """Decides when this rank reports, which of those that wait the lowest does, and what."""

    def __init__(self, inquiry: Inquiry, ages: Callable[[], list[float]], waits: Callable[[], list[Wait]]) -> None:
        """`ages` returns for how long this rank waits in each operation, `waits` some of these, the new ones first."""
        self.after: float | None = REPORT_SECONDS
        """In seconds; None: never."""
        self.may_continue = ""
        """Reason why this rank may continue before its operations end, by the last check; empty if there is none."""
        self._inquiry = inquiry
        self._ages = ages
        self._waits = waits
        self._asked: float | None = None

    @property
    def told(self) -> float:
        """What is waited for since then has been in no report, or when it was new."""
        return self._inquiry.reported - (self.after or 0.0) / 2

    def look(self, now: float) -> None:
        """Ask all ranks when it is time, and report once they had time to answer."""
        due = [age for age in self._ages() if self._is_due(age, now)]
        if not due:
            self._asked = None
        elif self._asked is None:
            self._asked = now
            self._inquiry.ask(self._others(), "")
        elif now >= self._asked + (_TURN_SECONDS if self._is_anothers(now) else _ANSWER_SECONDS):
            text = self._text(max(due))
            self._inquiry.tell_report()
            _log.warning(text)
            self._asked = None

    def _is_due(self, seconds: float, now: float) -> bool:
        """Return whether what is waited for so long has to be reported: each wait by itself, and again each minute."""
        if self.after is None or seconds < self.after:
            return False
        return self.told < now - seconds or now >= self._inquiry.reported + _AGAIN_SECONDS

    def _others(self) -> list[int]:
        channel = self._inquiry.channel
        return [rank for rank in range(channel.size) if rank != channel.rank and rank not in channel.exits()]

    def _is_anothers(self, now: float) -> bool:
        """Return True when a rank below this one has to report as well, and so does."""
        assert self._asked is not None
        known = (self._inquiry.answer(rank, self._asked) for rank in range(self._inquiry.channel.rank))
        waits = (wait for answer in known if answer is not None for wait in answer.waits)
        return any(self._is_due(wait.seconds + 2 * _ANSWER_SECONDS, now) for wait in waits)

    def _text(self, seconds: float) -> str:
        """Return who waits for whom: first in what this rank waits, then where the late ones are, then the others."""
        assert self._asked is not None
        assert self.after is not None
        channel = self._inquiry.channel
        waiting = {channel.rank: self._waits()}
        for rank in self._others():
            answer = self._inquiry.answer(rank, self._asked)
            waiting[rank] = [] if answer is None else answer.waits
        counted = min(_COUNTED_SECONDS, self.after / 2)
        long = {rank: [wait for wait in waits if wait.seconds >= counted] for rank, waits in waiting.items()}
        wanted = {whom for waits in long.values() for wait in waits for whom in wait.ranks} - {channel.rank}
        lines = [f"rank {channel.rank} {wait}" for wait in long.pop(channel.rank)]
        lines += [f"rank {rank}: {self._inquiry.text(rank, self._asked) or 'was not asked'}" for rank in sorted(wanted)]
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
    """Return ranks of which each waits for the next one, and the last for the first; none where one may go on."""
    left = {rank: [set(wait.ranks) for wait in waits] for rank, waits in waiting.items() if waits}
    while free := [rank for rank, waits in left.items() if not all(whom and whom <= left.keys() for whom in waits)]:
        for rank in free:
            del left[rank]
    path, rank = list[int](), min(left, default=0)
    while left and rank not in path:
        path.append(rank)
        rank = min(left[rank][0])
    return path[path.index(rank) :] if left else []
