"""The server of one rank: names that it leads, shards by key, requests on their way to them, barriers, and the end."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from aiodist.control import disagreement
from aiodist.errors import AiodistError, MismatchError
from aiodist.ps import wire
from aiodist.ps.answers import Answers, Change, Freed, Pulling, Pushing, Request, Stop
from aiodist.ps.client import Client
from aiodist.ps.coalescer import Handler
from aiodist.ps.context import Context
from aiodist.ps.machines import Counts
from aiodist.ps.saving import ServerSaving
from aiodist.ps.service import LIGHT_BYTES
from aiodist.ps.shard import Shard, Shards
from aiodist.ps.statistics import ParameterServerStatistics
from aiodist.ps.table_shard import TableShard
from aiodist.ps.wire import FILL, Kind, Order, Reads, Way, bytes_in, unpack, values_in

_KEY_BITS = 40  # of the keys that one server gives out, no two of which are the same
_COMPARED = ("dtype", "shape", "rule", "start", "servers", "codec", "table")


@dataclass(eq=False)
class _Entry:
    """One name. A client that opens it waits until its values are there; those who give them are the fillers."""

    key: int
    first: dict[str, Any]
    opener: int
    fillers: set[int] = field(default_factory=set)
    waiting: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    done: dict[int, int] = field(default_factory=dict)
    """The fillers that have filled what they should, and their questions."""
    filled: bool = False
    freed: set[int] = field(default_factory=set)
    refused: dict[int, AiodistError] = field(default_factory=dict)
    """Those who meant something else by a name that has values, and what they were told."""
    again: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Those who have freed it and open it again, before all have freed it."""
    error: AiodistError | None = None
    """Why it never gets first values: all who open it are told."""

    @property
    def alone(self) -> bool:
        """One filler gives all of its values."""
        return bool(self.first["start"] != "own" or self.first["again"])


class Directory:
    """Every method runs with the transport lock held."""

    def __init__(self, context: Context, answers: Answers, shards: Shards) -> None:
        self._context = context
        self._answers = answers
        self._shards = shards
        self._entries: dict[str, _Entry] = {}
        self._keys = count(context.rank << _KEY_BITS)
        self.left: set[int] = set()
        """They open nothing more, and come to no barrier."""

    def open(self, client: int, call: dict[str, Any]) -> None:
        entry = self._entries.get(call["name"])
        if entry is None:
            entry = self._entries[call["name"]] = _Entry(next(self._keys), call, client)
        if client in entry.freed:
            entry.again.append((client, call))
            return
        if client in entry.refused:
            self._answers.fail(client, call["n"], entry.refused[client])
            return
        different = [what for what in _COMPARED if call[what] != entry.first[what]]
        if different and entry.error is None:
            texts = {
                rank: ", ".join(f"{what} {side[what]}" for what in different)
                for rank, side in ((entry.opener, entry.first), (client, call))
            }
            error = MismatchError(disagreement(f"the init of {call['name']!r}", texts))
            if entry.filled:
                entry.refused[client] = error
                self._answers.fail(client, call["n"], error)
                self._shards[entry.key].leave(client, gone=False)  # nobody waits for its pushes
                self._sweep(entry)
                return
            entry.error = error
            self._remove(entry)
        entry.waiting.append((client, call))
        self._go_on(entry)

    def _go_on(self, entry: _Entry) -> None:
        """Answer those who wait, as far as it is known what they should do."""
        if entry.error is None and not entry.filled:
            for client, call in list(entry.waiting):
                # `again`: what comes from elsewhere
                if (call["again"] or client in self._candidates(entry)) and not (entry.alone and entry.fillers):
                    entry.fillers.add(client)
                    entry.waiting.remove((client, call))
                    self._answers.answer(client, call["n"], key=entry.key, fill=True)
            entry.error = self._hopeless(entry)
            if entry.error is not None:
                self._remove(entry)
        if entry.error is None and not entry.filled:
            return
        for client, number in [*entry.done.items(), *((client, call["n"]) for client, call in entry.waiting)]:
            if entry.error is not None:
                self._answers.fail(client, number, entry.error)
            else:
                self._answers.answer(client, number, key=entry.key, fill=False)
        entry.waiting.clear()
        entry.done.clear()

    def _candidates(self, entry: _Entry) -> Sequence[int]:
        """Return who may give it first values: each server its own block, the first worker, or the first to come."""
        if entry.first["start"] == "own":
            candidates: Sequence[int] = entry.first["servers"]
            return candidates
        return self._context.workers[:1] if entry.first["start"] == "root" else self._context.workers

    def _hopeless(self, entry: _Entry) -> AiodistError | None:
        """Return why nobody will give it first values any more, if so."""
        for rank in (*entry.first["servers"], *entry.fillers - entry.done.keys()):
            if rank in self._context.gone:
                return self._context.lost(rank)
        start, candidates = entry.first["start"], self._candidates(entry)
        missing = [rank for rank in candidates if rank in self.left and rank not in entry.fillers]
        if entry.first["again"] or not missing or (start == "first" and len(missing) < len(candidates)):
            return None
        which = "one" if start == "first" else "each"
        text = f"init of {entry.first['name']!r} with start={start!r}: nobody will give its first values"
        return MismatchError(f"{text}: expected {which} of ranks {list(candidates)} to init it")

    def _remove(self, entry: _Entry) -> None:
        for rank in entry.first["servers"]:
            self._answers.tell(rank, "remove", key=entry.key)

    def ready(self, client: int, call: dict[str, Any]) -> None:
        entry = self._entries[call["name"]]
        entry.done[client] = call["n"]
        entry.filled = entry.error is None and (entry.alone or set(entry.first["servers"]) <= set(entry.done))
        if entry.error is not None:
            self._remove(entry)  # what it has made since
        self._go_on(entry)

    def free(self, client: int, call: dict[str, Any]) -> None:
        entry = self._entries.get(call["name"])
        if entry is not None and entry.key == call["key"]:
            entry.freed.add(client)
            self._shards[entry.key].leave(client, gone=False)  # steps go on without it
            self._sweep(entry)
        self._answers.answer(client, call["n"])

    def _sweep(self, entry: _Entry) -> None:
        if entry.freed and entry.freed | self.left | entry.refused.keys() >= set(self._context.workers):
            del self._entries[entry.first["name"]]
            self._remove(entry)
            for client, again in entry.again:
                self.open(client, again)

    def leave(self, client: int) -> None:
        self.left.add(client)
        for entry in list(self._entries.values()):
            if client in self._context.gone:
                entry.waiting = [waiting for waiting in entry.waiting if waiting[0] != client]
                entry.again = [again for again in entry.again if again[0] != client]
            if not entry.filled and entry.error is None:
                self._go_on(entry)
            self._sweep(entry)


class Server:
    """Every method runs with the transport lock held.

    The requests of a client are executed in the order of its calls: one whose data are still to come keeps back what is
    behind it. So does a barrier. Every server has the barriers for itself: a worker whose barrier is the next of its
    requests rests on the clocks of the tensors that are led here. So when a worker hears from every server that all are
    there, all that was pushed before is applied.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.shards = Shards()
        self._retired: dict[int, Shard] = {}
        """They were freed, but somebody looks at their memory."""
        self._counted: list[Counts] = []  # of tensors that were freed
        self._lines: dict[int, deque[Request]] = {}
        """Of each client what waits."""
        self._at_barrier: dict[int, Stop] = {}
        self._met: dict[int, Stop] = {}
        """All workers are there; what they pushed before is still being applied."""
        self._goodbyes: dict[int, int] = {}
        self._over = False
        self._answers = answers = Answers(context)
        answers.applied = self._end_barrier
        self._directory = Directory(context, answers, self.shards)
        self.saving: ServerSaving
        self._calls: dict[str, Callable[[int, dict[str, Any]], object]] = {
            "make": self._make,
            "remove": self._remove,
            "configure": lambda client, call: self._expect(Change(client, call["n"], call["key"], call["settings"])),
            "barrier": lambda client, call: self._expect(Stop(client, call["n"], -1)),
            "leave": lambda client, call: self._expect(Stop(client, call["n"], -1, leaves=True)),
            "open": self._directory.open,
            "ready": self._directory.ready,
            "free": self._directory.free,
            "bye": self._bye,
            "ping": lambda client, call: self._answers.answer(client, call["n"]),
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
        self.saving = ServerSaving(self.context, self._answers, self.shards, client)
        self._calls |= self.saving.calls

    # --- what comes ----------------------------------------------------------------------------------------

    def _call(self, client: int, body: memoryview) -> None:
        call = json.loads(bytes(body))
        self._calls[call["op"]](client, call)

    def _order(self, leader: int, body: memoryview) -> None:
        order = Order.unpack(body)
        if (shard := self.shards.get(order.key)) is not None:
            shard.obey(order)

    def _release(self, client: int, body: memoryview) -> None:
        key, number = wire.unpack_release(body)
        if (seen := self.shards.get(key) or self._retired.get(key)) is not None:
            seen.release(client, number)

    def _push(self, client: int, body: memoryview) -> None:
        head = unpack(wire.PushHead, body)
        push = Pushing(client, head.number, head.key, head.base, head.rule, head.alpha, head.coded)
        shard = self.shards.get(head.key)
        dtype = torch.uint8 if head.coded or shard is None else shard.pushed_dtype
        accepts = self.context.policy.accepts and head.rule != FILL
        if head.way == Way.INLINE:
            value = values_in(body, wire.PUSH_BYTES, head.nbytes, dtype)
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
            found = self.context.shared.find(client, head.segment, head.offset, head.nbytes)
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
        head = unpack(wire.PullHead, body)
        pull = Pulling(client, head.number, head.key, head.wants, Reads(head.reads))
        if isinstance(self.shards.get(head.key), TableShard):
            ids = unpack(wire.IdsHead, body, wire.PULL_BYTES)
            if ids.way == Way.MEMORY:
                if client in self.context.gone:
                    return
                pull.rows = self.context.shared.find(client, ids.segment, ids.offset, ids.nbytes)
            elif ids.way == Way.MESSAGE:
                pull.rows = torch.empty(ids.nbytes, dtype=torch.uint8, device="cpu")
                pull.ready = False
                self.context.coalescer.receive(pull.rows, client, head.number, partial(self._received, pull))
            else:  # what waits must not keep a frame alive
                came = memoryview(bytearray(body[wire.PULL_BYTES + wire.IDS_BYTES :]))
                pull.rows = bytes_in(came, 0, ids.nbytes)
        self._expect(pull)

    def _received(self, request: Pushing | Pulling, error: BaseException | None) -> None:
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
        shard = self.shards.get(request.key)
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
        for shard in self.shards.values():
            shard.rest(stop.client)
        self._check_barrier()

    def _check_barrier(self) -> None:
        """Let go those who wait for nobody any more; if the first server died all do, since they are told so."""
        lost = self.context.servers[0] in self.context.gone
        if not self._at_barrier or not (
            lost or self._at_barrier.keys() | self._directory.left >= set(self.context.workers)
        ):
            return
        for leader in self.shards.led().values():
            leader.machine.resume(self._at_barrier)
        self._met, self._at_barrier = self._met | self._at_barrier, {}
        self._end_barrier()

    def _end_barrier(self) -> None:
        """Let those go on who have met, when all is applied, or has failed, that they pushed before."""
        lost = self.context.servers[0] in self.context.gone
        if not self._met or not (lost or not any(shard.owes(self._met) for shard in self.shards.values())):
            return
        stops, self._met = self._met, {}
        for client, stop in stops.items():
            stop.ready = True
            self._answers.answer(client, stop.number)
        for client in stops:
            self._go_on(client)

    def _leave(self, client: int) -> None:
        self._answers.forget(client)
        for shard in self.shards.values():
            shard.leave(client, gone=client in self.context.gone)
        self._directory.leave(client)
        self._check_barrier()

    def lose(self, rank: int) -> None:
        self._lines.pop(rank, None)
        self._at_barrier.pop(rank, None)
        self._met.pop(rank, None)
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
        missing = set(range(self.context.size)) - set(self.context.gone) - set(self._goodbyes)
        if missing or self._over or not self._goodbyes:
            return
        self._over = True
        for client, number in self._goodbyes.items():
            self._answers.answer(client, number)
            if client != self.context.rank:
                self.context.coalescer.put_last(client)

    # --- shards --------------------------------------------------------------------------------------------------

    def _make(self, client: int, call: dict[str, Any]) -> None:
        kind = Shard if call["table"] is None else TableShard
        shard = self.shards[call["key"]] = kind(self.context, self._answers, self.saving.at, call)
        for rank in self._directory.left | set(self.context.gone):
            shard.leave(rank, gone=rank in self.context.gone)
        for rank in self._at_barrier:
            shard.rest(rank)
        self._answers.answer(client, call["n"])

    def _remove(self, client: int, call: dict[str, Any]) -> None:
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
        shards = list(self.shards.values())
        counts = [*self._counted, *(leader.machine.counts for leader in self.shards.led().values())]
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
