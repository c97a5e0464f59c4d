"""What a server holds of requests until they are executed, and what it tells its clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from aiodist.codecs import Outgoing
from aiodist.errors import PeerLost
from aiodist.ps.context import Context
from aiodist.ps.row_store import RowStore
from aiodist.ps.wire import Kind, Reads, Stage, Way, as_bytes, pack_data, pack_done


class Freed(KeyError):
    """The tensor was freed."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would quote it


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


class Served(Protocol):
    """A shard, as far as reads know it."""

    key: int
    refusal: Exception | None

    def hold(self, request: Pulling) -> None: ...

    def release(self, client: int, number: int) -> None: ...


class Answers:
    """Every method runs with the transport lock held."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.applied: Callable[[], None] = lambda: None
        """Called when a shard has come to the end of what it can do."""
        self._outgoing = None if context.pull_codec is None else Outgoing(context.pull_codec)

    def done(self, push: Pushing, stage: Stage) -> None:
        if push.client not in self._context.gone:
            self._context.coalescer.put(push.client, Kind.DONE, pack_done(push.number, stage))

    def answer(self, client: int, number: int, **said: Any) -> None:  # noqa: ANN401
        if client not in self._context.gone:
            self._context.coalescer.put(client, Kind.ANSWER, json.dumps({"n": number, **said}).encode())

    def tell(self, rank: int, op: str, **said: Any) -> None:  # noqa: ANN401
        if rank not in self._context.gone:
            self._context.coalescer.put(rank, Kind.CALL, json.dumps({"op": op, **said}).encode())

    def refuse(self, request: Request, error: BaseException) -> None:
        if isinstance(request, Pushing):
            self.recycle(request)
        self.fail(request.client, request.number, error)

    def fail(self, client: int, number: int, error: BaseException) -> None:
        if isinstance(error, PeerLost):
            self.answer(client, number, error=error.args[0], lost=error.lost)
        else:
            self.answer(client, number, error=str(error), type=type(error).__name__)

    def recycle(self, push: Pushing) -> None:
        """Nobody looks at what was pushed any more."""
        if push.buffer is not None:
            self._context.pool.release(push.buffer)
        push.value = push.buffer = None

    def forget(self, client: int, key: int | None = None) -> None:
        if self._outgoing is not None:
            self._outgoing.forget(client, key)

    def serve(self, shard: Served, pull: Pulling, version: int, data: Tensor) -> None:
        """Let the client have the shard as it is now; what the client itself has is not encoded."""
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
        """Send `t`, or let the client look at it; what is longer than an entry the shard holds until all is over."""
        self._context.counts["served"] += 1
        way, place = self._context.shared.way_to(pull.client, t, look=not coded)
        head = pack_data(pull.number, version, way, coded, t.nbytes, *place)
        self._context.coalescer.put(pull.client, Kind.DATA, head, as_bytes(t) if way == Way.INLINE else b"")
        if way == Way.MESSAGE:

            def over(error: BaseException | None, _kept: Tensor = t) -> None:
                if not coded and error is None:  # else the transport may still look at it
                    shard.release(pull.client, pull.number)
                self._context.coalescer.flush()

            self._context.coalescer.send(t.view(torch.uint8), pull.client, pull.number, over)
