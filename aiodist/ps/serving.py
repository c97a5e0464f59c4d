"""How a server answers reads: with values or rows, with a code of them, or by a look at its memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aiodist.backends.shm.memory import Place
from aiodist.codecs import Outgoing
from aiodist.ps.answers import Answers
from aiodist.ps.context import Context
from aiodist.ps.requests import Pulling
from aiodist.ps.rows.ids import ID_BYTES, ids_in
from aiodist.ps.rows.shard import TableShard
from aiodist.ps.shard import Shard
from aiodist.ps.wire import Kind, Reads, Way, as_bytes, pack_data


class Serving:
    """Every method runs with the transport lock held, unless it says otherwise."""

    def __init__(self, context: Context, answers: Answers) -> None:
        self._context = context
        self._answers = answers
        self._outgoing = None if context.pull_codec is None else Outgoing(context.pull_codec)

    def forget(self, client: int, key: int | None = None) -> None:
        """Keep nothing of what `client` has read."""
        if self._outgoing is not None:
            self._outgoing.forget(client, key)

    # --- tensors -------------------------------------------------------------------------------------------------

    def serve(self, shard: Shard, pull: Pulling, version: int) -> None:
        """Let the client have the shard as it is now; what the client itself has is not encoded."""
        if pull.client in self._context.gone:
            return
        data = shard.data
        self._count(data)
        own = pull.way == Way.OWN
        if self._outgoing is not None and data.dtype.is_floating_point and not own and pull.reads == Reads.SNAPSHOT:
            self._serve_code(self._outgoing, shard, pull, version)
        else:
            way, place = self._way_to(pull, data, shard.key)
            if way != Way.INLINE:
                shard.hold(pull)
            self._send(pull, version, data, way, place, lambda _: shard.release(pull.client, pull.number))

    def _serve_code(self, outgoing: Outgoing, shard: Shard, pull: Pulling, version: int) -> None:
        shard.hold(pull)
        codes: list[Tensor] = []

        def encode() -> None:
            with self._context.timed("encode_seconds"):
                codes.append(outgoing.encode(pull.client, shard.key, shard.data))

        def encoded(error: BaseException | None) -> None:
            if error is not None:
                self._answers.refuse(pull, error)
            else:
                self._send(pull, version, codes[0], *self._way_to(pull, codes[0]), coded=True)
            if pull.client in self._context.gone or shard.retired:
                self.forget(pull.client, shard.key)
            shard.release(pull.client, pull.number)

        self._context.service.do(shard.data.nbytes, encode, encoded)

    # --- rows ----------------------------------------------------------------------------------------------------

    def serve_rows(self, shard: TableShard, pull: Pulling, version: int) -> None:
        """Let the client have the rows that it asks for, as they are now, from a buffer of the pool."""
        if pull.client in self._context.gone:
            return
        assert pull.rows is not None
        found: list[Tensor] = []
        shard.hold(pull)

        def gather() -> None:
            found.append(self._gathered(shard, pull))

        def gathered(error: BaseException | None) -> None:
            if error is not None:
                self._answers.refuse(pull, error)
            elif pull.client not in self._context.gone:
                self._send_rows(shard, pull, version, found[0])
            shard.read_over(pull)

        nbytes = pull.rows.nbytes // ID_BYTES * shard.spec.row_bytes
        if shard.busy:  # a read that waits for no step
            self._context.service.run(gather, gathered)
        else:
            self._context.service.do(nbytes, gather, gathered)

    def _gathered(self, shard: TableShard, pull: Pulling) -> Tensor:
        """Return a buffer of the pool with the rows in it, flat; in any thread."""
        assert pull.rows is not None
        with torch.inference_mode(False), torch.no_grad():
            ids = ids_in(pull.rows, shard.spec)
            shard.check_mine(ids)
            nbytes = ids.numel() * shard.spec.row_bytes
            room = self._context.pool.take_room(nbytes)
            shard.store.read(ids, room[:nbytes].view(shard.spec.dtype).view(-1, shard.spec.dim))
        return room

    def _send_rows(self, shard: TableShard, pull: Pulling, version: int, room: Tensor) -> None:
        assert pull.rows is not None
        rows = room[: pull.rows.nbytes // ID_BYTES * shard.spec.row_bytes]
        self._count(rows)
        way, place = self._way_to(pull, rows, shard.key)
        if way in (Way.OWN, Way.MEMORY):
            shard.show(pull, room)

        def over(error: BaseException | None) -> None:
            if error is None:  # else the transport may still look at it
                self._context.pool.release(room)

        self._send(pull, version, rows, way, place, over)
        if way == Way.INLINE:
            over(None)

    # --- both ----------------------------------------------------------------------------------------------------

    def _count(self, t: Tensor) -> None:
        self._context.counts["served"] += 1
        self._context.counts["served_bytes"] += t.nbytes

    def _way_to(self, pull: Pulling, t: Tensor, key: int | None = None) -> tuple[Way, Place]:
        """Return how `t` gets to the client, and where that finds it; without a key it is a code, never looked at."""
        if pull.way == Way.OWN and key is not None and t.nbytes:
            return Way.OWN, Place(0, key)
        way, place = self._context.way_to(pull.client, t)
        return (Way.MESSAGE, Place(0, 0)) if key is None and way == Way.MEMORY else (way, place)

    def _send(
        self,
        pull: Pulling,
        version: int,
        t: Tensor,
        way: Way,
        place: Place,
        sent: Callable[[BaseException | None], None] = lambda _: None,
        *,
        coded: bool = False,
    ) -> None:
        """Send `t`, or let the client look at it; `sent` is called when a message with it was sent."""
        head = pack_data(pull.number, version, way, coded, t.nbytes, *place)
        self._context.coalescer.put(pull.client, Kind.DATA, head, as_bytes(t) if way == Way.INLINE else b"")
        if way in (Way.INLINE, Way.MESSAGE):
            self._context.counts["served_sent_bytes"] += t.nbytes
        if way == Way.MESSAGE:

            def over(error: BaseException | None, _kept: Tensor = t) -> None:
                sent(error)  # who cannot be reached is told of by the control channel
                self._context.coalescer.flush()

            self._context.coalescer.send(t.view(torch.uint8), pull.client, pull.number, over)
