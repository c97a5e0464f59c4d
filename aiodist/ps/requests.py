"""What a server holds of clients' requests until they are executed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from aiodist.ps.rows.store import RowStore
from aiodist.ps.wire import Reads


class Freed(LookupError):
    """The tensor was freed: what clients raise as KeyError."""


@dataclass(eq=False, slots=True)
class Request:
    """The request `number` of `client`; `ready` once all of it has come."""

    client: int
    number: int
    key: int
    ready: bool = field(default=True, init=False)


@dataclass(eq=False, slots=True)
class Pushing(Request):
    """A push: `value` is flat, of the shard's dtype, or a code of bytes."""

    base: int
    rule: int
    alpha: float
    coded: bool
    value: Tensor | None = None
    buffer: Tensor | None = None
    """Of the pool, where `value` lies in it: nobody else writes to it."""


@dataclass(eq=False, slots=True)
class Pulling(Request):
    """A pull."""

    wants: int
    reads: Reads
    rows: Tensor | None = None
    """Of a table: the ids of the rows, as flat uint8."""


@dataclass(eq=False, slots=True)
class Change(Request):
    """New settings of the rule."""

    settings: dict[str, float]


@dataclass(eq=False, slots=True)
class Stop(Request):
    """A barrier: what the client sends behind it waits until all workers are there. `leaves`: it sends nothing more."""

    leaves: bool = False
    reached: bool = False

    def __post_init__(self) -> None:
        self.ready = self.leaves


@dataclass(eq=False, slots=True)
class Restored:
    """What a shard takes from a checkpoint: memory, with the states of its rules by their numbers; rows of a table."""

    version: int
    data: Tensor
    states: dict[int, Any] = field(default_factory=dict)
    store: RowStore | None = None
    marks: dict[str, int] = field(default_factory=dict)
    """By the names of clients, see `Context.uids`."""
