"""How a server answers reads: with the values, with a code of them, or by a look at its memory."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiodist.codecs import Outgoing
from aiodist.ps.answers import Answers
from aiodist.ps.context import Context
from aiodist.ps.requests import Pulling
from aiodist.ps.wire import Kind, Reads, Way, as_bytes, pack_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiodist.ps.shard import Shard


class Serving:
    """Every method runs with the transport lock held."""

    def __init__(self, context: Context, answers: Answers) -> None:
        self._context = context
        self._answers = answers
        self._outgoing = None if context.pull_codec is None else Outgoing(context.pull_codec)

    def forget(self, client: int, key: int | None = None) -> None:
        """Keep nothing of what `client` has read."""
        if self._outgoing is not None:
            self._outgoing.forget(client, key)

    def serve(self, shard: Shard, pull: Pulling, version: int) -> None:
        """Let the client have the shard as it is now; what the client itself has is not encoded."""
        if pull.client in self._context.gone:
            return
        data = shard.data
        self._context.counts["served"] += 1
        self._context.counts["served_bytes"] += data.nbytes
        own = pull.way == Way.OWN
        if self._outgoing is not None and data.dtype.is_floating_point and not own and pull.reads == Reads.SNAPSHOT:
            self._serve_code(self._outgoing, shard, pull, version)
        elif data.nbytes <= self._context.coalescer.inline_bytes and not own:
            self._put(pull, version, data, coded=False)
        else:
            self._show(shard, pull, version)

    def _put(self, pull: Pulling, version: int, t: Tensor, *, coded: bool) -> None:
        """Send what fits into an entry."""
        self._context.counts["served_sent_bytes"] += t.nbytes
        head = pack_data(pull.number, version, Way.INLINE, coded, t.nbytes, 0, 0)
        self._context.coalescer.put(pull.client, Kind.DATA, head, as_bytes(t))

    def _show(self, shard: Shard, pull: Pulling, version: int) -> None:
        """Let the client look at the shard's memory, or send from it; nothing is applied meanwhile."""
        raw = shard.data.view(torch.uint8)
        place = None
        if pull.way == Way.MEMORY and self._context.near is not None:
            place = self._context.near.locate(raw)
        shard.hold(pull)
        way = pull.way if place is not None or pull.way == Way.OWN else Way.MESSAGE
        head = pack_data(pull.number, version, way, False, raw.nbytes, *(place or (0, shard.key)))
        self._context.coalescer.put(pull.client, Kind.DATA, head)
        if way == Way.MESSAGE:
            self._send(raw, pull, partial(shard.release, pull.client, pull.number))

    def _send(self, raw: Tensor, pull: Pulling, over: Callable[[], None]) -> None:
        self._context.counts["served_sent_bytes"] += raw.nbytes

        def sent(error: BaseException | None, _kept: Tensor = raw) -> None:
            # Who cannot be reached is told of by the control channel.
            over()
            self._context.coalescer.flush()

        self._context.coalescer.send(raw, pull.client, pull.number, sent)

    def _serve_code(self, outgoing: Outgoing, shard: Shard, pull: Pulling, version: int) -> None:
        shard.hold(pull)
        codes: list[Tensor] = []

        def encode() -> None:
            began = perf_counter()
            codes.append(outgoing.encode(pull.client, shard.key, shard.data))
            self._context.counts["encode_seconds"] += perf_counter() - began

        def encoded(error: BaseException | None) -> None:
            if error is not None:
                self._answers.refuse(pull, error)
            else:
                self._send_code(pull, version, codes[0])
            if pull.client in self._context.gone or shard.retired:
                self.forget(pull.client, shard.key)
            shard.release(pull.client, pull.number)

        self._context.service.do(shard.data.nbytes, encode, encoded)

    def _send_code(self, pull: Pulling, version: int, code: Tensor) -> None:
        if code.nbytes <= self._context.coalescer.inline_bytes:
            self._put(pull, version, code, coded=True)
        else:
            head = pack_data(pull.number, version, Way.MESSAGE, True, code.nbytes, 0, 0)
            self._context.coalescer.put(pull.client, Kind.DATA, head)
            self._send(code, pull, lambda: None)
