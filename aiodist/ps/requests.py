"""What a server holds of clients' requests until they are executed, in the order in which each has sent them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from aiodist.ps.rows.store import RowStore
from aiodist.ps.wire import Reads, Way


class Freed(LookupError):
    """The tensor was freed: what clients raise as KeyError."""


@dataclass(eq=False, slots=True)
class Request:
    """The request `number` of `client`; `ready` once all of it has come."""

    client: int
    number: int
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
    """A pull: `way` is how the client wants the data."""

    wants: int
    way: Way
    reads: Reads
    rows: Tensor | None = None
    """Of a table: the ids of the rows, as flat uint8."""


@dataclass(eq=False, slots=True)
class Change(Request):
    """New settings of the rule."""

    settings: dict[str, float]


@dataclass(eq=False, slots=True)
class Mark(Request):
    """Stands behind what a worker has sent, on all shards that a server leads; with `stops` in front of the rest."""

    stops: bool = False
    """The worker rests on each shard when all that came before the mark was delivered there."""
    parts: bool = False
    """It leaves the shard then."""
    behind: set[object] = field(default_factory=set)
    """Where something before it is still to come."""

    def __post_init__(self) -> None:
        self.ready = not self.stops


@dataclass(eq=False, slots=True)
class Restored:
    """What a shard takes from a checkpoint: memory, with the states of its rules by their numbers; rows of a table."""

    version: int
    data: Tensor
    states: dict[int, Any] = field(default_factory=dict)
    store: RowStore | None = None
    marks: dict[str, int] = field(default_factory=dict)
    """By the names of clients, see `Context.uids`."""


class Arrivals:
    """Holds what is not ready, and all that its client sent behind it; with the transport lock held."""

    __slots__ = ("_deliver", "_lines", "_reached", "stopped")

    def __init__(self, deliver: Callable[[Request], None], reached: Callable[[Mark], None]) -> None:
        """`deliver` is given each request in its turn, `reached` each mark: all before it was delivered."""
        self._deliver = deliver
        self._reached = reached
        self._lines: dict[int, deque[Request]] = {}
        self.stopped = False
        """The shard is no more, or of no use: no mark keeps anything back."""

    def expect(self, request: Request) -> None:
        """Take a request; what its client sends afterwards waits until it is ready."""
        line = self._lines.get(request.client)
        if line is not None:
            line.append(request)
        elif request.ready:
            self._deliver(request)
        else:
            self._lines[request.client] = deque([request])

    def mark(self, mark: Mark) -> None:
        """Put a mark behind all that its client has sent; one that is not `ready` keeps back what comes after it."""
        mark.behind.add(self)
        self._lines.setdefault(mark.client, deque()).append(mark)
        self.go_on(mark.client)

    def go_on(self, client: int) -> None:
        """Deliver what can be: something of the client's has become ready."""
        line = self._lines.get(client)
        while line:
            first = line[0]
            if isinstance(first, Mark):
                self._reach(first)
                if not (first.ready or self.stopped):
                    return
                line.popleft()
            elif first.ready:
                self._deliver(line.popleft())
            else:
                return
        if line is not None:
            self._lines.pop(client, None)

    def _reach(self, mark: Mark) -> None:
        if self in mark.behind:
            mark.behind.remove(self)
            self._reached(mark)

    def release_all(self) -> None:
        """Keep nothing back any more but what is still to come."""
        self.stopped = True
        for client in list(self._lines):
            self.go_on(client)

    def forget(self, client: int) -> None:
        """`client` died: what it sent is not delivered."""
        self._lines.pop(client, None)
