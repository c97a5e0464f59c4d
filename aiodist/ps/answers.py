"""What a server tells its clients, and what becomes of what they have pushed."""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any

from torch import Tensor

from aiodist.errors import PeerLost
from aiodist.ps.context import Context
from aiodist.ps.requests import Pushing, Request
from aiodist.ps.wire import Kind, Stage, pack_done


class Answers:
    """Every method but `decoded` runs with the transport lock held."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def done(self, push: Pushing, stage: Stage, version: int) -> None:
        """Tell the client how far its push is."""
        if push.client not in self._context.gone:
            self._context.coalescer.put(push.client, Kind.DONE, pack_done(push.number, version, stage))

    def answer(self, client: int, number: int, **said: Any) -> None:  # noqa: ANN401
        """Answer a call."""
        if client not in self._context.gone:
            self._context.coalescer.put(client, Kind.ANSWER, json.dumps({"n": number, **said}).encode())

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

    def decoded(self, push: Pushing, like: Tensor) -> Tensor:
        """Return the value of `push` as a flat tensor such as the shard; in any thread."""
        assert push.value is not None
        codec = self._context.codec
        if not push.coded or codec is None:
            return push.value
        began = perf_counter()
        value = codec.decode(push.value, like.dtype, like.numel())
        self._context.counts["decode_seconds"] += perf_counter() - began
        return value

    def recycle(self, push: Pushing) -> None:
        """Nobody looks at what was pushed any more."""
        if push.buffer is not None:
            self._context.pool.release(push.buffer)
        push.value = push.buffer = None
