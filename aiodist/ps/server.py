"""The server of one rank: shards by key, and the way from an entry to a shard and back to the client."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import DTYPES
from aiodist.ps.answers import Answers
from aiodist.ps.client import Client
from aiodist.ps.consistency import Counts
from aiodist.ps.context import Context
from aiodist.ps.directory import Directory
from aiodist.ps.meeting import Meeting
from aiodist.ps.requests import Change, Freed, Mark, Pulling, Pushing, Request
from aiodist.ps.rows.shard import TableShard
from aiodist.ps.saving import ServerSaving
from aiodist.ps.service import LIGHT_BYTES
from aiodist.ps.serving import Serving
from aiodist.ps.shard import Shard
from aiodist.ps.shards import Shards
from aiodist.ps.statistics import ParameterServerStatistics
from aiodist.ps.wire import (
    FILL,
    IDS_BYTES,
    PULL_BYTES,
    PUSH_BYTES,
    IdsHead,
    Kind,
    Order,
    PullHead,
    PushHead,
    Reads,
    Release,
    Way,
    bytes_in,
    unpack,
    values_in,
)


class Server:
    """Every method runs with the transport lock held."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.own: dict[tuple[int, int], Tensor] = {}
        """What this rank's client pushes to this very rank: by number and key."""
        self._shards = Shards()
        self._retired: dict[int, Shard] = {}
        self._counted: list[Counts] = []  # of tensors that were freed
        self._answers = answers = Answers(context)
        self._serving = Serving(context, answers)
        self._directory = Directory(context, answers, self._shards, lambda client: self._meeting.stops(client))
        self._meeting = Meeting(context, answers, self._shards, self._directory)
        self.saving: ServerSaving
        self._calls: dict[str, Callable[[int, dict[str, Any]], None]] = {
            "make": self._make,
            "made": lambda client, call: answers.answer(client, call["n"]),
            "remove": self._remove,
            "configure": self._configure,
            "part": self._part,
            "leave": self._leave,
            "open": self._directory.open,
            "ready": self._directory.ready,
            "free": self._directory.free,
            "barrier": self._meeting.barrier,
            "sync": self._meeting.sync,
            "standing": self._meeting.compare,
            "settle": self._meeting.settle,
            "bye": self._meeting.bye,
        }

    def open(self, client: Client) -> None:
        """Know the client of this rank."""
        self.saving = ServerSaving(self.context, self._answers, self._shards, client)
        self._calls |= self.saving.calls

    # --- what comes ----------------------------------------------------------------------------------------

    def heard(self, client: int, kind: int, body: memoryview) -> None:
        """Take one entry that is meant for a server."""
        if kind == Kind.PUSH:
            self._push(client, body)
        elif kind == Kind.PULL:
            self._pull(client, body)
        elif kind == Kind.ORDER:
            order = Order.unpack(body)
            if (shard := self._shards.get(order.key)) is not None:
                shard.obey(order)
        elif kind == Kind.RELEASE:
            self._release(client, body)
        else:
            call = json.loads(bytes(body))
            self._calls[call["op"]](client, call)

    def _push(self, client: int, body: memoryview) -> None:
        head = unpack(PushHead, body)
        if self._meeting.syncs:
            self._meeting.syncs.pop(client, None)  # it goes on
        push = Pushing(client, head.number, head.base, head.rule, head.alpha, head.coded)
        shard = self._shards.get(head.key)
        if head.way == Way.MESSAGE:
            buffer = self._buffer(shard, push, head.nbytes)
            push.ready = False
            self.context.coalescer.receive(buffer, client, head.number, partial(self._received, shard, push))
            self._take(shard, push, buffer)
        elif head.way == Way.INLINE:
            # What waits must not keep a frame alive, which has more room than it needs.
            keep = self.context.policy.accepts
            dtype = torch.uint8 if head.coded or shard is None else shard.pushed_dtype
            value = values_in(body, PUSH_BYTES, head.nbytes, dtype)
            push.value = value.clone() if keep else value
        elif not self._look(shard, push, head):
            return
        self._expect(head.key, push)

    def _expect(self, key: int, request: Request) -> None:
        """Have a shard execute a request in its turn."""
        shard = self._shards.get(key)
        if shard is None:
            self._answers.refuse(request, Freed(f"key {key} was freed"))
        else:
            shard.arrivals.expect(request)

    def _look(self, shard: Shard | None, push: Pushing, head: PushHead) -> bool:
        """Find what lies in the client's memory, and copy it where the client need not keep it until it is applied.

        False where it is no longer there: another server of the tensor is gone, or the client is.
        """
        found = None
        if head.way == Way.OWN:
            found = self.own.pop((head.number, head.key), None)
        elif push.client not in self.context.gone:
            found = self.context.memory(push.client, head.segment, head.offset, head.nbytes)
        if found is None:
            return False
        if not self.context.policy.accepts or head.rule == FILL or shard is None:
            self._take(shard, push, found)
            return True
        buffer = self._buffer(shard, push, head.nbytes)
        self._take(shard, push, buffer)
        if head.nbytes <= LIGHT_BYTES:
            buffer.copy_(found)
        else:
            push.ready = False
            self.context.service.run(partial(buffer.copy_, found), partial(self._received, shard, push))
        return True

    def _buffer(self, shard: Shard | None, push: Pushing, nbytes: int) -> Tensor:
        """Return memory for the data of `push`; those of a table have another size each time."""
        pool = self.context.pool
        push.buffer = pool.take_room(nbytes) if isinstance(shard, TableShard) else pool.take(nbytes)
        return push.buffer[:nbytes]

    def _take(self, shard: Shard | None, push: Pushing, raw: Tensor) -> None:
        """Let `push` have its data as what they are."""
        push.value = raw if push.coded or shard is None else raw.view(shard.pushed_dtype)

    def _received(self, shard: Shard | None, request: Request, error: BaseException | None) -> None:
        if isinstance(request, Pushing) and (shard is None or error is not None):
            self._answers.recycle(request)
        if error is not None:
            if request.client not in self.context.gone:
                self._answers.refuse(request, error)
        elif shard is not None:
            request.ready = True
            shard.arrivals.go_on(request.client)
            self._meeting.check()
        self.context.coalescer.flush()

    def _pull(self, client: int, body: memoryview) -> None:
        head = unpack(PullHead, body)
        pull = Pulling(client, head.number, head.wants, Way(head.way), Reads(head.reads))
        shard = self._shards.get(head.key)
        if isinstance(shard, TableShard):
            ids = unpack(IdsHead, body, PULL_BYTES)
            if ids.way == Way.MEMORY:
                if client in self.context.gone:
                    return
                pull.rows = self.context.memory(client, ids.segment, ids.offset, ids.nbytes)
            elif ids.way == Way.MESSAGE:
                pull.rows = torch.empty(ids.nbytes, dtype=torch.uint8)
                pull.ready = False
                self.context.coalescer.receive(pull.rows, client, head.number, partial(self._received, shard, pull))
            else:  # what waits must not keep a frame alive
                came = memoryview(bytearray(body[PULL_BYTES + IDS_BYTES :]))
                pull.rows = bytes_in(came, 0, ids.nbytes)
        self._expect(head.key, pull)

    def _release(self, client: int, body: memoryview) -> None:
        key, number = unpack(Release, body)
        shard = self._shards.get(key) or self._retired.get(key)
        if shard is not None:
            shard.release(client, number)

    # --- calls -----------------------------------------------------------------------------------------------

    def _make(self, client: int, call: dict[str, Any]) -> None:
        """Make a shard; its first values come right behind."""
        shard = self._shards[call["key"]] = self._made(call)
        for rank in {*self._meeting.parted, *self.context.gone}:
            shard.leave(rank, gone=rank in self.context.gone)
        for rank in self._directory.refused(shard.name):
            shard.rest(rank)
        self._meeting.stop_at(shard)

    def _made(self, call: dict[str, Any]) -> Shard:
        leads = call["spans"][0][0] == self.context.rank
        machine = self.context.policy.machine(self.context.workers) if leads else None
        if call["table"] is not None:
            told = (self._serving.serve_rows, self._unseen, self.saving.at)
            return TableShard(self.context, self._answers, *told, call, machine)
        dtype = DTYPES[call["dtype"]]
        memory = self.context.pool.take(call["numel"] * dtype.itemsize).view(dtype)
        told = (self._serving.serve, self._unseen, self.saving.at)
        return Shard(self.context, self._answers, *told, call, memory, machine)

    def _remove(self, client: int, call: dict[str, Any]) -> None:
        shard = self._shards.pop(call["key"], None)
        if shard is None:
            return
        for rank in range(len(self.context.world_ranks)):
            self._serving.forget(rank, shard.key)
        shard.abort()
        if shard.machine is not None:
            self._counted.append(shard.machine.counts)
        if shard.looked_at:
            self._retired[shard.key] = shard
        self.saving.check()

    def _configure(self, client: int, call: dict[str, Any]) -> None:
        self._expect(call["key"], Change(client, call["n"], call["settings"]))

    def _part(self, client: int, call: dict[str, Any]) -> None:
        """`client` begins nothing more, so nobody waits for it; what it has begun may still wait for others."""
        self._directory.part(client)
        self._meeting.part(client)
        self._shards.mark(Mark(client, 0, parts=True))
        self._meeting.check()

    def _leave(self, client: int, call: dict[str, Any]) -> None:
        """`client` sends nothing more but its goodbye."""
        self._gone(client, gone=False)
        self._answers.answer(client, call["n"])

    def _unseen(self, key: int) -> None:
        """Nobody looks any more at the memory of a tensor that was freed."""
        self._retired.pop(key, None)

    def lose(self, rank: int) -> None:
        """`rank` died."""
        self._gone(rank, gone=True)
        self.saving.check()
        self.context.coalescer.flush()

    def _gone(self, rank: int, *, gone: bool) -> None:
        self._serving.forget(rank)
        for shard in (*self._shards.values(), *self._retired.values()):
            shard.leave(rank, gone=gone)
        self._directory.leave(rank)
        self._meeting.leave(rank, gone=gone)

    # --- answers ---------------------------------------------------------------------------------------------

    def shown(self, key: int, number: int) -> Tensor:
        """Return the memory that the pull `number` of this very rank's client was let look at."""
        return (self._shards.get(key) or self._retired[key]).shown(self.context.rank, number)

    def by_name(self) -> dict[str, Shard]:
        """Return all shards."""
        return {shard.name: shard for shard in self._shards.values()}

    def led(self) -> list[Shard]:
        """Return the shards that lead."""
        return self._shards.led()

    def statistics(self) -> ParameterServerStatistics:
        """Return what is counted, with what the machines have counted."""
        counts = [shard.machine.counts for shard in list(self._shards.values()) if shard.machine is not None]
        counts += self._counted
        tables = [shard for shard in list(self._shards.values()) if isinstance(shard, TableShard)]
        return ParameterServerStatistics(
            **self.context.counts,
            dropped=sum(count.dropped for count in counts),
            scaled=sum(count.scaled for count in counts),
            incomplete=sum(count.incomplete for count in counts),
            # A copy of each at once: they count on meanwhile.
            staleness=sum((Counter(dict(count.staleness)) for count in counts), Counter()),
            sent_bytes=self.context.coalescer.sent_bytes,
            rows=sum(len(table.store) for table in tables),
            row_bytes=sum(table.store.nbytes for table in tables),
        )
