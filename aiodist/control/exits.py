"""How a rank left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from aiodist.errors import PeerLost, RemoteError

__all__ = ["HUB", "Exit", "name_ranks"]

HUB: Final = -1
"""Stands for the hub where a rank is expected, when the hub lives in no rank's process."""


@dataclass(frozen=True)
class Exit:
    """What is known of a rank (or of the hub, `rank == HUB`) that left."""

    rank: int
    clean: bool
    """It said goodbye; all else is a failure."""
    cause: str
    traceback: str = ""
    """The text of its traceback, when it reported one before it went."""
    exitcode: int | None = None
    """None: it did not say, as when it was killed."""

    def error(self) -> PeerLost | RemoteError:
        """Return the exception that tells a caller about this exit: `RemoteError` when a traceback is known."""
        who = "the hub" if self.rank == HUB else f"rank {self.rank}"
        if not self.traceback:
            return PeerLost(f"{who} left: {self.cause}", lost=self.rank)
        message = f"{who} failed: {self.cause}\n{self.traceback}"
        return RemoteError(message, raised_by=self.rank, traceback=self.traceback)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks as words, runs joined.

    >>> name_ranks([2]), name_ranks([7, 1, 3, 4, 5])
    ('rank 2', 'ranks 1, 3-5, 7')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return f"rank {runs[0][0]}"
    return "ranks " + ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
