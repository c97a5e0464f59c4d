"""Which names a server leads, who gives them their first values, and who has freed them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from aiodist.errors import AiodistError, MismatchError
from aiodist.ps.wire import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiodist.ps.answers import Answers
    from aiodist.ps.context import Context
    from aiodist.ps.shards import Shards

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
    refused: set[int] = field(default_factory=set)
    """Those who meant something else by the name: nobody waits for them."""
    freed: set[int] = field(default_factory=set)
    again: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Those who have freed it and open it again, before all have freed it."""
    sides: str = ""
    """What was refused last, if anything: both sides."""

    def askers(self) -> list[tuple[int, int]]:
        """Return those who wait for an answer, and their questions."""
        return [*self.done.items(), *((client, call["n"]) for client, call in self.waiting)]


@dataclass(eq=False)
class _Failure:
    """A name that never got first values. A client that has not heard of it is told; one that has may try again."""

    error: AiodistError
    told: set[int]


class Directory:
    """Every method runs with the transport lock held."""

    def __init__(self, context: Context, answers: Answers, shards: Shards, stops: Callable[[int], bool]) -> None:
        """`stops(client)` says whether a client waits at a barrier."""
        self._context = context
        self._answers = answers
        self._shards = shards
        self._stops = stops
        self._entries: dict[str, _Entry] = {}
        self._failures: dict[str, _Failure] = {}
        self._keys = count(context.rank << _KEY_BITS)
        self._parted: set[int] = set()
        self._left: set[int] = set()

    def open(self, client: int, call: dict[str, Any]) -> None:
        """A client wants to use a name: it is told to fill it, or waits until others have."""
        entry = self._entries.get(call["name"])
        lost = next((rank for rank in call["servers"] if rank in self._context.gone), None)
        if lost is not None and (entry is None or not entry.filled):  # it never gets first values
            self._answers.fail(client, call["n"], self._context.lost(lost))
            return
        if self._fails_too(client, call, entry):
            return
        if entry is None:
            entry = self._entries[call["name"]] = _Entry(next(self._keys), call, client)
        if client in entry.freed:
            entry.again.append((client, call))
            return
        different = [what for what in _COMPARED if call[what] != entry.first[what]]
        if different:
            sides = "; ".join(
                f"rank {rank}: {', '.join(f'{what} {side[what]}' for what in different)}"
                for rank, side in ((entry.opener, entry.first), (client, call))
            )
            self._answers.fail(client, call["n"], MismatchError(f"init of {call['name']!r}: {sides}"))
            entry.refused.add(client)
            entry.sides = sides
            if (shard := self._shards.get(entry.key)) is not None:
                shard.rest(client)
            self._choose(entry)
            self._sweep(entry)
            return
        if client in entry.refused:
            entry.refused.discard(client)
            if (shard := self._shards.get(entry.key)) is not None and not self._stops(client):
                shard.resume((client,))
        if entry.filled:
            self._answers.answer(client, call["n"], key=entry.key, fill=False)
            return
        entry.waiting.append((client, call))
        self._choose(entry)

    def _fails_too(self, client: int, call: dict[str, Any], entry: _Entry | None) -> bool:
        """Tell a client that comes late of what failed before it came, unless the name has values by now."""
        failure = self._failures.get(call["name"])
        if failure is None or client in failure.told or (entry is not None and entry.filled):
            return False
        failure.told.add(client)
        self._answers.fail(client, call["n"], failure.error)
        if len(failure.told) == len(self._context.world_ranks):
            del self._failures[call["name"]]
        return True

    def refused(self, name: str) -> set[int]:
        """Return who means something else by the name."""
        entry = self._entries.get(name)
        return set() if entry is None else entry.refused

    def _choose(self, entry: _Entry) -> None:
        """Have those fill the entry who should: each server its own block, the first worker, or the first to come."""
        start = entry.first["start"]
        for client, call in list(entry.waiting):
            if call["again"]:  # what comes from elsewhere
                chosen = not entry.fillers
            elif start == "own":
                chosen = client in entry.first["servers"]
            elif start == "root":
                chosen = client == min(self._coming(entry), default=-1) and not entry.fillers
            else:
                chosen = call["worker"] and not entry.fillers
            if chosen:
                entry.fillers.add(client)
                entry.waiting.remove((client, call))
                self._answers.answer(client, call["n"], key=entry.key, fill=True)
        self._check_hope(entry)

    def _coming(self, entry: _Entry) -> set[int]:
        """Return the workers that may give it first values."""
        return self._present() - self._parted - entry.refused

    def _check_hope(self, entry: _Entry) -> None:
        """Refuse those who wait for first values that nobody will give any more."""
        if entry.filled:
            return
        if entry.first["start"] == "own":
            waited_for = set(entry.first["servers"]) - entry.fillers
            missing = sorted(waited_for & (self._parted | entry.refused))
            hopeless = bool(missing)
        else:
            missing = list(self._context.workers)
            hopeless = not entry.fillers and not self._coming(entry)
        if not hopeless:
            return
        name = entry.first["name"]
        text = f"init of {name!r} with start={entry.first['start']!r}: nobody will give its first values: expected "
        which = "each" if entry.first["start"] == "own" else "one"
        sides = f"; refused: {entry.sides}" if entry.sides else ""
        self._fail(entry, MismatchError(f"{text}{which} of ranks {missing} to init it{sides}"))

    def _fail(self, entry: _Entry, error: AiodistError) -> None:
        for client, number in entry.askers():
            self._answers.fail(client, number, error)
        told = {client for client, _ in entry.askers()} | entry.refused
        self._failures[entry.first["name"]] = _Failure(error, told)
        self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.first["name"]]
        call = f'{{"op": "remove", "key": {entry.key}}}'.encode()
        for rank in entry.first["servers"]:
            if rank not in self._context.gone:
                self._context.coalescer.put(rank, Kind.CALL, call)

    def _present(self) -> set[int]:
        return set(self._context.workers) - self._left - set(self._context.gone)

    def ready(self, client: int, call: dict[str, Any]) -> None:
        """A filler has filled what it should."""
        entry = self._entries.get(call["name"])
        if entry is None or entry.key != call["key"]:
            failure = self._failures.get(call["name"])
            error: AiodistError = MismatchError(f"init of {call['name']!r}: others left without it")
            if failure is not None:
                failure.told.add(client)
                error = failure.error
            self._answers.fail(client, call["n"], error)
            return
        entry.done[client] = call["n"]
        entry.filled = (
            entry.first["start"] != "own" or entry.first["again"] or set(entry.done) == set(entry.first["servers"])
        )
        if entry.filled:
            self._failures.pop(call["name"], None)
            for asker, number in entry.askers():
                self._answers.answer(asker, number, key=entry.key, fill=False)
            entry.waiting.clear()

    def free(self, client: int, call: dict[str, Any]) -> None:
        """A client uses the name no more; it is gone when that is true of all workers."""
        entry = self._entries.get(call["name"])
        if entry is not None and entry.key == call["key"]:
            entry.freed.add(client)
            if (shard := self._shards.get(entry.key)) is not None:
                shard.leave(client, gone=False)  # steps go on without it
            self._sweep(entry)
        self._answers.answer(client, call["n"])

    def _sweep(self, entry: _Entry) -> None:
        """Forget the name when all workers have freed it."""
        known = self._entries.get(entry.first["name"]) is entry
        if known and entry.freed and self._present() <= entry.freed | entry.refused:
            self._forget(entry)
            for client, again in entry.again:
                self.open(client, again)

    def part(self, client: int) -> None:
        """A client opens nothing more: others may have to fill what it should."""
        self._parted.add(client)
        for entry in list(self._entries.values()):
            self._choose(entry)

    def leave(self, client: int) -> None:
        """A client has finished, or died: others may have to fill what it should, and it frees what it used."""
        self._parted.add(client)
        self._left.add(client)
        for entry in list(self._entries.values()):
            entry.waiting = [waiting for waiting in entry.waiting if waiting[0] != client]
            entry.again = [again for again in entry.again if again[0] != client]
            if client in self._context.gone and client in entry.first["servers"] and not entry.filled:
                self._fail(entry, self._context.lost(client))
                continue
            if client in entry.fillers and not entry.filled:
                entry.fillers.discard(client)
            self._choose(entry)
            self._sweep(entry)
