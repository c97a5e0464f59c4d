"""Operations that fail because ranks disagree."""

from __future__ import annotations

import itertools

from aiodist.backends.base import Done
from aiodist.errors import AiodistError
from aiodist.handles import Progress

__all__ = ["Disputes"]

_MISMATCH_SECONDS = 2.0


class Disputes:
    """Operations that fail because ranks disagree; nothing is lost by that, what follows goes on.

    The ledger of the layer above sees the same, knows the lines of code and gives the operation up. Only when it
    has not, after a while, they fail here. With the transport lock held.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._open: dict[int, tuple[Done, AiodistError]] = {}
        self._numbers = itertools.count()

    def add(self, done: Done, error: AiodistError) -> None:
        """Call `done(error)` a little later."""
        number = next(self._numbers)
        self._open[number] = done, error
        progress = self._progress

        def settle() -> None:
            if self._open.pop(number, None) is not None:
                done(error)

        def later() -> None:
            progress.loop.call_later(_MISMATCH_SECONDS, progress.start, settle)

        progress.post(later)

    def settle(self) -> None:
        """Call them now."""
        disputed, self._open = self._open, {}
        for done, error in disputed.values():
            done(error)
