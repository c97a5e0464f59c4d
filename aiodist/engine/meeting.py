"""What the ranks of a training tell each other between epochs: that one failed, or stops, and what each measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiodist.communicator import Communicator
from aiodist.engine.meters import EpochFigures
from aiodist.errors import RemoteError
from aiodist.world.tracebacks import cause_in, folded


@dataclass(frozen=True)
class Word:
    """What one rank says."""

    failure: str | None = None
    """The traceback of what it raised."""
    stop: bool = False
    """It asks all ranks to stop."""
    batches: int | None = None
    """How many are left of its epoch; None where its loader does not know."""
    figures: EpochFigures | None = None
    """What it has measured."""
    interrupted: bool = False
    """Its epoch ended before its data."""
    data: list[Any] | None = None
    """States of a queue of shards that it has loaded."""

    @staticmethod
    def told(error: Exception | None) -> str | None:
        """Return `error` as others are told of it."""
        return None if error is None else folded(error, programs=True)


class Assembly:
    """The ranks of one engine; without a communicator there is no other one, and nothing is sent."""

    def __init__(self, base: Communicator | None) -> None:
        self.base = base
        self._comm: Communicator | None = None
        self.rank = 0 if base is None else base.rank
        self.size = 1 if base is None else base.size

    @property
    def comm(self) -> Communicator | None:
        """The engine's own communicator, once it is open."""
        return self._comm

    async def open(self) -> None:
        """Collective at the first call: all ranks get a duplicate of the communicator, which is the engine's own."""
        if self._comm is None and self.base is not None:
            self._comm = await self.base.dup()

    def abort(self, why: str) -> None:
        """Have all ranks hear that this one takes no part any more; the next training opens another communicator."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.abort(why)

    async def exchange(self, word: Word, failure: Exception | None = None) -> list[Word]:
        """Return the words of all ranks; raise `failure`, or RemoteError with that of another rank.

        Collective, one allgather of small objects.
        """
        try:
            words = [word] if self._comm is None else await self._comm.allgather_object(word)
        except Exception as error:
            if failure is not None:
                raise failure from error
            raise
        if failure is not None:
            raise failure
        self._check(words)
        return words

    def _check(self, words: Sequence[Word]) -> None:
        for rank, word in enumerate(words):
            if word.failure is not None:
                raise RemoteError(
                    f"rank {rank} failed in this training: {cause_in(word.failure)}",
                    raised_by=rank,
                    traceback=word.failure,
                    rank=self.rank,
                )

    async def any(self, mine: bool) -> bool:
        """Return whether it is so on any rank. Collective, one allreduce of a number."""
        return mine if self._comm is None else bool(await self._comm.allreduce(float(mine), "max"))
