"""Roll calls: a rank asks others if they are alive. Their listener threads answer, even if a loop is busy."""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Final

from aiodist.control.roster import HUB, Exit

LIVENESS_SECONDS: Final = 2.0
"""The longest wait for the answer of a rank whose process may be stopped, in seconds.

A listener thread answers within milliseconds. A machine with many more processes than cores may delay the thread for a
second.
"""

ROLL_CALL: Final = "rollcall"
"""Topic of the questions and answers."""

Then = Callable[[list[int]], object]


@dataclass(eq=False, slots=True)
class _Question:
    missing: set[int]
    """Ranks that have neither answered nor left."""
    then: Then
    timer: TimerHandle


class RollCall:
    """The questions of one rank on a control channel, and the answers to those of others (listener thread)."""

    def __init__(
        self, loop: AbstractEventLoop, send: Callable[[int, str, list[int]], None], exits: Mapping[int, Exit]
    ) -> None:
        """`send` and `exits` are those of the channel, whose listener thread runs `loop`."""
        self._loop = loop
        self._send_to = send
        self._exits = exits
        self._numbers = count()
        self._open: dict[int, _Question] = {}
        """Questions without an end, by number."""
        self._closed = False

    def ask(self, missing: set[int], then: Then) -> None:
        """See `Channel.ask_alive`."""
        if self._closed:
            then([])
            return
        number = next(self._numbers)
        timer = self._loop.call_later(LIVENESS_SECONDS, self._end, number)
        self._open[number] = _Question(missing, then, timer)
        for rank in missing:
            self._send(rank, number, asks=True)
        self.note_exits()

    def heard(self, rank: int, message: list[int]) -> None:
        """Handle a question or an answer of another rank."""
        number, asks = message
        if asks:
            self._send(rank, number, asks=False)
        elif (question := self._open.get(number)) is not None:
            question.missing.discard(rank)
            self.note_exits()

    def note_exits(self) -> None:
        """End the questions that need no more answers."""
        for number, question in list(self._open.items()):
            gone = question.missing & self._exits.keys()
            question.missing -= gone
            if not question.missing or HUB in self._exits or not all(self._exits[rank].clean for rank in gone):
                self._end(number)

    def close(self) -> None:
        """End all questions without a missing rank, as the channel closes."""
        self._closed = True
        for number, question in list(self._open.items()):
            question.missing.clear()
            self._end(number)

    def _end(self, number: int) -> None:
        question = self._open.pop(number)
        question.timer.cancel()
        question.then(sorted(question.missing))

    def _send(self, rank: int, number: int, *, asks: bool) -> None:
        with suppress(RuntimeError):  # the channel is closed
            self._send_to(rank, ROLL_CALL, [number, asks])
