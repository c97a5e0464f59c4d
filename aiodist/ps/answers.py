"""What a server tells its clients: how far a push is, answers to calls, and what pulls read."""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
from torch import Tensor

from aiodist.codecs import Outgoing
from aiodist.errors import PeerLost
from aiodist.ps.context import Context
from aiodist.ps.requests import Pulling, Pushing, Request
from aiodist.ps.wire import Kind, Reads, Stage, Way, as_bytes, pack_data, pack_done


class Served(Protocol):
    """A shard, as far as reads know it."""

    key: int
    data: Tensor
    refusal: Exception | None

    def hold(self, request: Pulling) -> None:
        """Keep what the request reads until `release`."""

    def release(self, client: int, number: int) -> None:
        """The read of that number is over."""


class Answers:
    """Every method runs with the transport lock held."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._outgoing = None if context.pull_codec is None else Outgoing(context.pull_codec)

    def done(self, push: Pushing, stage: Stage) -> None:
        """Tell the client how far its push is."""
        if push.client not in self._context.gone:
            self._context.coalescer.put(push.client, Kind.DONE, pack_done(push.number, stage))

    def answer(self, client: int, number: int, **said: Any) -> None:  # noqa: ANN401
        """Answer a call."""
        if client not in self._context.gone:
            self._context.coalescer.put(client, Kind.ANSWER, json.dumps({"n": number, **said}).encode())

    def tell(self, rank: int, op: str, **said: Any) -> None:  # noqa: ANN401
        """Tell another server something which it does not answer."""
        if rank not in self._context.gone:
            self._context.coalescer.put(rank, Kind.CALL, json.dumps({"op": op, **said}).encode())

    def refuse(self, request: Request, error: BaseException) -> None:
        """Tell the client that its request failed here."""
        if isinstance(request, Pushing):
            self.recycle(request)
        self.fail(request.client, request.number, error)

    def fail(self, client: int, number: int, error: BaseException) -> None:
        """Tell `client` why its request failed here."""
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
        """Keep nothing of what `client` has read."""
        if self._outgoing is not None:
            self._outgoing.forget(client, key)

    # --- reads -------------------------------------------------------------------------------------------------

    def serve(self, shard: Served, pull: Pulling, version: int) -> None:
        """Let the client have the shard as it is now; what the client itself has is not encoded."""
        if pull.client in self._context.gone:
            return
        data, outgoing, own = shard.data, self._outgoing, pull.client == self._context.rank
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
        way, place = self._context.way_to(pull.client, t, look=not coded)
        head = pack_data(pull.number, version, way, coded, t.nbytes, *place)
        self._context.coalescer.put(pull.client, Kind.DATA, head, as_bytes(t) if way == Way.INLINE else b"")
        if way == Way.MESSAGE:

            def over(error: BaseException | None, _kept: Tensor = t) -> None:
                if not coded and error is None:  # else the transport may still look at it
                    shard.release(pull.client, pull.number)
                self._context.coalescer.flush()

            self._context.coalescer.send(t.view(torch.uint8), pull.client, pull.number, over)
