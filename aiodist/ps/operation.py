"""What a client waits for: the parts of one call, each at one or more servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiodist.backends.base import Done
from aiodist.backends.inplace import copy
from aiodist.communicator.claims import Claim
from aiodist.handles import Handle, in_flight

if TYPE_CHECKING:
    from aiodist.ps.names import NameEntry


class Operation:
    """One call of the user's: its handle is settled when all of its parts are over, so that its buffers are free."""

    __slots__ = ("_began", "_claims", "_error", "_left", "_result", "handle", "seconds", "version")

    def __init__(self, handle: Handle[Any], parts: int, claims: Sequence[Claim], result: Callable[[], Any]) -> None:
        """`result` makes what the handle returns; the claims are the operation's now."""
        self.handle = handle
        self._left = parts
        self._claims = claims
        self._result = result
        self._error: BaseException | None = None
        self._began = perf_counter()
        handle.follow("parameter server")
        self.seconds = 0.0
        self.version: int | None = None
        """The lowest that a part of it read."""

    def read(self, version: int) -> None:
        """A part has read `version`."""
        self.version = version if self.version is None else min(self.version, version)

    def part_over(self, error: BaseException | None = None) -> bool:
        """One part is over; True when that was the last."""
        self._error = self._error or error
        self._left -= 1
        if self._left:
            return False
        self.seconds = perf_counter() - self._began
        in_flight.release_all(self._claims)
        self._claims = ()
        handle = self.handle
        handle.version = self.version
        if handle.done():
            return True
        if self._error is not None:
            handle.reject(self._error)
            return True
        try:
            result = self._result()
        except Exception as error:  # noqa: BLE001  - it belongs to the task that awaits the operation
            handle.reject(error)
        else:
            handle.resolve(result)
        return True


@dataclass(eq=False, slots=True)
class PushPart:
    """A push of one tensor: `applying` and, where they accept first, `accepting` are the servers yet to say so."""

    over: Done
    entry: NameEntry
    applying: set[int]
    accepting: set[int] | None = None


@dataclass(eq=False, slots=True)
class PullPart:
    """A pull of one tensor, of rows of a table, or of an object."""

    operation: Operation
    entry: NameEntry
    nbytes: int
    place: Callable[[int], Tensor] | None = None
    """Where the data of a server come to, flat; None for an object."""
    ids: Mapping[int, Tensor] = field(default_factory=dict)
    """Of a table: the rows that are asked of each server; they lie still until it is over."""
    left: set[int] = field(init=False)
    """The servers that have not answered."""
    copying: set[int] = field(default_factory=set)
    """The servers whose data the service thread writes just now."""
    value: Tensor | None = None
    """The code of an object."""
    version: int | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.left = {span.rank for span in self.entry.spans}

    def fill(self, src: int, t: Tensor) -> None:
        """Take the data of server `src`, which are not kept."""
        if self.place is None:
            self.value = t.clone()
        else:
            copy(self.place(src).view(torch.uint8), t.view(torch.uint8))
