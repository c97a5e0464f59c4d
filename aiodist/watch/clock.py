"""Measures the offsets of all ranks' clocks from the first rank's, by round trips on the control channel.

The shortest of several round trips is the best measurement (Cristian 1989, doi:10.1007/BF01784024). The other rank read
its clock during that round trip. So the middle of the round trip is wrong by at most half of its length.
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
_ANSWER_SECONDS = 2.0  # longest wait for a stopped rank


class Offset(NamedTuple):
    """Difference between a rank's clock and the first rank's."""

    seconds: float = 0.0  # to add to the time of that rank
    error: float = inf  # largest error, in seconds


class Clock:
    """The clocks of some ranks, `perf_counter` of each. The first rank measures on its loop.

    The others answer on the listener thread, so also while their loops are blocked.
    """

    def __init__(self, channel: Channel, topic: str, ranks: Sequence[int]) -> None:
        self._channel = channel
        self._topic = topic
        self._others = list(ranks[1:])
        self._asked: dict[int, tuple[int, float]] = {}
        """Number and time of the open question, by rank."""
        self._number = 0
        self._left: dict[int, int] = {}
        self._found: dict[int, Offset] = {}
        self._finished: asyncio.Future[None] | None = None
        channel.subscribe(topic, self._heard)

    def close(self) -> None:
        """Stop answering."""
        with suppress(RuntimeError):  # the channel is closed
            self._channel.unsubscribe(self._topic)

    async def measure(self, round_trips: int = _ROUND_TRIPS, timeout: float = _ANSWER_SECONDS) -> dict[int, Offset]:
        """Return the offset of each rank. Only the first rank, whose offset is 0, makes this call. Takes milliseconds.

        `timeout` is the longest wait for a rank without an answer, in seconds.
        """
        self._found = dict.fromkeys(self._others, Offset())
        self._left = dict.fromkeys(self._others, round_trips)
        if self._others:
            self._finished = asyncio.get_running_loop().create_future()
            for rank in self._others:
                self._ask(rank)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._finished, timeout)
        return {self._channel.rank: Offset(0.0, 0.0), **self._found}

    # --- on the listener thread, except the first question ---------------------------------------------------

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
        if number != open_number:  # an answer to an earlier measurement
            return
        if (error := (now - asked) / 2) < self._found[src].error:
            self._found[src] = Offset((asked + now) / 2 - theirs, error)
        self._left[src] -= 1
        if self._left[src] > 0:
            self._ask(src)
        elif self._finished is not None and not any(left > 0 for left in self._left.values()):
            settle_soon(self._finished)
