"""What a server tells its clients, and what becomes of what they have pushed."""

from __future__ import annotations

import json
from typing import Any

from aiodist.errors import PeerLost
from aiodist.ps.context import Context
from aiodist.ps.requests import Pushing, Request
from aiodist.ps.wire import Kind, Stage, pack_done


class Answers:
    """Every method runs with the transport lock held."""

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

    def recycle(self, push: Pushing) -> None:
        """Nobody looks at what was pushed any more."""
        if push.buffer is not None:
            self._context.pool.release(push.buffer)
        push.value = push.buffer = None
