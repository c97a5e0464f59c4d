"""A client's requests: the calls of the user that wait for them, and the queue in which they leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from aiodist.backends.arithmetic import copy
from aiodist.backends.base import Done
from aiodist.communicator.changes import changed, marks_of, report
from aiodist.communicator.claims import Claim, release
from aiodist.errors import AiodistError
from aiodist.handles import Handle, Operation, internals
from aiodist.handles.tracing import tracing
from aiodist.ps.coalescer import keep
from aiodist.ps.context import Context
from aiodist.ps.names import NameEntry


class Ends(Protocol):
    """The call that a request is a part of."""

    def part_over(self, error: BaseException | None = None) -> bool:
        """End one part. Return True for the last part."""


class Reported:
    """A single request, whose end is reported to `done`."""

    __slots__ = ("_done",)

    def __init__(self, done: Done) -> None:
        self._done = done

    def part_over(self, error: BaseException | None = None) -> bool:
        """See `Ends`."""
        self._done(error)
        return False


class UserCall(Operation[Any]):
    """A call of the user, whose handle is done after the end of all parts, when the buffers are free."""

    __slots__ = ("_began", "_claims", "_error", "_landings", "_left", "_marks", "_result", "seconds", "version")

    def __init__(
        self,
        handle: Handle[Any],
        parts: int,
        claims: Sequence[Claim],
        result: Callable[[], Any] | None = None,
        landings: Sequence[Callable[[Done], None]] = (),
    ) -> None:
        """The call owns `claims` from now on. `result` makes the result of the handle.

        `landings` copy data that have arrived to devices, after the end of all parts.
        """
        self.handle = handle
        self._left = parts
        self._claims = claims
        read = [claim for claim in claims if not claim.writes]
        self._marks = marks_of(read, strict=internals.is_strict(handle)) if read else []
        self._landings = landings
        self._result = result
        self._error: BaseException | None = None
        self._began = perf_counter()
        if tracing.to is not None:
            self.follow("parameter server")
        self.seconds = 0.0
        """Time from the call to its end."""
        self.version: int | None = None
        """Lowest version that a part has read, or None."""

    def read(self, version: int) -> None:
        """Note the version that a part has read."""
        self.version = version if self.version is None else min(self.version, version)

    def _release(self) -> None:
        """Release the bytes. The result then reports a change by the program, if any."""
        if (tensor := changed(self._marks)) is not None:
            make = self._result or (lambda: None)
            self._result = partial(report, self, tensor, lambda _: make(), None)
        release(self._claims)
        self._claims, self._marks = (), []

    def _landed(self, error: BaseException | None) -> None:
        self.part_over(error)

    def part_over(self, error: BaseException | None = None) -> bool:
        """End one part. Return True for the last part."""
        self._error = self._error or error
        self._left -= 1
        if self._left:
            return False
        if self._landings and self._error is None:
            landings, self._landings = self._landings, ()
            self._left = len(landings)
            for land in landings:
                land(self._landed)
            return not self._left
        self.seconds = perf_counter() - self._began
        if self._claims:
            self._release()
        if self.version is not None:
            self.set_version(self.version)
        if not self.is_pending:
            return True
        if self._error is not None:
            self.reject(self._error)
            return True
        make, self._result = self._result, None  # the result refers to the parts, which refer to this call
        try:
            result = None if make is None else make()
        except Exception as error:  # noqa: BLE001  - the error belongs to the task that awaits the handle
            self.reject(error)
        else:
            self.resolve(result)
        return True


@dataclass(eq=False, slots=True)
class PushPart:
    """A push of one tensor."""

    operation: Ends
    entry: NameEntry
    applying: set[int]
    """Servers that have not applied the push."""
    accepting: set[int] | None = None
    """Servers that have not accepted the push, or None if the handle waits until the push is applied."""


@dataclass(eq=False, slots=True)
class PullPart:
    """A pull of one tensor, of rows of a table, or of an object."""

    operation: UserCall
    entry: NameEntry
    nbytes: int
    place: Callable[[int], Tensor] | None = None
    """Function that returns the flat memory for the data of a server, or None for an object."""
    ids: Mapping[int, Tensor] = field(default_factory=dict)
    """Ids of the rows of a table, by server, unchanged until the end."""
    left: set[int] = field(init=False)
    """Servers that have not answered."""
    copying: set[int] = field(default_factory=set)
    """Servers whose data the service thread copies now."""
    value: Tensor | None = None
    """Code of an object."""
    version: int | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.left = set(self.entry.servers)

    def fill(self, src: int, t: Tensor) -> None:
        """Copy the data of server `src`."""
        if self.place is None:
            self.value = t.clone()
        else:
            copy(self.place(src).view(torch.uint8), t.view(torch.uint8))


class Entry(NamedTuple):
    """One server's entry of a request."""

    dst: int
    kind: int
    number: int
    head: bytes
    data: bytes = b""
    message: Tensor | None = None
    """Flat uint8 data that travel as a separate message, or None."""


Call = tuple[Callable[..., object], *tuple[Any, ...]]
"""A function that puts requests, and its arguments."""


@dataclass(eq=False, slots=True)
class _Late:
    """A request that is being made. `then(error)` sends it, once ready and first in the line."""

    then: Done
    ready: bool = False
    error: BaseException | None = None


class RequestQueue:
    """Numbers requests, and sends them in order.

    Requests are issued on the loop's thread, and sent with the transport lock held.
    """

    def __init__(self, context: Context, lost: Callable[[int], None], first: int) -> None:
        """`lost` takes the rank of a request to a lost server. `first` is the number of the first request."""
        self.context = context
        self._lost = lost
        self.numbers = count(first)
        """Numbers of the next requests."""
        self._line: deque[_Late] = deque()
        """Requests that are being made, in order. The loop's thread adds, and the holder of the lock takes."""
        self._gathered: list[Call] | None = None
        """Calls of a block of `together`, or None outside."""

    @property
    def waits(self) -> bool:
        """True if a request is being made, so that later ones wait."""
        return bool(self._line)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send the requests of a block together, in as few frames as possible. Blocks are not nested."""
        gathered = self._gathered = []
        try:
            yield
        finally:
            self._gathered = None
            if gathered:
                self.issue(*gathered)

    def issue(self, *calls: Call) -> None:
        """Make calls, which put requests, after the requests that are being made, and send all."""
        if self._gathered is not None:
            self._gathered += calls
        elif self._line:
            self.issue_later(lambda done: done(None), lambda _: self._make(calls))
        else:
            self.context.progress.start(self._make, calls)

    def issue_one(self, entry: Entry) -> None:
        """As `issue` for the `put` of one entry."""
        if self._gathered is None and not self._line:
            self.context.progress.start(self._put_one, entry)
        else:
            self.issue((self._put, entry))

    def _put_one(self, entry: Entry) -> None:
        self._put(entry)
        self.context.coalescer.flush()

    def issue_later(self, begin: Callable[[Done], None], then: Done) -> None:
        """Let `begin(done)` make a request, and then `then(error)` send it. Later requests wait."""
        if block := self._gathered:
            self._gathered = None
            self.issue(*block)
            block.clear()
            self._gathered = block
        late = _Late(then)
        self._line.append(late)

        def over(error: BaseException | None) -> None:
            late.error, late.ready = error, True
            while self._line and self._line[0].ready:
                first = self._line.popleft()
                first.then(first.error)

        self.context.progress.start(partial(begin, over))

    def _make(self, calls: Sequence[Call]) -> None:
        for call, *args in calls:
            call(*args)
        self.context.coalescer.flush()

    def put(self, entries: Sequence[Entry]) -> None:
        """Put the entries of a request into the coalescer, except those for lost servers (transport lock held)."""
        for entry in entries:
            self._put(entry)

    def _put(self, entry: Entry) -> None:
        dst, kind, number, head, data, message = entry
        if dst in self.context.gone:
            self._lost(dst)
            return
        self.context.coalescer.put(dst, kind, head, data, request=True)
        if message is not None:
            self.context.coalescer.send(message, dst, number, partial(keep, message))

    def located(self, error: BaseException) -> BaseException:
        """Return `error`, which names this rank and parameter server from now on."""
        if isinstance(error, AiodistError):
            error.located(rank=self.context.rank, comm=self.context.name, op=None)
        return error
