"""What the ranks of a training tell each other between epochs: that one failed, or stops, and what each measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiodist.checkpoints.agreeing import exchange
from aiodist.communicator import Communicator
from aiodist.engine.meters import EpochFigures


@dataclass(frozen=True)
class Word:
    """What one rank says."""

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

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop, see `Communicator.stopping`."""
        return self.base is not None and self.base.parts.registry.stop_requested

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
        return await exchange(self._comm, "this training", word, failure)

    async def any(self, mine: bool) -> bool:
        """Return whether it is so on any rank. Collective, one allreduce of a number."""
        return mine if self._comm is None else bool(await self._comm.allreduce(float(mine), "max"))
