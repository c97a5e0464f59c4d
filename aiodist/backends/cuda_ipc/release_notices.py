"""Memory of tensors that died is given back also where no operation follows that would tell who has it mapped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from aiodist.backends.cuda_ipc.mappings import Mappings
from aiodist.handles import Progress

if TYPE_CHECKING:
    from aiodist.control import Channel

__all__ = ["ReleaseNotices"]

_TOPIC = "cuda_ipc"
_SECONDS = 1.0


class ReleaseNotices:
    """Looks once a second for what died of what one rank lends, and tells those who have heard of it.

    By the control channel, since it belongs to no operation: a number is declared dead when no loan uses it and all
    to whom it was announced have heard of it, so this comes behind all that was said of it (see [Note: loans]).
    """

    def __init__(self, mappings: Mappings, progress: Progress, channel: Channel) -> None:
        self._mappings = mappings
        self._progress = progress
        self._channel = channel
        channel.subscribe(_TOPIC, self._told)
        self._next = progress.loop.call_later(_SECONDS, self._look)

    def _look(self) -> None:
        self._next = self._progress.loop.call_later(_SECONDS, self._look)
        if self._mappings.lends:
            self._progress.start(self._tell)

    def _tell(self) -> None:
        for rank, numbers in self._mappings.collect_dead().items():
            self._channel.send(rank, _TOPIC, numbers)

    def _told(self, rank: int, numbers: Sequence[int]) -> None:
        """Let go of what `rank` has declared dead; called on the channel's thread."""
        self._progress.post(partial(self._progress.start, partial(self._mappings.release, rank, numbers)))

    def close(self) -> None:
        """Look no more; on the loop."""
        self._next.cancel()
        with suppress(RuntimeError):  # it is closed already, where all was given up
            self._channel.unsubscribe(_TOPIC)
