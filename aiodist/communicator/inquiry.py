"""Ranks ask for the state of other ranks over the control channel, even if a main thread is blocked.

The answer of a rank has its last operation, its waits, and the current lines of its program. Each rank answers twice:
immediately from the listener thread, and later from its loop. So the asking rank can distinguish a busy rank (only the
first answer) from a rank that is stopped or holds the GIL (no answer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from aiodist.control import Channel, name_ranks
from aiodist.handles import Progress
from aiodist.handles.deadline import loop_time

_TOPIC = "whereabouts"
ANSWER_SECONDS = 0.3
"""Time after which a rank without an answer is reported as silent, in seconds."""
_LOOP_SECONDS = 0.2  # a loop without an answer after this is reported as silent
_NEWS_SECONDS = 2.0  # an older answer is reported with its age


class Wait(NamedTuple):
    """An operation that a rank waits in."""

    what: str
    """The operation, with its calling line."""
    seconds: float
    """Duration of the wait, to a tenth of a second."""
    ranks: list[int]
    """World ranks that the rank waits for, as far as known."""
    is_served: bool = False
    """True if a server of another rank may end the wait while the program of that rank waits."""

    def __str__(self) -> str:
        whom = f"for {name_ranks(self.ranks)} " if self.ranks else ""
        return f"waits {whom}in {self.what}{f', for {self.seconds:.0f} s' if self.seconds >= 1 else ''}"


class Whereabouts(NamedTuple):
    """The state of a rank, sent as a list."""

    last: str
    """Last collective of the rank on the communicator."""
    lines: list[str]
    """Lines of the suspended tasks, or the current line of the loop's thread."""
    waits: list[Wait]

    @classmethod
    def read(cls, received: list[Any]) -> Whereabouts:
        """Return the state that another rank has sent."""
        last, lines, waits = received
        return cls(last, lines, [Wait(*wait) for wait in waits])

    def text(self, *, loop_answers: bool | None) -> str:
        """Return the text of the state. `loop_answers` is None if the loop may still answer."""
        parts = [self.last, *map(str, self.waits)]
        if loop_answers is not None:
            parts.append(f"its loop {'answers' if loop_answers else 'does not answer'}")
        known = " ".join(parts)
        if lines := [line for line in self.lines if line not in known]:
            parts.append(f"it is at {' and at '.join(lines)}")
        return "; ".join(filter(None, parts))


@dataclass(eq=False)
class _RankEntry:
    """Questions to one rank, with the answers. Times are in seconds of the loop's clock."""

    number: int = 0
    """Number of the last question."""
    asked: float = -inf
    """Time of the last question."""
    answered: float = -inf
    """Time of the last answer or unsolicited state."""
    answer: Whereabouts = Whereabouts("", [], [])  # noqa: RUF009  - it is never changed
    answer_to: int = 0
    """Number of the answered question, or -1 for an unsolicited state."""
    loop_answer_to: int = 0
    """Number of the last question that the rank's loop has answered."""

    def loop_answers(self, now: float) -> bool | None:
        """Return True if the rank's loop has answered, False if not in time, or None if the loop may still answer."""
        if self.answer_to < 0:
            return None
        if self.answer_to <= self.loop_answer_to:
            return True
        return False if now - self.asked >= _LOOP_SECONDS else None


class Inquiry:
    """Questions and answers of one rank. Times are in seconds of the loop's clock.

    Messages arrive on the control channel's listener thread, which replaces one reference at a time.
    """

    def __init__(self, channel: Channel, progress: Progress, here: Callable[[str, bool], Whereabouts]) -> None:
        """`here(comm, on_loop)`, called on the loop's thread or on the listener's, returns this rank's state."""
        self.channel = channel
        self.reported = -inf
        """Time of the last report of any rank."""
        self._progress = progress
        self._here = here
        self._entries: dict[int, _RankEntry] = {}
        channel.subscribe(_TOPIC, self._heard)

    def close(self) -> None:
        """Stop answering."""
        with suppress(RuntimeError):  # the channel is closed
            self.channel.unsubscribe(_TOPIC)

    def now(self) -> float:
        """Return the loop's time without pauses, on any thread."""
        return loop_time(self._progress.loop)

    # --- asking --------------------------------------------------------------------------------------------

    def ask(self, ranks: Iterable[int], comm: str) -> None:
        """Ask `ranks` of the world for their state and their last operation on the communicator `comm`."""
        now = self.now()
        for rank in ranks:
            entry = self._entries.setdefault(rank, _RankEntry())
            if now - entry.asked < ANSWER_SECONDS and entry.answer_to != entry.number:
                continue  # the answer is outstanding
            entry.number += 1
            entry.asked = now
            self.channel.send(rank, _TOPIC, ["ask", comm, entry.number])

    def hint(self, rank: int, last: str) -> None:
        """Record the last operation of `rank`, from another message, unless an answer is recent."""
        entry = self._entries.setdefault(rank, _RankEntry())
        now = self.now()
        if entry.answer_to < 0 or now - entry.answered > _NEWS_SECONDS:
            entry.answer, entry.answer_to, entry.answered = Whereabouts(last, [], []), -1, now

    def announce_report(self) -> None:
        """Notify the other ranks that this rank reports."""
        self.reported = self.now()
        self.channel.broadcast(_TOPIC, ["report", "", 0])

    def answer(self, rank: int, since: float) -> Whereabouts | None:
        """Return the answer of `rank` since the time `since`, or None."""
        entry = self._entries.get(rank)
        return entry.answer if entry is not None and entry.answered >= since else None

    def is_silent(self, rank: int) -> bool:
        """Return True if `rank` has not answered the last question in time."""
        entry = self._entries.get(rank)
        return entry is not None and entry.answered < entry.asked <= self.now() - ANSWER_SECONDS

    def text(self, rank: int, since: float) -> str | None:
        """Return the state of `rank` as text, or None if nothing is known since `since`."""
        left = self.channel.exits().get(rank)
        if left is not None:
            return f"has left: {left.cause}"
        entry = self._entries.get(rank)
        if entry is None or max(entry.asked, entry.answered) < since:
            return None
        now = self.now()
        words = []
        if self.is_silent(rank):
            words.append("does not answer")
        elif entry.answered < since:
            words.append(f"has not answered within {now - entry.asked:.1f} s")
        if entry.answered >= since:
            old = f"{now - entry.answered:.0f} s ago: " if now - entry.answered > _NEWS_SECONDS else ""
            words.append(old + entry.answer.text(loop_answers=entry.loop_answers(now)))
        return "; ".join(words)

    # --- answering -----------------------------------------------------------------------------------------

    def _heard(self, src: int, message: list[Any]) -> None:
        kind, comm, content = message
        if kind == "ask":
            self._answer(src, comm, content)
        elif kind == "report":
            self.reported = self.now()
        else:
            number, answer = content
            entry = self._entries.setdefault(src, _RankEntry())
            if number == entry.number:
                entry.answer, entry.answer_to = Whereabouts.read(answer), number
                entry.answered = self.now()
                if kind == "loop":
                    entry.loop_answer_to = number

    def _answer(self, src: int, comm: str, number: int) -> None:
        def reply(kind: str, *, on_loop: bool) -> None:
            with suppress(RuntimeError):  # the channel was closed
                self.channel.send(src, _TOPIC, [kind, comm, [number, self._here(comm, on_loop)]])

        if not self._progress.owns_thread():
            reply("here", on_loop=False)
        self._progress.post(lambda: reply("loop", on_loop=True))
