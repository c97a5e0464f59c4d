"""Which names a server leads, who gives them their first values, and who has freed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from aiodist.errors import AiodistError, MismatchError
from aiodist.ps.answers import Answers
from aiodist.ps.context import Context
from aiodist.ps.shard import Shards

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


class Directory:
    """Every method runs with the transport lock held."""

    def __init__(self, context: Context, answers: Answers, shards: Shards) -> None:
        self._context = context
        self._answers = answers
        self._shards = shards
        self._entries: dict[str, _Entry] = {}
        self._keys = count(context.rank << _KEY_BITS)
        self._left: set[int] = set()

    def open(self, client: int, call: dict[str, Any]) -> None:
        """A client wants to use a name: it is told to fill it, or waits until others have."""
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
            sides = "; ".join(
                f"rank {rank}: {', '.join(f'{what} {side[what]}' for what in different)}"
                for rank, side in ((entry.opener, entry.first), (client, call))
            )
            error = MismatchError(f"init of {call['name']!r}: {sides}")
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
            self._choose(entry)
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

    def _choose(self, entry: _Entry) -> None:
        alone = entry.first["start"] != "own" or entry.first["again"]
        for client, call in list(entry.waiting):
            # `again`: what comes from elsewhere
            if (call["again"] or client in self._candidates(entry)) and not (alone and entry.fillers):
                entry.fillers.add(client)
                entry.waiting.remove((client, call))
                self._answers.answer(client, call["n"], key=entry.key, fill=True)

    def _hopeless(self, entry: _Entry) -> AiodistError | None:
        """Return why nobody will give it first values any more, if so."""
        for rank in (*entry.first["servers"], *entry.fillers - entry.done.keys()):
            if rank in self._context.gone:
                return self._context.lost(rank)
        start, candidates = entry.first["start"], self._candidates(entry)
        missing = [rank for rank in candidates if rank in self._left and rank not in entry.fillers]
        if entry.first["again"] or not missing or (start == "first" and len(missing) < len(candidates)):
            return None
        which = "one" if start == "first" else "each"
        text = f"init of {entry.first['name']!r} with start={start!r}: nobody will give its first values"
        return MismatchError(f"{text}: expected {which} of ranks {list(candidates)} to init it")

    def _remove(self, entry: _Entry) -> None:
        for rank in entry.first["servers"]:
            self._answers.tell(rank, "remove", key=entry.key)

    def ready(self, client: int, call: dict[str, Any]) -> None:
        """A filler has filled what it should."""
        entry = self._entries[call["name"]]
        entry.done[client] = call["n"]
        alone = entry.first["start"] != "own" or entry.first["again"]
        entry.filled = entry.error is None and (alone or set(entry.first["servers"]) <= set(entry.done))
        if entry.error is not None:
            self._remove(entry)  # what it has made since
        self._go_on(entry)

    def free(self, client: int, call: dict[str, Any]) -> None:
        """A client uses the name no more; it is gone when that is true of all workers."""
        entry = self._entries.get(call["name"])
        if entry is not None and entry.key == call["key"]:
            entry.freed.add(client)
            self._shards[entry.key].leave(client, gone=False)  # steps go on without it
            self._sweep(entry)
        self._answers.answer(client, call["n"])

    def _sweep(self, entry: _Entry) -> None:
        """Forget the name when all workers have freed it."""
        if entry.freed and entry.freed | self._left | entry.refused.keys() >= set(self._context.workers):
            del self._entries[entry.first["name"]]
            self._remove(entry)
            for client, again in entry.again:
                self.open(client, again)

    def leave(self, client: int) -> None:
        """A client opens nothing more, or died: it frees what it used."""
        self._left.add(client)
        for entry in list(self._entries.values()):
            if client in self._context.gone:
                entry.waiting = [waiting for waiting in entry.waiting if waiting[0] != client]
                entry.again = [again for again in entry.again if again[0] != client]
            if not entry.filled and entry.error is None:
                self._go_on(entry)
            self._sweep(entry)
