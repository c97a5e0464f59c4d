"""Pauses of the writing thread while others compute."""

from __future__ import annotations

import time
from collections.abc import Callable

_RESTS = 40.0
"""For how many seconds the thread that writes sleeps for one of CPU."""
_LEAST_REST_SECONDS = 5e-3


class WritePace:
    """Has the thread that makes it use a small part of a core while others compute.

    `clock` gives the CPU seconds of the thread, `sleep` has it rest for as many seconds as it is given.
    """

    def __init__(
        self,
        computing: set[int],
        clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._computing = computing
        self._clock, self._sleep = clock, sleep
        self._used = clock()
        """CPU seconds of the thread up to the last rest."""
        self._beside = False

    def rest(self) -> None:
        """Sleep as long as what was done since the last rest asks for; not where nothing computes."""
        owed = _RESTS * (self._clock() - self._used)
        if owed > _LEAST_REST_SECONDS:
            before, self._beside = self._beside, len(self._computing) > 1  # this thread is one of them
            if before or self._beside:
                self._sleep(owed)
            self._used = self._clock()
