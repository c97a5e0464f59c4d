"""How a server answers reads: with the values, with a code of them, or by a look at its memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiodist.codecs import Outgoing
from aiodist.ps.context import LIGHT_BYTES, Context
from aiodist.ps.raw import as_bytes
from aiodist.ps.requests import Pulling
from aiodist.ps.wire import Kind, Reads, Way, pack_data

if TYPE_CHECKING:
    from aiodist.codecs import Codec
    from aiodist.ps.shard import Shard

__all__ = ["Serving"]


class Serving:
    """Every method runs with the transport lock held."""

    def __init__(
        self,
        context: Context,
        outgoing: Outgoing | None,
        refuse: Callable[[Pulling, BaseException], None],
        shard_of: Callable[[int], Shard | None],
    ) -> None:
        """`outgoing` encodes what is read, if that is wanted; `shard_of` returns what a key stands for by now."""
        self._context = context
        self._refuse = refuse
        self._shard_of = shard_of
        self._outgoing = outgoing

    def forget(self, client: int, key: int | None = None) -> None:
        """Keep nothing of what `client` has read."""
        if self._outgoing is not None:
            self._outgoing.forget(client, key)

    def serve(self, shard: Shard, pull: Pulling, version: int) -> None:
        """Let the client have the shard as it is now."""
        if pull.client in self._context.gone:
            return
        self._context.counts["served"] += 1
        self._context.counts["served_bytes"] += shard.data.nbytes
        codec = self._codec_for(shard, pull)
        if codec is not None:
            self._serve_code(shard, pull, version)
        elif shard.data.nbytes <= self._context.coalescer.inline_bytes and pull.way != Way.OWN:
            self._context.counts["served_sent_bytes"] += shard.data.nbytes
            data = pack_data(pull.number, version, Way.INLINE, False, shard.data.nbytes, 0, 0)
            self._context.coalescer.put(pull.client, Kind.DATA, data, as_bytes(shard.data))
        else:
            self._show(shard, pull, version)

    def _codec_for(self, shard: Shard, pull: Pulling) -> Codec | None:
        """Return how to encode what `pull` reads; what the client itself has is not encoded."""
        floating = shard.data.dtype.is_floating_point
        return self._context.pull_codec if floating and pull.way != Way.OWN and pull.reads == Reads.SNAPSHOT else None

    def _show(self, shard: Shard, pull: Pulling, version: int) -> None:
        """Let the client look at the shard's memory, or send from it; nothing is applied meanwhile."""
        raw = shard.data.view(torch.uint8)
        place = None
        if pull.way == Way.MEMORY and self._context.near is not None:
            place = self._context.near.locate(raw)
        shard.hold(pull)
        way = pull.way if place is not None or pull.way == Way.OWN else Way.MESSAGE
        data = pack_data(pull.number, version, way, False, raw.nbytes, *(place or (0, shard.key)))
        self._context.coalescer.put(pull.client, Kind.DATA, data)
        if way == Way.MESSAGE:
            self._send(raw, pull, partial(shard.release, pull.client, pull.number))

    def _send(self, raw: Tensor, pull: Pulling, over: Callable[[], None]) -> None:
        self._context.counts["served_sent_bytes"] += raw.nbytes

        def sent(error: BaseException | None) -> None:
            # Who cannot be reached is told of by the control channel.
            over()
            self._context.coalescer.flush()

        self._context.coalescer.send(raw, pull.client, pull.number, sent)

    def _serve_code(self, shard: Shard, pull: Pulling, version: int) -> None:
        shard.hold(pull)
        codes: list[Tensor] = []

        def encode() -> None:
            began = perf_counter()
            assert self._outgoing is not None
            codes.append(self._outgoing.encode(pull.client, shard.key, shard.data))
            self._context.counts["encode_seconds"] += perf_counter() - began

        def encoded(error: BaseException | None) -> None:
            if error is not None:
                self._refuse(pull, error)
            else:
                self._send_code(pull, version, codes[0])
            if pull.client in self._context.gone or self._shard_of(shard.key) is not shard:
                self.forget(pull.client, shard.key)
            shard.release(pull.client, pull.number)
            self._context.coalescer.flush()

        if shard.data.nbytes > LIGHT_BYTES:
            self._context.service.run(encode, encoded)
            return
        try:
            encode()
        except Exception as error:  # noqa: BLE001  - it belongs to the client that pulled
            self._refuse(pull, error)
        else:
            self._send_code(pull, version, codes[0])
        shard.release(pull.client, pull.number)

    def _send_code(self, pull: Pulling, version: int, code: Tensor) -> None:
        inline = code.nbytes <= self._context.coalescer.inline_bytes
        data = pack_data(pull.number, version, Way.INLINE if inline else Way.MESSAGE, True, code.nbytes, 0, 0)
        if inline:
            self._context.counts["served_sent_bytes"] += code.nbytes
            self._context.coalescer.put(pull.client, Kind.DATA, data, as_bytes(code))
        else:
            self._context.coalescer.put(pull.client, Kind.DATA, data)
            self._send(code, pull, lambda _code=code: None)  # type: ignore[misc]
