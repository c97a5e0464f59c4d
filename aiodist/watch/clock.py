"""One clock for all ranks: offsets from the first rank's clock, by round trips on the control channel.

The shortest of some round trips tells most (Cristian 1989, doi:10.1007/BF01784024): the other rank read its clock
within it, so its middle is wrong by half of it at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from time import perf_counter
from typing import Any, NamedTuple

from aiodist.control import Channel
from aiodist.control.thread import settle_soon

_ROUND_TRIPS = 16
_PATIENCE = 2.0  # seconds for a rank that is stopped


class Offset(NamedTuple):
    """How far a rank's clock is from the first rank's."""

    seconds: float = 0.0  # to be added to its time
    error: float = inf  # at most so many seconds wrong


class Clock:
    """The clocks of some ranks, `perf_counter` of each; the first of them measures, on its loop.

    The others answer on the listener thread, so also while their loops stand still.
    """

    def __init__(self, channel: Channel, topic: str, ranks: Sequence[int]) -> None:
        self._channel = channel
        self._topic = topic
        self._others = list(ranks[1:])
        self._asked: dict[int, tuple[int, float]] = {}
        """By rank: the number of the question that is open, and when it was asked."""
        self._number = 0
        self._left: dict[int, int] = {}
        self._found: dict[int, Offset] = {}
        self._told: asyncio.Future[None] | None = None
        channel.subscribe(topic, self._heard)

    def close(self) -> None:
        """Answer no more."""
        with suppress(RuntimeError):  # the channel is closed
            self._channel.unsubscribe(self._topic)

    async def measure(self, round_trips: int = _ROUND_TRIPS, patience: float = _PATIENCE) -> dict[int, Offset]:
        """Return the offset of each rank, that of the first is 0; as the first rank. Takes milliseconds.

        `patience` is how many seconds a rank that does not answer is waited for.
        """
        self._found = dict.fromkeys(self._others, Offset())
        self._left = dict.fromkeys(self._others, round_trips)
        if self._others:
            self._told = asyncio.get_running_loop().create_future()
            for rank in self._others:
                self._ask(rank)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told, patience)
        return {self._channel.rank: Offset(0.0, 0.0), **self._found}

    # --- on the listener thread, but for the first question --------------------------------------------------

    def _ask(self, rank: int) -> None:
        self._number += 1
        self._asked[rank] = self._number, perf_counter()
        with suppress(RuntimeError):
            self._channel.send(rank, self._topic, [self._number])

    def _heard(self, src: int, message: list[Any]) -> None:
        now = perf_counter()
        number, *answer = message
        if not answer:
            with suppress(RuntimeError):
                self._channel.send(src, self._topic, [number, perf_counter()])
            return
        (theirs,), (open_number, asked) = answer, self._asked[src]
        if number != open_number:  # its time was over
            return
        if (error := (now - asked) / 2) < self._found[src].error:
            self._found[src] = Offset((asked + now) / 2 - theirs, error)
        self._left[src] -= 1
        if self._left[src] > 0:
            self._ask(src)
        elif self._told is not None and not any(left > 0 for left in self._left.values()):
            settle_soon(self._told)
