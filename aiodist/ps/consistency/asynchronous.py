"""Asynchronous: each push is a step of its own, at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

from aiodist.ps.consistency.base import BaseMachine
from aiodist.ps.consistency.events import Action, Push
from aiodist.ps.consistency.stale import Described, Scale, Stale, at_least, checked_scale, one_of

__all__ = ["Asynchronous"]


@dataclass(frozen=True, repr=False)
class Asynchronous(Described):
    """Each push makes a version as soon as it comes; nobody waits for anybody.

    What is more than `max_staleness` versions old is dropped, or multiplied by `scale(staleness)`, 1 / (1 + staleness)
    where none is given. With None nothing is dropped, and "scale" scales them all. A worker's own pushes make versions
    too: it grows stale when it pushes without reading. Raises ValueError for anything else.
    """

    accepts: ClassVar[bool] = False
    holds: ClassVar[bool] = False

    max_staleness: int | None = None
    stale: Literal["drop", "scale"] = "drop"
    scale: Scale | None = None

    def __post_init__(self) -> None:
        one_of("stale", self.stale, ("drop", "scale"))
        if self.max_staleness is not None:
            at_least("max_staleness", self.max_staleness, 0)
        checked_scale(self.stale, self.scale)

    @property
    def scales(self) -> bool:
        """Whether weights other than 1 happen."""
        return self.stale == "scale"

    def machine(self, workers: Sequence[int]) -> Asynchronously:
        """Return a machine at version 0. Raises ValueError for no workers, and for one that is there twice."""
        limit = self.max_staleness
        if self.stale == "scale":
            stale = Stale(scale=checked_scale(self.stale, self.scale), scale_above=-1 if limit is None else limit)
        else:
            stale = Stale(drop_above=inf if limit is None else limit)
        return Asynchronously(workers, stale)


class Asynchronously(BaseMachine):
    """Holds nothing but reads of versions to come."""

    __slots__ = ()

    def _take(self, event: Push, actions: list[Action]) -> None:
        self._apply((event,), actions)

    def _without(self, worker: int, actions: list[Action]) -> None:
        pass

    def _late(self) -> tuple[int, ...]:
        return tuple(sorted(self._present))
