"""The names that one server leads: made by the ranks that open them, and removed when all workers have freed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from aiodist.control import disagreement
from aiodist.errors import AiodistError, MismatchError
from aiodist.ps.answers import Answers
from aiodist.ps.context import Context
from aiodist.ps.shard import Shards
from aiodist.ps.wire import Kind

_KEY_BITS = 40
"""Bits of a key that count the keys of one server; the others are the server's rank."""
_COMPARED = ("dtype", "shape", "rule", "start", "servers", "codec", "table")
"""Arguments that must be equal in all calls for a name."""

_Call = dict[str, Any]


@dataclass(eq=False)
class _Name:
    """One name. *Fillers* give the first values, and the other clients wait for them."""

    key: int
    first: _Call
    """The first call."""
    opener: int
    """Client of the first call."""
    fillers: set[int] = field(default_factory=set)
    waiting: list[tuple[int, _Call]] = field(default_factory=list)
    """Clients that wait, with their calls."""
    done: dict[int, int] = field(default_factory=dict)
    """Number of the last call of each filler that has finished."""
    filled: bool = False
    """True once the name has its first values."""
    freed: set[int] = field(default_factory=set)
    """Clients that have freed the name."""
    refused: dict[int, AiodistError] = field(default_factory=dict)
    """Errors of clients with other arguments for a filled name."""
    again: list[tuple[int, _Call]] = field(default_factory=list)
    """Calls of clients that open the name again before all have freed it."""
    error: AiodistError | None = None
    """Reason why the name never gets first values, or None."""

    @property
    def alone(self) -> bool:
        """True if one filler gives all values."""
        return bool(self.first["start"] != "own" or self.first["again"])


class Directory:
    """The names of one server (transport lock held)."""

    def __init__(self, context: Context, answers: Answers, shards: Shards) -> None:
        self._context = context
        self._answers = answers
        self._shards = shards
        self._names: dict[str, _Name] = {}
        self._keys = count(context.rank << _KEY_BITS)
        self.left: set[int] = set()
        """Clients that open nothing more, and come to no barrier."""

    def open(self, client: int, call: _Call) -> None:
        """A client opens a name, and waits until the name has its values or the client is a filler."""
        name = self._names.get(call["name"])
        if name is None:
            name = self._names[call["name"]] = _Name(next(self._keys), call, client)
        if client in name.freed:
            name.again.append((client, call))
            return
        if client in name.refused:
            self._answers.fail(client, call["n"], name.refused[client])
            return
        different = [what for what in _COMPARED if call[what] != name.first[what]]
        if different and name.error is None:
            error = self._mismatch(name, client, call, different)
            if name.filled:
                name.refused[client] = error
                self._answers.fail(client, call["n"], error)
                self._shards[name.key].leave(client, gone=False)  # no step waits for its pushes
                self._sweep(name)
                return
            name.error = error
            self._remove(name)
        name.waiting.append((client, call))
        self._answer(name)

    def _mismatch(self, name: _Name, client: int, call: _Call, different: Sequence[str]) -> MismatchError:
        texts = {
            rank: ", ".join(f"{what} {side[what]}" for what in different)
            for rank, side in ((name.opener, name.first), (client, call))
        }
        return MismatchError(disagreement(f"the init of {call['name']!r}", texts))

    def _answer(self, name: _Name) -> None:
        """Answer the clients whose part is known: to fill, to continue, or to fail."""
        if name.error is None and not name.filled:
            for client, call in list(name.waiting):
                # With `again`, the values come from a checkpoint or the last communicator.
                fills = call["again"] or client in self._candidates(name)
                if fills and not (name.alone and name.fillers):
                    name.fillers.add(client)
                    name.waiting.remove((client, call))
                    self._answers.answer(client, call["n"], key=name.key, fill=True)
            name.error = self._hopeless(name)
            if name.error is not None:
                self._remove(name)
        if name.error is None and not name.filled:
            return
        for client, number in [*name.done.items(), *((client, call["n"]) for client, call in name.waiting)]:
            if name.error is not None:
                self._answers.fail(client, number, name.error)
            else:
                self._answers.answer(client, number, key=name.key, fill=False)
        name.waiting.clear()
        name.done.clear()

    def _candidates(self, name: _Name) -> Sequence[int]:
        """Return the clients that may fill: the servers, the first worker, or any worker."""
        if name.first["start"] == "own":
            candidates: Sequence[int] = name.first["servers"]
            return candidates
        return self._context.workers[:1] if name.first["start"] == "root" else self._context.workers

    def _hopeless(self, name: _Name) -> AiodistError | None:
        """Return the reason why no client will fill, or None."""
        for rank in (*name.first["servers"], *name.fillers - name.done.keys()):
            if rank in self._context.gone:
                return self._context.lost(rank)
        start, candidates = name.first["start"], self._candidates(name)
        missing = [rank for rank in candidates if rank in self.left and rank not in name.fillers]
        if name.first["again"] or not missing or (start == "first" and len(missing) < len(candidates)):
            return None
        which = "one" if start == "first" else "each"
        text = f"init of {name.first['name']!r} with start={start!r}: no rank will give its first values"
        return MismatchError(f"{text}: expected {which} of ranks {list(candidates)} to init it")

    def _remove(self, name: _Name) -> None:
        for rank in name.first["servers"]:
            self._context.put_json(rank, Kind.CALL, {"op": "remove", "key": name.key})

    def ready(self, client: int, call: _Call) -> None:
        """A filler has finished."""
        name = self._names[call["name"]]
        name.done[client] = call["n"]
        name.filled = name.error is None and (name.alone or set(name.first["servers"]) <= set(name.done))
        if name.error is not None:
            self._remove(name)  # the shards that were made since
        self._answer(name)

    def free(self, client: int, call: _Call) -> None:
        """A client frees a name. Later steps do not wait for its pushes."""
        name = self._names.get(call["name"])
        if name is not None and name.key == call["key"]:
            name.freed.add(client)
            self._shards[name.key].leave(client, gone=False)
            self._sweep(name)
        self._answers.answer(client, call["n"])

    def _sweep(self, name: _Name) -> None:
        """Remove a name that all workers have freed."""
        if name.freed and name.freed | self.left | name.refused.keys() >= set(self._context.workers):
            del self._names[name.first["name"]]
            self._remove(name)
            for client, again in name.again:
                self.open(client, again)

    def leave(self, client: int) -> None:
        """A client has left, or is gone."""
        self.left.add(client)
        for name in list(self._names.values()):
            if client in self._context.gone:
                name.waiting = [waiting for waiting in name.waiting if waiting[0] != client]
                name.again = [again for again in name.again if again[0] != client]
            if not name.filled and name.error is None:
                self._answer(name)
            self._sweep(name)
