"""Roll calls: a rank asks all others if they are alive; their listener threads answer, even if a loop is busy."""

from __future__ import annotations

from contextlib import suppress
from itertools import count

from aiodist.control.channel import Channel, ChannelClosed

_TOPIC = "rollcall"


class RollCall:
    """One rank's part in the roll calls of a channel."""

    def __init__(self, channel: Channel) -> None:
        """Answer the others from now on."""
        self._channel = channel
        self._numbers = count()
        self._missing: dict[int, set[int]] = {}
        """The ranks that have not answered yet, by number of the call."""
        channel.subscribe(_TOPIC, self._heard)

    def ask(self) -> set[int]:
        """Ask all other ranks, and return those that have not answered: each answer removes one."""
        number = next(self._numbers)
        missing = self._missing[number] = set(range(self._channel.size)) - {self._channel.rank}
        for rank in tuple(missing):
            self._channel.send(rank, _TOPIC, [number, True])
        return missing

    def _heard(self, rank: int, message: list[int]) -> None:
        """Handle a question or an answer; on the listener thread."""
        number, asks = message
        if asks:
            with suppress(ChannelClosed):
                self._channel.send(rank, _TOPIC, [number, False])
        else:
            self._missing[number].discard(rank)
