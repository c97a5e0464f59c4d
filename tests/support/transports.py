"""Helpers for tests of transports: begin an operation as the layers above do, and read the use of an arena."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiodist.handles import Progress
from aiodist.testing.seams.memory import Arena
from aiodist.testing.seams.transport import Done

__all__ = ["held", "started"]


def started(call: Callable[[Done], None]) -> asyncio.Future[None]:
    """Begin an operation; the test fails if its `done` is called twice."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    progress = Progress.current()

    def settle(error: BaseException | None) -> None:
        assert not ended.done(), "done was called twice"
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    progress.start(lambda: call(lambda error: progress.post(lambda: settle(error))))
    return ended


def held(arena: Arena) -> int:
    """Return how many bytes of an arena are in blocks."""
    return sum(s.nbytes - sum(stop - start for start, stop in s.holes) for s in arena.segments)
