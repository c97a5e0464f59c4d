"""A debugger that stops one rank holds the job: the clock of deadlines stands still on all ranks."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from aiodist.control import Channel
from aiodist.pauses import deadline_clock

if TYPE_CHECKING:
    from aiodist.control import Exit

_TOPIC = "holds"


class Holds:
    """One rank's part in the holds of a job (any thread)."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._virtual = channel.size > 1 and not channel.source
        """True for ranks that share a loop. It is blocked by the debugger, and its clock may be virtual."""
        self._held: set[int] = set()
        """Ranks that hold the job. A lost hub reports no release, so it releases all."""
        channel.subscribe(_TOPIC, self._heard)
        channel.on_lost(self._lost)

    def set(self, holds: bool) -> None:
        """Hold the job from now on, or release it."""
        if self._virtual:
            return
        with suppress(RuntimeError):  # the channel is closed
            self._channel.broadcast(_TOPIC, holds)
        self._heard(self._channel.rank, holds)

    def close(self) -> None:
        """Leave the job."""
        with suppress(RuntimeError):  # the channel is closed
            self._channel.unsubscribe(_TOPIC)
        for rank in list(self._held):
            self._heard(rank, False)

    def _heard(self, rank: int, holds: bool) -> None:
        if holds:
            self._held.add(rank)
            deadline_clock.hold((self, rank))
        else:
            self._held.discard(rank)
            deadline_clock.release((self, rank))

    def _lost(self, exit: Exit) -> None:
        for rank in [exit.rank] if exit.rank >= 0 else list(self._held - {self._channel.rank}):
            self._heard(rank, False)
