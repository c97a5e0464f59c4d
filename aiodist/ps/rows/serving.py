"""How a server answers reads of rows: it gathers them, and sends what it gathered."""

from __future__ import annotations

from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from aiodist.backends.shm.memory import Place
from aiodist.ps.answers import Answers
from aiodist.ps.context import Context
from aiodist.ps.requests import Pulling
from aiodist.ps.rows.packing import ids_in
from aiodist.ps.rows.shard import TableShard
from aiodist.ps.wire import Kind, Way, as_bytes, pack_data


class RowServing:
    """Every method runs with the transport lock held, unless it says otherwise."""

    def __init__(self, context: Context, answers: Answers) -> None:
        self._context = context
        self._answers = answers

    def serve(self, shard: TableShard, pull: Pulling, version: int) -> None:
        """Let the client have the rows that it asks for, as they are now."""
        if pull.client in self._context.gone:
            return
        found: list[tuple[Tensor, Tensor, bool]] = []
        shard.hold(pull)

        def gather() -> None:
            found.append(self._gathered(shard, pull))

        def gathered(error: BaseException | None) -> None:
            if error is not None:
                self._answers.refuse(pull, error)
            elif pull.client not in self._context.gone:
                self._send(shard, pull, version, *found[0])
            shard.read_over(pull)

        assert pull.rows is not None
        nbytes = pull.rows.nbytes // 8 * shard.spec.row_bytes
        if shard.busy:  # a read that waits for no step
            self._context.service.run(gather, gathered)
        else:
            self._context.service.do(nbytes, gather, gathered)

    def _gathered(self, shard: TableShard, pull: Pulling) -> tuple[Tensor, Tensor, bool]:
        """Return a buffer of the pool, and the rows in it, or a code of them, flat; in any thread."""
        assert pull.rows is not None
        with torch.inference_mode(False), torch.no_grad():
            ids = ids_in(pull.rows, shard.spec)
            shard.check_mine(ids)
            nbytes = ids.numel() * shard.spec.row_bytes
            room = self._context.pool.take_room(nbytes)
            rows = room[:nbytes].view(shard.spec.dtype)
            shard.store.read(ids, rows.view(-1, shard.spec.dim))
        counts = self._context.counts
        counts["served"] += 1
        counts["served_bytes"] += rows.nbytes
        codec = self._context.pull_codec
        if codec is None or not shard.spec.coded or pull.way == Way.OWN:
            return room, rows, False
        began = perf_counter()
        code = codec.encode(rows)
        counts["encode_seconds"] += perf_counter() - began
        return room, code, True

    def _send(self, shard: TableShard, pull: Pulling, version: int, room: Tensor, t: Tensor, coded: bool) -> None:
        context = self._context
        way, place = context.way_to(pull.client, t)
        if pull.way == Way.OWN and t.nbytes:
            way, place = Way.OWN, Place(0, shard.key)
        elif coded and way == Way.MEMORY:  # a codec may return its input; who looks at memory expects rows
            way, place = Way.MESSAGE, Place(0, 0)
        head = pack_data(pull.number, version, way, coded, t.nbytes, *place)
        looks = way in (Way.OWN, Way.MEMORY)
        if looks:
            shard.show(pull, room)
        else:
            context.counts["served_sent_bytes"] += t.nbytes
        context.coalescer.put(pull.client, Kind.DATA, head, as_bytes(t) if way == Way.INLINE else b"")
        if way == Way.MESSAGE:
            context.coalescer.send(t.view(torch.uint8), pull.client, pull.number, partial(self._sent, room, t))
        elif not looks:
            context.pool.release(room)

    def _sent(self, room: Tensor, t: Tensor, error: BaseException | None) -> None:
        """What the transport had to keep goes back, unless it may still look at it."""
        if error is None:
            self._context.pool.release(room)
