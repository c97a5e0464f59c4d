"""The server of one rank: shards by key, the lines of requests, barriers, and the end."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aiodist.ps import wire
from aiodist.ps.answers import Answers, Change, Freed, Pulling, Pushing, Request, Stop
from aiodist.ps.client import Client
from aiodist.ps.coalescer import Handler
from aiodist.ps.context import Context
from aiodist.ps.directory import Directory
from aiodist.ps.machines import Counts
from aiodist.ps.saving import ServerSaving
from aiodist.ps.service import LIGHT_BYTES
from aiodist.ps.shard import Shard, Shards
from aiodist.ps.statistics import ParameterServerStatistics
from aiodist.ps.table_shard import TableShard
from aiodist.ps.wire import FILL, Kind, Order, Reads, Way, bytes_in, values_in

_Call = dict[str, Any]
_INLINE = int(Way.INLINE)


class Server:
    """The server of one rank (transport lock held).

    The requests of a client are executed in the order of its calls: a request whose data have not arrived delays the
    later ones, and so does a barrier. Each server has all barriers. A worker whose next request is a barrier rests on
    the clocks of the tensors that this server leads. So when every server has reported that all workers are there, all
    earlier pushes are applied.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.shards = Shards()
        self._retired: dict[int, Shard] = {}
        """Freed shards whose memory has readers."""
        self._counted: list[Counts] = []
        """Counts of freed tensors."""
        self._lines: dict[int, deque[Request]] = {}
        """Waiting requests, by client."""
        self._at_barrier: dict[int, Stop] = {}
        """Barriers that wait for other workers, by client."""
        self._met: dict[int, Stop] = {}
        """Barriers that wait until all earlier pushes are applied, by client."""
        self._goodbyes: dict[int, int] = {}
        """Numbers of the last calls of ranks that wait for the end."""
        self._over = False
        self._answers = answers = Answers(context)
        answers.applied = self._end_barrier
        self._directory = Directory(context, answers, self.shards)
        self.saving: ServerSaving
        self._calls: dict[str, Callable[[int, _Call], object]] = {
            "make": self._make,
            "remove": self._remove,
            "configure": lambda client, call: self._advance(
                client, Change(client, call["n"], call["key"], call["settings"])
            ),
            "barrier": lambda client, call: self._advance(client, Stop(client, call["n"], -1)),
            "leave": lambda client, call: self._advance(client, Stop(client, call["n"], -1, leaves=True)),
            "open": self._directory.open,
            "ready": self._directory.ready,
            "free": self._directory.free,
            "bye": self._bye,
            "ping": self._ping,
        }
        self.handlers: dict[int, Handler] = {
            Kind.CALL: self._call,
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.ORDER: self._order,
            Kind.RELEASE: self._release,
        }
        """Functions that handle the entries from clients and leaders, by kind."""

    def open(self, client: Client) -> None:
        """Take the calls of checkpoints too."""
        self.saving = ServerSaving(self.context, self._answers, self.shards, client)
        self._calls |= self.saving.calls

    # --- entries -------------------------------------------------------------------------------------------------

    def _call(self, client: int, body: memoryview) -> None:
        call = json.loads(bytes(body))
        self._calls[call["op"]](client, call)

    def _order(self, leader: int, body: memoryview) -> None:
        order = Order.unpack(body)
        if (shard := self.shards.get(order.key)) is not None:
            shard.obey(order)

    def _release(self, client: int, body: memoryview) -> None:
        key, number = wire.RELEASE.unpack_from(body)
        if (read := self.shards.get(key) or self._retired.get(key)) is not None:
            read.release(client, number)

    def _push(self, client: int, body: memoryview) -> None:
        key, rule, way, coded, number, base, alpha, nbytes, segment, offset = wire.PUSH.unpack_from(body)
        push = Pushing(client, number, key, base, rule, alpha, coded)
        shard = self.shards.get(key)
        dtype = torch.uint8 if coded or shard is None else shard.pushed_dtype
        accepts = self.context.policy.accepts and rule != FILL
        if way == _INLINE:
            value = values_in(body, wire.PUSH.size, nbytes, dtype)
            # A waiting push must not keep its frame, which is larger than the value.
            push.value = value.clone() if accepts else value
        elif way == Way.MESSAGE:
            push.ready = False
            buffer = self._buffer(shard, push, nbytes)
            push.value = buffer.view(dtype)
            self.context.coalescer.receive(buffer, client, number, partial(self._received, push))
        elif client in self.context.gone:
            return
        else:
            found = self.context.shared.find(client, segment, offset, nbytes)
            push.value = found.view(dtype)
            if accepts:  # the client does not keep the value until the push is applied
                buffer = self._buffer(shard, push, nbytes)
                push.value = buffer.view(dtype)
                push.ready = nbytes <= LIGHT_BYTES
                if push.ready:
                    buffer.copy_(found)
                else:
                    self.context.service.run(partial(buffer.copy_, found), partial(self._received, push))
        self._advance(client, push)

    def _buffer(self, shard: Shard | None, push: Pushing, nbytes: int) -> Tensor:
        """Return memory for the data of `push`. Pushes of a table have various sizes."""
        pool = self.context.pool
        push.buffer = pool.take_room(nbytes) if isinstance(shard, TableShard) else pool.take(nbytes)
        return push.buffer[:nbytes]

    def _pull(self, client: int, body: memoryview) -> None:
        head = wire.PullHead(*wire.PULL.unpack_from(body))
        pull = Pulling(client, head.number, head.key, head.wants, Reads(head.reads))
        if len(body) > wire.PULL.size:  # of a table, perhaps a freed one
            ids = wire.IdsHead(*wire.IDS.unpack_from(body, wire.PULL.size))
            if ids.way == Way.MEMORY:
                if client in self.context.gone:
                    return
                pull.rows = self.context.shared.find(client, ids.segment, ids.offset, ids.nbytes)
            elif ids.way == Way.MESSAGE:
                pull.rows = torch.empty(ids.nbytes, dtype=torch.uint8, device="cpu")
                pull.ready = False
                self.context.coalescer.receive(pull.rows, client, head.number, partial(self._received, pull))
            else:  # a waiting pull must not keep its frame
                came = memoryview(bytearray(body[wire.PULL.size + wire.IDS.size :]))
                pull.rows = bytes_in(came, 0, ids.nbytes)
        self._advance(client, pull)

    def _received(self, request: Pushing | Pulling, error: BaseException | None) -> None:
        """The data of a request have arrived, or never will."""
        request.ready = True
        if error is not None and request.client not in self.context.gone:
            self._lines[request.client].remove(request)
            self._answers.refuse(request, error)
        self._advance(request.client)
        self.context.coalescer.flush()

    # --- the lines -----------------------------------------------------------------------------------------------

    def _advance(self, client: int, request: Request | None = None) -> None:
        """Execute the waiting requests of a client in order, and then `request`, up to one that must wait."""
        line = self._lines.setdefault(client, deque())
        if request is not None:
            if not line and request.ready and not isinstance(request, Stop):
                self._execute(request)
                return
            line.append(request)
        while line:
            first = line[0]
            if isinstance(first, Stop) and not first.reached:
                first.reached = True
                self._reached(first)
                continue  # the line may be shorter now
            if not first.ready:
                return
            line.popleft()
            if not isinstance(first, Stop):
                self._execute(first)

    def _execute(self, request: Request) -> None:
        shard = self.shards.get(request.key)
        if shard is None:
            self._answers.refuse(request, Freed(f"key {request.key} was freed"))
        elif isinstance(request, Pushing) and request.rule == FILL:
            shard.fill(request)
        else:
            shard.deliver(request)

    # --- barriers, and ranks that leave ----------------------------------------------------------------------------

    def _reached(self, stop: Stop) -> None:
        """A worker comes to a barrier, or a rank leaves."""
        if stop.leaves:
            self._answers.answer(stop.client, stop.number)
            self._leave(stop.client)
            return
        self._at_barrier[stop.client] = stop
        for shard in self.shards.values():
            shard.rest(stop.client)
        self._check_barrier()

    def _check_barrier(self) -> None:
        """Release the barrier once all workers that are left have arrived, or if the first server is lost."""
        lost = self.context.servers[0] in self.context.gone
        arrived = self._at_barrier.keys() | self._directory.left >= set(self.context.workers)
        if not self._at_barrier or not (lost or arrived):
            return
        for leader in self.shards.led().values():
            leader.machine.resume(self._at_barrier)
        self._met, self._at_barrier = self._met | self._at_barrier, {}
        self._end_barrier()

    def _end_barrier(self) -> None:
        """End a released barrier when all earlier pushes of its workers are applied, or have failed."""
        if not self._met:
            return
        lost = self.context.servers[0] in self.context.gone
        if not lost and any(shard.owes(self._met) for shard in self.shards.values()):
            return
        stops, self._met = self._met, {}
        for client, stop in stops.items():
            stop.ready = True
            self._answers.answer(client, stop.number)
        for client in stops:
            self._advance(client)

    def _leave(self, client: int) -> None:
        self._answers.forget(client)
        for shard in self.shards.values():
            shard.leave(client, gone=client in self.context.gone)
        self._directory.leave(client)
        self._check_barrier()

    def lose(self, rank: int) -> None:
        """Drop the waiting requests of a lost rank, and continue without it."""
        self._lines.pop(rank, None)
        self._at_barrier.pop(rank, None)
        self._met.pop(rank, None)
        for shard in list(self._retired.values()):
            shard.leave(rank, gone=True)
        self._leave(rank)
        self._check_over()
        self.saving.check()
        self.context.coalescer.flush()

    def _bye(self, client: int, call: _Call) -> None:
        """A rank without open requests waits for the end."""
        self._goodbyes[client] = call["n"]
        self._check_over()

    def _ping(self, client: int, call: _Call) -> None:
        """Answer a rank after the arrival of its data."""
        coalescer = self.context.coalescer

        def arrived(_: object) -> None:
            self._answers.answer(client, call["n"], sent=coalescer.ended_sends(client))
            coalescer.flush()

        coalescer.when_received(client, call["sent"], arrived)

    def late(self) -> dict[int, str]:
        """Return the servers whose orders requests and saves wait for here, each with a tensor (any thread)."""
        late = self.saving.late()
        for shard in list(self.shards.values()):
            late |= shard.late()
        return late

    def waits(self) -> list[tuple[str, object, set[int]]]:
        """Return what requests of clients wait for here, with a key of the wait and the late workers (any thread)."""
        waits: list[tuple[str, object, set[int]]] = []
        for shard, leader in self.shards.led().items():
            late = leader.machine.late(accepts=self.context.policy.accepts)
            waits.append((f"a step of {shard.name!r}", (shard.key, leader.machine.version), late))
        if at := self._at_barrier.copy():
            first = next(iter(at.values()))
            late = set(self.context.workers) - at.keys() - self._directory.left
            waits.append(("the barrier", (first.client, first.number, "barrier"), late))
        return [wait for wait in waits if wait[2]]

    def _check_over(self) -> None:
        """Release all ranks, with the last entry, once all wait for the end."""
        missing = set(range(self.context.size)) - set(self.context.gone) - set(self._goodbyes)
        if missing or self._over or not self._goodbyes:
            return
        self._over = True
        for client, number in self._goodbyes.items():
            self._answers.answer(client, number)
            if client != self.context.rank:
                self.context.coalescer.put_last(client)

    # --- shards --------------------------------------------------------------------------------------------------

    def _make(self, client: int, call: _Call) -> None:
        kind = Shard if call["table"] is None else TableShard
        shard = self.shards[call["key"]] = kind(self.context, self._answers, self.saving.at, call)
        for rank in self._directory.left | set(self.context.gone):
            shard.leave(rank, gone=rank in self.context.gone)
        for rank in self._at_barrier:
            shard.rest(rank)
        self._answers.answer(client, call["n"])

    def _remove(self, client: int, call: _Call) -> None:
        shard = self.shards.pop(call["key"], None)
        if shard is None:
            return
        for rank in range(self.context.size):
            self._answers.forget(rank, shard.key)
        shard.refuse(Freed(f"{shard.name!r} was freed"))
        if shard.leader is not None:
            self._counted.append(shard.leader.machine.counts)
        if shard.readers:
            self._retired[shard.key] = shard
            shard.unseen = partial(self._retired.pop, shard.key, None)
        self.saving.check()

    def statistics(self) -> ParameterServerStatistics:
        """Return the counts of this rank (any thread)."""
        tables = [shard for shard in list(self.shards.values()) if isinstance(shard, TableShard)]
        counts = [*self._counted, *(leader.machine.counts for leader in self.shards.led().values())]
        return ParameterServerStatistics(
            **self.context.counts,
            dropped=sum(count.dropped for count in counts),
            scaled=sum(count.scaled for count in counts),
            incomplete=sum(count.incomplete for count in counts),
            # A copy of each dict is atomic, and other threads count meanwhile.
            staleness=sum((Counter(dict(count.staleness)) for count in counts), Counter()),
            sent_bytes=self.context.coalescer.sent_bytes,
            rows=sum(len(shard.store) for shard in tables),
        )
