"""What a server holds of a client's request until it is executed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from aiodist.ps.wire import Reads, Way

if TYPE_CHECKING:
    from aiodist.ps.shard import Shard

__all__ = ["Change", "Freed", "Mark", "Pulling", "Pushing", "Request"]


class Freed(LookupError):
    """The tensor was freed: what clients raise as KeyError."""


class Request:
    """The request `number` of `client`; `ready` once all of it has come."""

    __slots__ = ("client", "number", "ready")

    def __init__(self, client: int, number: int) -> None:
        self.client = client
        self.number = number
        self.ready = True


class Pushing(Request):
    """A push: `value` is flat, of the shard's dtype, or a code of bytes."""

    __slots__ = ("alpha", "base", "coded", "pooled", "rule", "value")

    def __init__(self, client: int, number: int, base: int, rule: int, alpha: float, *, coded: bool) -> None:
        super().__init__(client, number)
        self.base = base
        self.rule = rule
        self.alpha = alpha
        self.coded = coded
        self.value: Tensor | None = None
        self.pooled = False
        """`value` is a buffer of ours, to which nobody else writes."""


class Pulling(Request):
    """A pull: `way` is how the client wants the data."""

    __slots__ = ("reads", "wants", "way")

    def __init__(self, client: int, number: int, wants: int, way: Way, reads: Reads) -> None:
        super().__init__(client, number)
        self.wants = wants
        self.way = way
        self.reads = reads


class Change(Request):
    """New settings of the rule."""

    __slots__ = ("settings",)

    def __init__(self, client: int, number: int, settings: dict[str, float]) -> None:
        super().__init__(client, number)
        self.settings = settings


class Mark(Request):
    """Stands behind what a worker has sent, on all shards that a server leads; with `stops` in front of the rest."""

    __slots__ = ("act", "behind")

    def __init__(self, client: int, number: int, act: Callable[[Shard], None], *, stops: bool = False) -> None:
        """`act` is done to each shard when all that came before the mark was delivered there."""
        super().__init__(client, number)
        self.act = act
        self.ready = not stops
        self.behind: set[object] = set()
        """Where something before it is still to come."""
