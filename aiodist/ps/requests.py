"""A client's requests: what waits for them, the queue in which they leave, and what is kept between codes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.arithmetic import copy
from aiodist.backends.base import Done
from aiodist.codecs import ErrorFeedback, Incoming
from aiodist.communicator.claims import Claim, release
from aiodist.errors import AiodistError
from aiodist.handles import Handle, Operation
from aiodist.ps.coalescer import keep
from aiodist.ps.context import Context
from aiodist.ps.names import NameEntry
from aiodist.ps.rules import RULES, Rule
from aiodist.ps.wire import Way, as_bytes


class UserCall:
    """A call of the user: its handle is done after all of its parts have ended, when its buffers are free."""

    __slots__ = ("_began", "_claims", "_error", "_landings", "_left", "_result", "handle", "seconds", "version")

    def __init__(
        self,
        handle: Handle[Any],
        parts: int,
        claims: Sequence[Claim],
        result: Callable[[], Any] | None = None,
        landings: Sequence[Callable[[Done], None]] = (),
    ) -> None:
        """`result` makes what the handle returns; the claims are the operation's now.

        `landings` are made when all parts are over: they copy to devices what has come for these.
        """
        self.handle = handle
        self._left = parts
        self._claims = claims
        self._landings = landings
        self._result = result
        self._error: BaseException | None = None
        self._began = perf_counter()
        Operation.of(handle).follow("parameter server")
        self.seconds = 0.0
        self.version: int | None = None
        """The lowest that a part of it read."""

    def read(self, version: int) -> None:
        self.version = version if self.version is None else min(self.version, version)

    def _landed(self, error: BaseException | None) -> None:
        self.part_over(error)

    def part_over(self, error: BaseException | None = None) -> bool:
        """One part is over; True when that was the last."""
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
        release(self._claims)
        self._claims = ()
        operation = Operation.of(self.handle)
        operation.set_version(self.version)
        if self.handle.done():
            return True
        if self._error is not None:
            operation.reject(self._error)
            return True
        try:
            result = None if self._result is None else self._result()
            self._result = None  # it knows the parts, which know this
        except Exception as error:  # noqa: BLE001  - it belongs to the task that awaits the operation
            operation.reject(error)
        else:
            operation.resolve(result)
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

    operation: UserCall
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
        if self.place is None:
            self.value = t.clone()
        else:
            copy(self.place(src).view(torch.uint8), t.view(torch.uint8))


Sender = Callable[[], object]
"""Puts a request, or a part of one, into the coalescer; called with the transport lock held."""


@dataclass(eq=False, slots=True)
class _Late:
    """A request that is being made; `then(error)` sends it, once it is ready and first in its line."""

    then: Done
    ready: bool = False
    error: BaseException | None = None


class RequestQueue:
    """Numbers requests, and has them leave in order: issued on the loop's thread, sent with the transport lock held."""

    def __init__(self, context: Context, lost: Callable[[int], None], first: int) -> None:
        """`lost(rank)` is told of a request to a rank that is gone; `first` is the number of the first one."""
        self.context = context
        self._lost = lost
        self._numbers = count(first)
        self._line: deque[_Late] = deque()
        """What leaves in this order; added to on the loop's thread, taken from with the transport lock held."""
        self._gathered: list[Sender] | None = None

    def number(self) -> int:
        return next(self._numbers)

    @property
    def behind(self) -> bool:
        return bool(self._line)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have what is issued in the block leave at once, in as few frames as may be; no such block lies in another."""
        gathered: list[Sender] = []
        self._gathered = gathered
        try:
            yield
        finally:
            self._gathered = None
            if gathered:
                self.issue(gathered)

    def issue(self, senders: Sequence[Sender]) -> None:
        """Send requests now, or behind those that are being encoded, or copied from a device."""
        if self._gathered is not None:
            self._gathered.extend(senders)
        elif self.behind:
            self.issue_later(lambda done: done(None), lambda _: self.send(senders))
        else:
            self.context.progress.start(partial(self.send, senders))

    def issue_later(self, begin: Callable[[Done], None], then: Done) -> None:
        """Have `begin(done)` make a request, and then `then(error)` send it; what comes later waits behind."""
        if gathered := self._gathered:
            self._gathered = None
            self.issue(gathered[:])
            gathered.clear()
            self._gathered = gathered
        late = _Late(then)
        self._line.append(late)

        def over(error: BaseException | None) -> None:
            late.error, late.ready = error, True
            while self._line and self._line[0].ready:
                first = self._line.popleft()
                first.then(first.error)

        self.context.progress.start(partial(begin, over))

    def send(self, senders: Sequence[Sender]) -> None:
        for sender in senders:
            sender()
        self.context.coalescer.flush()

    def put(self, dst: int, kind: int, head: bytes, data: bytes = b"") -> None:
        """Put one entry, unless its rank is gone; with the transport lock held."""
        if dst in self.context.gone:
            self._lost(dst)
        else:
            self.context.coalescer.put(dst, kind, head, data, request=True)

    def sender(self, dst: int, number: int, kind: int, head: bytes, t: Tensor, way: Way) -> Sender:
        """Return what puts an entry whose data are those of `t`: inline, in a message, or where `head` says."""
        put = partial(self.put, dst, kind, head, as_bytes(t) if way is Way.INLINE else b"")
        if way is not Way.MESSAGE:
            return put

        def send() -> None:
            put()
            if dst not in self.context.gone:
                self.context.coalescer.send(t.view(torch.uint8), dst, number, partial(keep, t))

        return send

    def located(self, error: BaseException) -> BaseException:
        if isinstance(error, AiodistError):
            error.located(rank=self.context.rank, comm=self.context.name, op=None)
        return error


_Part = tuple[int, int]  # key of the tensor, rank of the server


@dataclass(eq=False, slots=True)
class _Code:
    """One that is to come: `raw` once it is there, or why it never will be."""

    into: Tensor
    done: Done
    raw: Tensor | BaseException | None = None


class Codes:
    """What is kept between codes, by tensor and server: residuals of what went up, and what has come down.

    What is encoded for this very rank would gain nothing: it goes as it is. Residuals are for sums alone, which a
    later push completes; what other rules push is encoded by itself, and what replaces the tensor ends its residual.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.feedback = None if context.codec is None else ErrorFeedback(context.codec)
        self._incoming = None if context.pull_codec is None else Incoming(context.pull_codec)
        self._lines: dict[_Part, deque[_Code]] = {}

    def takes(self, entry: NameEntry) -> bool:
        if self.feedback is None or not entry.dtype.is_floating_point:
            return False
        return any(span.rank != self._context.rank for span in entry.spans)

    def encode(
        self, entry: NameEntry, value: Tensor, rule: Rule, alpha: float
    ) -> tuple[list[tuple[Tensor, bool]], float]:
        """Return for each shard what is pushed, and whether that is a code; and the alpha that is left to the server.

        One call for a tensor at a time, in any thread. Residuals are of `alpha` times the value.
        """
        assert self.feedback is not None
        adds = rule.combines and rule is not RULES["copy"]  # so that a later push can bring what one left out
        if adds and alpha != 1:
            value, alpha = value * alpha, 1.0
        found: list[tuple[Tensor, bool]] = []
        with self._context.timed("encode_seconds"):
            for rank, start, stop in entry.spans:
                part, block = (entry.key, rank), value[start:stop]
                coded = rank != self._context.rank and rule.takes_value
                if coded:
                    block = self.feedback.encode(part, block) if adds else self.feedback.codec.encode(block)
                found.append((block, coded))
                if rule in (RULES["copy"], RULES["zero"]):
                    self.feedback.replace(part, None)
        return found, alpha

    def residual(self, key: int, spans: Iterable[tuple[int, int, int]]) -> Tensor | None:
        """Return a copy of all that is left out of a tensor, flat; None for nothing. In any thread."""
        if self.feedback is None:
            return None
        blocks = [(self.feedback.residual((key, rank)), stop - start) for rank, start, stop in spans]
        kind = next((block.dtype for block, _ in blocks if block is not None), None)
        if kind is None:
            return None
        return torch.cat(
            [torch.zeros(numel, dtype=kind, device="cpu") if block is None else block for block, numel in blocks]
        )

    def take(self, key: int, spans: Iterable[tuple[int, int, int]], whole: Tensor) -> None:
        """Have that be left out of a tensor, cut for its servers."""
        if self.feedback is not None:
            for rank, start, stop in spans:
                self.feedback.replace((key, rank), whole[start:stop])

    def expect(self, pull: PullPart, src: int, done: Done) -> Callable[[Tensor | BaseException], None]:
        """Have `pull` take the next code of `src`; return what to call with it, or with why it never comes.

        Codes are decoded in the order of these calls, whichever is there first; `done` is called when one is.
        """
        assert pull.place is not None
        part = (pull.entry.key, src)
        code = _Code(pull.place(src), done)
        line = self._lines.setdefault(part, deque())
        line.append(code)

        def arrived(raw: Tensor | BaseException) -> None:
            code.raw = raw
            # The service thread takes one after another too; a tensor's size decides for all its codes.
            while line and (first := line[0]).raw is not None:
                line.popleft()
                if isinstance(first.raw, BaseException):
                    first.done(first.raw)
                else:
                    decode = partial(self._decode, part, first.into, first.raw)
                    self._context.service.do(first.into.nbytes, decode, first.done)

        return arrived

    def _decode(self, part: _Part, into: Tensor, raw: Tensor) -> None:
        assert self._incoming is not None
        with self._context.timed("decode_seconds"):
            copy(into, self._incoming.decode(part, raw, into.dtype, into.numel()))

    def forget(self, entry: NameEntry) -> None:
        for span in entry.spans:
            part = (entry.key, span.rank)
            self._lines.pop(part, None)
            if self.feedback is not None:
                self.feedback.replace(part, None)
            if self._incoming is not None:
                self._incoming.forget(part)
