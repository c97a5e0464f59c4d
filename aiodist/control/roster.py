"""Who is in the job: who may join, who left and how. No input, no output."""

from __future__ import annotations

from aiodist.control.exits import Exit, name_ranks
from aiodist.control.handshake import Refused

__all__ = ["Roster"]


class Roster:
    """The members of one session after another.

    A session begins when all ranks have joined; a rank that goes before that never came, and may come again. When
    all have said goodbye, the next session may begin: a process may open and close aiodist any number of times
    under one launcher. After a failure there is none.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ready = False
        """All ranks have joined this session."""
        self.joined: set[int] = set()
        """The ranks that came to this session, those that left again after it began too."""
        self.exits: dict[int, Exit] = {}
        """How each rank left last, until it joins again."""
        self._left: set[int] = set()
        self._gave_up: dict[int, str] = {}

    def join(self, rank: int, size: int) -> None:
        """Let a rank in; raise `Refused` with the reason why not."""
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
        """Note how a rank left; False when this is no news to the others."""
        if not self.ready:
            if exit.rank in self.joined:
                self.joined.remove(exit.rank)
                self._gave_up[exit.rank] = exit.cause
            return False
        if exit.rank in self._left:
            return False
        self.exits[exit.rank] = exit
        self._left.add(exit.rank)
        return True

    def start_over(self) -> bool:
        """Begin a new session if all have said goodbye; whether that is so."""
        over = len(self._left) == self.size and all(exit.clean for exit in self.exits.values())
        if over:
            self.ready = False
            self.joined = set()
            self._left = set()
        return over

    def missing(self) -> dict[int, str]:
        """Return the ranks that have not joined, each with what is known of it."""
        return {
            rank: f"joined and left again: {self._gave_up[rank]}" if rank in self._gave_up else "never came"
            for rank in range(self.size)
            if rank not in self.joined
        }
