"""The callback that tells of the end of a transfer, and how several transfers share one."""

from __future__ import annotations

from collections.abc import Callable

Done = Callable[[BaseException | None], None]
"""Called once, when the transfer is over: with None, or with its error."""


def join(count: int, done: Done) -> Done:
    """Return a callback that calls `done` when it was called `count` times, with the first error.

    The calls must not overlap: they are made on one thread, or with the transport lock held.
    """
    left = count
    first: BaseException | None = None

    def one_over(error: BaseException | None) -> None:
        nonlocal left, first
        left -= 1
        first = first or error
        if left == 0:
            done(first)

    return one_over
