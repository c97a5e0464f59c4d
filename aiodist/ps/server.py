"""The server of one rank: shards by key, the requests on their way to them, barriers, and the end."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist.ps.answers import Answers
from aiodist.ps.client import Client
from aiodist.ps.context import Context
from aiodist.ps.directory import Directory
from aiodist.ps.machines import Counts
from aiodist.ps.requests import Change, Freed, Pulling, Pushing, Request, Stop
from aiodist.ps.rows.shard import TableShard
from aiodist.ps.saving import ServerSaving
from aiodist.ps.service import LIGHT_BYTES
from aiodist.ps.shard import Shard, Shards
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
    """Every method runs with the transport lock held.

    The requests of a client are executed in the order of its calls: one whose data are still to come keeps back what is
    behind it. So does a barrier. Every server has the barriers for itself: a worker whose barrier is the next of its
    requests rests on the clocks of the tensors that are led here. So when a worker hears from every server that all are
    there, all that was pushed before is applied.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._shards = Shards()
        self._retired: dict[int, Shard] = {}
        """They were freed, but somebody looks at their memory."""
        self._counted: list[Counts] = []  # of tensors that were freed
        self._lines: dict[int, deque[Request]] = {}
        """Of each client what waits."""
        self._at_barrier: dict[int, Stop] = {}
        self._left: set[int] = set()
        """They come to no barrier any more."""
        self._goodbyes: dict[int, int] = {}
        self._over = False
        self._answers = answers = Answers(context)
        self._directory = Directory(context, answers, self._shards)
        self.saving: ServerSaving
        self._calls: dict[str, Callable[[int, dict[str, Any]], None]] = {
            "make": self._make,
            "remove": self._remove,
            "configure": lambda client, call: self._expect(Change(client, call["n"], call["key"], call["settings"])),
            "barrier": lambda client, call: self._expect(Stop(client, call["n"], -1)),
            "leave": lambda client, call: self._expect(Stop(client, call["n"], -1, leaves=True)),
            "open": self._directory.open,
            "ready": self._directory.ready,
            "free": self._directory.free,
            "bye": self._bye,
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
            key, number = unpack(Release, body)
            if (seen := self._shards.get(key) or self._retired.get(key)) is not None:
                seen.release(client, number)
        else:
            call = json.loads(bytes(body))
            self._calls[call["op"]](client, call)

    def _push(self, client: int, body: memoryview) -> None:
        head = unpack(PushHead, body)
        push = Pushing(client, head.number, head.key, head.base, head.rule, head.alpha, head.coded)
        shard = self._shards.get(head.key)
        dtype = torch.uint8 if head.coded or shard is None else shard.pushed_dtype
        accepts = self.context.policy.accepts and head.rule != FILL
        if head.way == Way.INLINE:
            value = values_in(body, PUSH_BYTES, head.nbytes, dtype)
            # What waits must not keep a frame alive, which has more room than it needs.
            push.value = value.clone() if accepts else value
        elif head.way == Way.MESSAGE:
            push.ready = False
            buffer = self._buffer(shard, push, head.nbytes)
            push.value = buffer.view(dtype)
            self.context.coalescer.receive(buffer, client, head.number, partial(self._received, push))
        elif client in self.context.gone:
            return
        else:
            found = self.context.memory(client, head.segment, head.offset, head.nbytes)
            push.value = found.view(dtype)
            if accepts:  # the client need not keep it until it is applied
                buffer = self._buffer(shard, push, head.nbytes)
                push.value = buffer.view(dtype)
                push.ready = head.nbytes <= LIGHT_BYTES
                if push.ready:
                    buffer.copy_(found)
                else:
                    self.context.service.run(partial(buffer.copy_, found), partial(self._received, push))
        self._expect(push)

    def _buffer(self, shard: Shard | None, push: Pushing, nbytes: int) -> Tensor:
        """Return memory for the data of `push`; those of a table have another size each time."""
        pool = self.context.pool
        push.buffer = pool.take_room(nbytes) if isinstance(shard, TableShard) else pool.take(nbytes)
        return push.buffer[:nbytes]

    def _pull(self, client: int, body: memoryview) -> None:
        head = unpack(PullHead, body)
        pull = Pulling(client, head.number, head.key, head.wants, Reads(head.reads))
        if isinstance(self._shards.get(head.key), TableShard):
            ids = unpack(IdsHead, body, PULL_BYTES)
            if ids.way == Way.MEMORY:
                if client in self.context.gone:
                    return
                pull.rows = self.context.memory(client, ids.segment, ids.offset, ids.nbytes)
            elif ids.way == Way.MESSAGE:
                pull.rows = torch.empty(ids.nbytes, dtype=torch.uint8)
                pull.ready = False
                self.context.coalescer.receive(pull.rows, client, head.number, partial(self._received, pull))
            else:  # what waits must not keep a frame alive
                came = memoryview(bytearray(body[PULL_BYTES + IDS_BYTES :]))
                pull.rows = bytes_in(came, 0, ids.nbytes)
        self._expect(pull)

    def _received(self, request: Pushing | Pulling, error: BaseException | None) -> None:
        """The data of a request have come, or never will."""
        request.ready = True
        if error is not None and request.client not in self.context.gone:
            self._lines[request.client].remove(request)
            self._answers.refuse(request, error)
        self._go_on(request.client)
        self.context.coalescer.flush()

    def _expect(self, request: Request) -> None:
        """Execute a request, behind what its client has asked for before."""
        line = self._lines.setdefault(request.client, deque())
        if not line and request.ready and not isinstance(request, Stop):
            self._execute(request)
        else:
            line.append(request)
            self._go_on(request.client)

    def _go_on(self, client: int) -> None:
        line = self._lines.get(client, ())
        while line:
            first = line[0]
            if isinstance(first, Stop) and not first.reached:
                first.reached = True
                self._reached(first)
                continue  # it may have let the line go on
            if not first.ready:
                return
            line.popleft()
            if not isinstance(first, Stop):
                self._execute(first)

    def _execute(self, request: Request) -> None:
        shard = self._shards.get(request.key)
        if shard is None:
            self._answers.refuse(request, Freed(f"key {request.key} was freed"))
        elif isinstance(request, Pushing) and request.rule == FILL:
            shard.fill(request)
        else:
            shard.deliver(request)

    # --- barriers, and who leaves ------------------------------------------------------------------------------

    def _reached(self, stop: Stop) -> None:
        """A worker waits for the others, or a rank sends nothing more: nobody waits for it."""
        if stop.leaves:
            self._answers.answer(stop.client, stop.number)
            self._leave(stop.client)
            return
        self._at_barrier[stop.client] = stop
        for shard in self._shards.led():
            shard.rest(stop.client)
        self._check_barrier()

    def _check_barrier(self) -> None:
        """Let go those who wait for nobody any more; if the first server died all do, since they are told so."""
        lost = self.context.servers[0] in self.context.gone
        if not self._at_barrier or not (lost or self._at_barrier.keys() | self._left >= set(self.context.workers)):
            return
        stops, self._at_barrier = self._at_barrier, {}
        for shard in self._shards.led():
            shard.resume(stops)
        for client, stop in stops.items():
            stop.ready = True
            self._answers.answer(client, stop.number)
        for client in stops:
            self._go_on(client)

    def _leave(self, client: int) -> None:
        self._left.add(client)
        self._answers.forget(client)
        for shard in self._shards.values():
            shard.leave(client, gone=client in self.context.gone)
        self._directory.leave(client)
        self._check_barrier()

    def lose(self, rank: int) -> None:
        """`rank` died."""
        self._lines.pop(rank, None)
        self._at_barrier.pop(rank, None)
        for shard in list(self._retired.values()):
            shard.leave(rank, gone=True)
        self._leave(rank)
        self._check_over()
        self.saving.check()
        self.context.coalescer.flush()

    def _bye(self, client: int, call: dict[str, Any]) -> None:
        """A rank waits for the end: nothing it asked for is open."""
        self._goodbyes[client] = call["n"]
        self._check_over()

    def _check_over(self) -> None:
        missing = set(range(len(self.context.world_ranks))) - set(self.context.gone) - set(self._goodbyes)
        if missing or self._over or not self._goodbyes:
            return
        self._over = True
        for client, number in self._goodbyes.items():
            self._answers.answer(client, number)
            if client != self.context.rank:
                self.context.coalescer.say_last(client)

    # --- shards --------------------------------------------------------------------------------------------------

    def _make(self, client: int, call: dict[str, Any]) -> None:
        """Make a shard; its first values come behind."""
        kind = Shard if call["table"] is None else TableShard
        shard = self._shards[call["key"]] = kind(self.context, self._answers, self.saving.at, call)
        for rank in self._left | set(self.context.gone):
            shard.leave(rank, gone=rank in self.context.gone)
        for rank in self._at_barrier:
            shard.rest(rank)
        self._answers.answer(client, call["n"])

    def _remove(self, client: int, call: dict[str, Any]) -> None:
        shard = self._shards.pop(call["key"], None)
        if shard is None:
            return
        for rank in range(len(self.context.world_ranks)):
            self._answers.forget(rank, shard.key)
        shard.refuse(Freed(f"{shard.name!r} was freed"))
        if shard.machine is not None:
            self._counted.append(shard.machine.counts)
        if shard.looked_at:
            self._retired[shard.key] = shard
            shard.unseen = partial(self._retired.pop, shard.key, None)
        self.saving.check()

    def by_name(self) -> dict[str, Shard]:
        """Return all shards."""
        return {shard.name: shard for shard in self._shards.values()}

    def led(self) -> list[Shard]:
        """Return the shards that lead."""
        return self._shards.led()

    def statistics(self) -> ParameterServerStatistics:
        """Return what is counted, with what the machines have counted."""
        shards = list(self._shards.values())
        counts = [*self._counted, *(shard.machine.counts for shard in shards if shard.machine is not None)]
        return ParameterServerStatistics(
            **self.context.counts,
            dropped=sum(count.dropped for count in counts),
            scaled=sum(count.scaled for count in counts),
            incomplete=sum(count.incomplete for count in counts),
            # A copy of each at once: they count on meanwhile.
            staleness=sum((Counter(dict(count.staleness)) for count in counts), Counter()),
            sent_bytes=self.context.coalescer.sent_bytes,
            rows=sum(len(shard.store) for shard in shards if isinstance(shard, TableShard)),
        )
