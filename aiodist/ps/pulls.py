"""A client's pulls, from the call until the data are there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from aiodist.backends.base import Done
from aiodist.errors import AiodistError
from aiodist.ps.coalescer import keep
from aiodist.ps.codes import Codes
from aiodist.ps.context import Context
from aiodist.ps.operation import PullPart
from aiodist.ps.request_queue import RequestQueue, Sender
from aiodist.ps.wire import (
    DATA_BYTES,
    Data,
    Kind,
    Reads,
    Way,
    as_bytes,
    bytes_in,
    pack_ids,
    pack_pull,
    pack_release,
    unpack,
)


class Pulls:
    """`pull` is called on the loop's thread; the rest runs with the transport lock held."""

    def __init__(self, queue: RequestQueue, codes: Codes) -> None:
        self._queue = queue
        self._codes = codes
        self._context: Context = queue.context
        self._parts: dict[int, PullPart] = {}

    def pull(self, part: PullPart, reads: Reads, wants: int) -> None:
        """Pull what `part` says."""
        number = self._queue.number()
        entry = part.entry
        self._parts[number] = part
        entry.open.add(number)
        counts = self._context.counts
        counts["pulls"] += 1
        counts["pull_bytes"] += part.nbytes
        head = pack_pull(entry.key, reads, number, wants)
        self._queue.issue([self._sender(number, span.rank, head, part.ids.get(span.rank)) for span in entry.spans])

    def _sender(self, number: int, dst: int, head: bytes, ids: Tensor | None) -> Sender:
        """Return what asks one server: for its shard, or for the rows of `ids`."""
        if ids is None:
            return partial(self._queue.put, dst, Kind.PULL, head)
        way, place = self._context.way_to(dst, ids)
        head += pack_ids(way, ids.nbytes, *place)
        put = partial(self._queue.put, dst, Kind.PULL, head, as_bytes(ids) if way == Way.INLINE else b"")
        if way != Way.MESSAGE:
            return put

        def send() -> None:
            put()
            if dst not in self._context.gone:
                self._context.coalescer.send(ids, dst, number, partial(keep, ids))

        return send

    # --- what servers say ------------------------------------------------------------------------------------

    def data(self, src: int, body: memoryview) -> None:
        """Server `src` has data for a pull, or lets us look at them."""
        data = unpack(Data, body)
        part = self._parts.get(data.number)
        if part is None:  # all was given up
            return
        counts, over = self._context.counts, partial(self.over, data.number, src)
        part.version = data.version if part.version is None else min(part.version, data.version)
        if part.place is None:
            counts["pull_bytes"] += data.nbytes
        if data.way != Way.MEMORY and src != self._context.rank:
            counts["pull_received_bytes"] += data.nbytes
        decode = self._codes.expect(part, src, over) if data.coded else None
        if data.way == Way.MEMORY:
            self._look(part, src, data)
        elif data.way == Way.INLINE:
            raw = bytes_in(body, DATA_BYTES, data.nbytes)
            if decode is not None:
                decode(raw)
            else:
                part.fill(src, raw)
                over(None)
        else:
            self._receive(part, src, data, over, decode)

    def _receive(
        self, part: PullPart, src: int, data: Data, over: Done, decode: Callable[[Tensor | BaseException], None] | None
    ) -> None:
        """Take what comes in a message behind the entry."""
        if decode is None and part.place is not None:
            self._context.coalescer.receive(part.place(src).view(torch.uint8), src, data.number, over)
            return
        room = torch.empty(data.nbytes, dtype=torch.uint8)

        def received(error: BaseException | None) -> None:
            if decode is not None:
                decode(room if error is None else error)
            else:
                part.value = room
                over(error)

        self._context.coalescer.receive(room, src, data.number, received)

    def _look(self, part: PullPart, src: int, data: Data) -> None:
        """Copy from the server's memory, and tell it."""
        found = self._context.memory(src, data.segment, data.offset, data.nbytes)

        def looked(error: BaseException | None) -> None:
            if src not in self._context.gone:
                self._context.coalescer.put(src, Kind.RELEASE, pack_release(part.entry.key, data.number))
            self.over(data.number, src, error)

        part.copying.add(src)
        self._context.service.do(data.nbytes, partial(part.fill, src, found), looked)

    def over(self, number: int, src: int, error: BaseException | None) -> None:
        """One server's part is there, or never will be; the buffer is the user's again when all of them are over."""
        part = self._parts.get(number)
        if part is None:
            return
        part.left.discard(src)
        part.error = part.error or error
        if part.left:
            return
        del self._parts[number]
        if part.error is None and part.version is not None:
            part.entry.base = max(part.entry.base, part.version)
            part.operation.read(part.version)
        if part.operation.part_over(None if part.error is None else self._queue.located(part.error)):
            self._context.counts["pull_seconds"] += part.operation.seconds
        part.entry.part_over(number)

    # --- waiting for them, and the end -------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Something is not there yet."""
        return bool(self._parts)

    def late(self) -> dict[int, str]:
        """Return the servers from which something is missing, and what."""
        return {rank: f"pull of {part.entry}" for part in list(self._parts.values()) for rank in list(part.left)}

    def lose(self, rank: int, error: AiodistError) -> None:
        """`rank` died: what it should have sent never comes."""
        for number, part in list(self._parts.items()):
            if rank in part.left and rank not in part.copying:  # a buffer that is written is not given back
                self.over(number, rank, error)

    def abort(self, error: AiodistError) -> None:
        """Fail everything."""
        parts, self._parts = self._parts, {}
        for number, part in parts.items():
            part.operation.part_over(error)
            part.entry.part_over(number)
