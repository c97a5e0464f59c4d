"""The state of a hub: the ranks of the job, their exits, and the store. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiodist.control.texts import name_ranks
from aiodist.errors import PeerLost, RemoteError
from aiodist.handshake import Refused

HUB: Final = -1
"""Stands for the hub in place of a rank."""


@dataclass(frozen=True)
class Exit:
    """The exit of a rank, or of the hub (`rank == HUB`)."""

    rank: int
    clean: bool
    """True after a goodbye. Any other exit is a failure."""
    cause: str
    traceback: str = ""
    """Traceback that the rank reported, or ""."""
    exitcode: int | None = None
    """Exit code that the rank reported, or None, as for a killed process."""
    host: int | None = None
    """Rank that was lost together with this hub, or None."""
    name: str = ""
    """Name of the rank in messages, or "" for its number."""
    number: int | None = None
    """Number of the rank in its own job if it is another job's, or None."""

    def error(self) -> PeerLost | RemoteError:
        """Return the exception for this exit: `RemoteError` if a traceback is known, otherwise `PeerLost`."""
        who = self.name or ("the hub" if self.rank == HUB else f"rank {self.rank}")
        rank = self.rank if self.number is None else self.number
        if not self.traceback:
            return PeerLost(f"{who} left: {self.cause}", lost=rank)
        message = f"{who} failed: {self.cause}\n{self.traceback}"
        return RemoteError(message, raised_by=rank, traceback=self.traceback)


class Roster:
    """The members of one session after another.

    A session begins when all ranks have joined. A rank that leaves before that may join again. When all have said
    goodbye, the next session may begin: under one launcher a process may open and close aiodist any number of times.
    After a failure no session begins.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ready = False
        """True once all ranks have joined this session."""
        self.joined: set[int] = set()
        """Ranks that joined this session, also those that left it after its beginning."""
        self.exits: dict[int, Exit] = {}
        """Last exit of each rank, until it joins again."""
        self._left: set[int] = set()
        self._gave_up: dict[int, Exit] = {}
        """Exits of ranks before the beginning of the session."""

    def join(self, rank: int, size: int) -> None:
        """Accept a rank, or raise `Refused` with the reason."""
        if size != self.size:
            raise Refused("size", f"rank {rank} expects {size} ranks, this hub {self.size}")
        if not 0 <= rank < size:
            raise Refused("rank", f"rank {rank} of {size}: expected 0 <= rank < {size}")
        if failed := [exit for exit in self.exits.values() if not exit.clean]:
            first = failed[0]
            raise Refused("failed", f"the job is over: rank {first.rank} left: {first.cause}")
        if rank in self._left:
            still_here = name_ranks(self.joined - self._left)
            raise Refused("left", f"rank {rank} has left this session, {still_here} not yet")
        if rank in self.joined:
            who = "two processes, or two init() of one process, have the same rank"
            raise Refused("duplicate", f"rank {rank} has joined already: {who}")
        self.joined.add(rank)
        self.exits.pop(rank, None)
        self._gave_up.pop(rank, None)
        self.ready = len(self.joined) == self.size

    def leave(self, exit: Exit) -> bool:
        """Note an exit. Return True if the others must be notified."""
        if not self.ready:
            if exit.rank in self.joined:
                self.joined.remove(exit.rank)
                self._gave_up[exit.rank] = exit
            return False
        if exit.rank in self._left:
            return False
        self.exits[exit.rank] = exit
        self._left.add(exit.rank)
        return True

    def start_over(self) -> bool:
        """Begin a new session if all ranks have said goodbye. Return True if so."""
        ended = len(self._left) == self.size and all(exit.clean for exit in self.exits.values())
        if ended:
            self.ready = False
            self.joined = set()
            self._left = set()
        return ended

    def missing(self) -> dict[int, str]:
        """Return the ranks that have not joined, each with the reason.

        Ranks that left in order after a timeout are the answer only if no other rank is missing.
        """
        missing = [rank for rank in range(self.size) if rank not in self.joined]
        first = [rank for rank in missing if rank not in self._gave_up or not self._gave_up[rank].clean] or missing
        return {
            rank: f"joined and left again: {self._gave_up[rank].cause}" if rank in self._gave_up else "never came"
            for rank in first
        }


Waiter = tuple[int, int]  # a rank, and the number of its request
Reply = Callable[[Any, Exception | None], object]


class Members(Protocol):
    """The ranks of an elastic job, as its hub reports them. The hub is that of one generation."""

    def ask(self, rank: int, joiners: int, reply: Reply) -> None:
        """A rank asks for the next generation, with `joiners` new ranks."""

    def missing(self, rank: int) -> dict[int, str]:
        """Return the ranks that a rank waits for, each with the reason."""

    def joined(self, rank: int) -> None:
        """A rank has joined."""

    def left(self, exit: Exit) -> None:
        """A rank has left."""


class Store:
    """The store of all ranks: byte strings by name, counters, exchanges, and the requests that wait for a name."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._brought: dict[str, dict[int, str]] = {}
        """Values of incomplete exchanges, by rank."""
        self._waiting: dict[str, dict[Waiter, Reply]] = {}

    def answer(self, question: Sequence[object], waiter: Waiter, reply: Reply) -> bool:
        """Answer a question by `reply(value, error)`: now, or when its key is set.

        An exchange is answered when all its ranks have asked. Returns False for a question that is not for the store.
        """
        value: object = None
        match question:
            case ["get", str(key)]:
                if key not in self._values:
                    self._waiting.setdefault(key, {})[waiter] = reply
                    return True
                value = self._values[key]
            case ["set", str(key), bytes(new)]:
                self._set(key, new)
            case ["exchange", str(key), int(size), str(mine)]:
                brought = self._brought.setdefault(key, {})
                brought[waiter[0]] = mine
                self._waiting.setdefault(key, {})[waiter] = reply
                if len(brought) == size:
                    del self._brought[key]
                    self._tell(key, [brought[rank] for rank in range(size)])
                return True
            case ["came", str(key)]:
                value = sorted(self._brought.get(key, ()))
            case ["add", str(key), int(amount)]:
                old = self._values.get(key, b"0")
                try:
                    value = int(old) + amount
                except ValueError:
                    reply(None, ValueError(f"key {key!r} holds {old[:32]!r}, which is no counter"))
                    return True
                self._set(key, str(value).encode())
            case _:
                return False
        reply(value, None)
        return True

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        self._tell(key, value)

    def _tell(self, key: str, value: object) -> None:
        for reply in self._waiting.pop(key, {}).values():
            reply(value, None)

    def cancel(self, rank: int, number: int | None = None) -> None:
        """Cancel the waiting request `number` of `rank`, or all its requests. Without one it is a no-op."""
        for key, waiters in tuple(self._waiting.items()):
            for waiter in tuple(waiters):
                if waiter[0] == rank and number in (None, waiter[1]):
                    del waiters[waiter]
            if not waiters:
                del self._waiting[key]
