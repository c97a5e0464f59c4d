"""The requests that a server holds, and its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from aiodist.codecs import Outgoing
from aiodist.errors import PeerLost
from aiodist.ps.context import Context
from aiodist.ps.row_store import RowStore
from aiodist.ps.wire import DATA, DONE, Kind, Reads, Stage, Way, as_bytes


class Freed(KeyError):
    """The tensor was freed."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError quotes its text


@dataclass(eq=False, slots=True)
class Request:
    """A request of a client."""

    client: int
    number: int
    key: int
    ready: bool = field(default=True, init=False)
    """True once all data have arrived."""


@dataclass(eq=False, slots=True)
class Pushing(Request):
    """A push."""

    base: int
    rule: int
    alpha: float
    coded: bool
    value: Tensor | None = None
    """Flat values of the shard's dtype, or the bytes of a code."""
    buffer: Tensor | None = None
    """Buffer of the pool that has `value`, or None. Only this push writes the buffer."""


@dataclass(eq=False, slots=True)
class Pulling(Request):
    """A pull."""

    wants: int
    """Lowest version."""
    reads: Reads
    rows: Tensor | None = None
    """Ids of the rows of a table, as flat uint8, or None."""


@dataclass(eq=False, slots=True)
class Change(Request):
    """New settings for the rule."""

    settings: dict[str, float]


@dataclass(eq=False, slots=True)
class Stop(Request):
    """A barrier, at which the client's later requests wait for all workers, or the leave of a client."""

    leaves: bool = False
    """True if the client sends no later request."""
    reached: bool = False
    """True once all earlier requests of the client are executed."""

    def __post_init__(self) -> None:
        self.ready = self.leaves


@dataclass(eq=False, slots=True)
class Restored:
    """The values of a shard in a checkpoint."""

    version: int
    data: Tensor
    states: dict[int, Any] = field(default_factory=dict)
    """States of rules, by number."""
    store: RowStore | None = None
    """Rows of a table, or None."""
    marks: dict[str, int] = field(default_factory=dict)
    """Number of the last applied push of each client, by its name in `Context.uids`."""


class Served(Protocol):
    """The interface of a shard for reads."""

    key: int
    refusal: Exception | None

    def hold(self, request: Pulling) -> None: ...

    def release(self, client: int, number: int) -> None: ...


class Answers:
    """The answers of one server (transport lock held)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.applied: Callable[[], None] = lambda: None
        """Callback after a shard has carried out the orders that it can."""
        self._outgoing = None if context.pull_codec is None else Outgoing(context.pull_codec)

    def done(self, push: Pushing, stage: Stage) -> None:
        """Report the stage of a push."""
        if push.client not in self._context.gone:
            self._context.coalescer.put(push.client, Kind.DONE, DONE.pack(push.number, stage))

    def answer(self, client: int, number: int, **said: Any) -> None:  # noqa: ANN401
        """Answer a call."""
        self._context.put_json(client, Kind.ANSWER, {"n": number, **said})

    def refuse(self, request: Request, error: BaseException) -> None:
        """Answer a request with an error."""
        if isinstance(request, Pushing):
            self.recycle(request)
        self.fail(request.client, request.number, error)

    def fail(self, client: int, number: int, error: BaseException) -> None:
        """Answer a call with an error."""
        if isinstance(error, PeerLost):
            self.answer(client, number, error=error.args[0], lost=error.lost)
        else:
            self.answer(client, number, error=str(error), type=type(error).__name__)

    def recycle(self, push: Pushing) -> None:
        """Return the buffer of a push to the pool."""
        if push.buffer is not None:
            self._context.pool.release(push.buffer)
        push.value = push.buffer = None

    def forget(self, client: int, key: int | None = None) -> None:
        """Drop the codes for a client, of one tensor or of all."""
        if self._outgoing is not None:
            self._outgoing.forget(client, key)

    def serve(self, shard: Served, pull: Pulling, version: int, data: Tensor) -> None:
        """Send the client the values of a shard, encoded unless the client is this rank."""
        if pull.client in self._context.gone:
            return
        outgoing, own = self._outgoing, pull.client == self._context.rank
        if outgoing is None or not data.dtype.is_floating_point or pull.reads != Reads.SNAPSHOT or own:
            if data.nbytes > self._context.coalescer.inline_bytes:
                shard.hold(pull)
            self.send(shard, pull, version, data)
            return
        shard.hold(pull)
        codes: list[Tensor] = []

        def encode() -> None:
            with self._context.timed("encode_seconds"):
                codes.append(outgoing.encode(pull.client, shard.key, data))

        def encoded(error: BaseException | None) -> None:
            if error is not None:
                self.refuse(pull, error)
            elif pull.client not in self._context.gone:
                self.send(shard, pull, version, codes[0], coded=True)
            if pull.client in self._context.gone or shard.refusal is not None:
                self.forget(pull.client, shard.key)
            shard.release(pull.client, pull.number)

        self._context.service.do(data.nbytes, encode, encoded)

    def send(self, shard: Served, pull: Pulling, version: int, t: Tensor, *, coded: bool = False) -> None:
        """Send `t`, or its place in memory. The shard holds memory that is not inline until the end of the read."""
        self._context.counts["served"] += 1
        way, place = self._context.shared.way_to(pull.client, t, look=not coded)
        head = DATA.pack(pull.number, version, way, coded, t.nbytes, *place)
        self._context.coalescer.put(pull.client, Kind.DATA, head, as_bytes(t) if way == Way.INLINE else b"")
        if way == Way.MESSAGE:

            def over(error: BaseException | None, _kept: Tensor = t) -> None:
                if not coded and error is None:  # else the transport may still read the memory
                    shard.release(pull.client, pull.number)
                self._context.coalescer.flush()

            self._context.coalescer.send(t.view(torch.uint8), pull.client, pull.number, over)
