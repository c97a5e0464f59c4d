"""What the ranks of a group tell each other about the operation at hand: sixteen numbers each, in shared memory.

Each rank writes its own board and reads the others'. A processor that shows one process's stores to another in the
order in which they were made (x86-64) needs nothing more. Elsewhere a board travels as a message over the socket
between two ranks, which orders it behind everything that was stored before.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from aiodist.backends.shm.memory import Place
from aiodist.backends.shm.neighbours import BOARD_BYTES, Neighbourhood, memory_of

__all__ = ["FILLED", "KEY", "NUMBER", "WORKED", "Board", "Boards", "Facts", "Post"]

NUMBER, KEY, FILLED, WORKED = range(4)
_POST = struct.Struct("10q")
_POST_AT = 4 * 8
_NOWHERE = Place(-1, 0)


class Facts(NamedTuple):
    """What all ranks must agree on."""

    kind: int
    dtype: int
    op: int
    root: int
    numel: int
    cut: int
    """How it is cut among the ranks, as one number."""


class Post(NamedTuple):
    """What a rank says of its part in an operation."""

    facts: Facts
    window: Place | None
    """Where its tensor lies, None when nobody else can reach it."""
    stage: Place | None
    """Where pieces of it are to be found instead."""

    @classmethod
    def of(cls, values: Sequence[int]) -> Post:
        """Return what the numbers of a board mean."""
        window, stage = Place(*values[6:8]), Place(*values[8:10])
        return cls(Facts(*values[:6]), window if window.segment >= 0 else None, stage if stage.segment >= 0 else None)


class Board:
    """One rank's numbers, as somebody reads them."""

    __slots__ = ("_memory", "words")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self.words = memory.cast("q")

    def write(self, number: int, key: int, facts: Facts, window: Place | None, stage: Place | None) -> None:
        """Say what this rank brings to operation `number`."""
        self.words[KEY] = -1  # a rank that sees the key sees all of it
        _POST.pack_into(self._memory, _POST_AT, *facts, *(window or _NOWHERE), *(stage or _NOWHERE))
        self.words[KEY] = key
        self.words[NUMBER] = number

    def read(self) -> tuple[int, ...]:
        """Return what was written, see `Post.of`."""
        return _POST.unpack_from(self._memory, _POST_AT)


class Boards:
    """This rank's board in a group, and the others'."""

    def __init__(self, near: Neighbourhood, name: str, ranks: Sequence[int], rank: int) -> None:
        """`ranks` are the world ranks of the group in its order, of which this is number `rank`."""
        self._near = near
        self._name = name
        self._rank = rank
        self._others = [near.neighbours[r] for i, r in enumerate(ranks) if i != rank]
        self._memory = near.place(name, BOARD_BYTES, [n.rank for n in self._others])
        self.mine = Board(memory_of(self._memory))
        self.all: list[Board] = []
        """By rank, once every other rank has made its own."""
        self.others: list[memoryview] = []
        """The words of the others'."""

    def meet(self) -> bool:
        """Return True once the boards of all are known."""
        boards: list[Board] = []
        for neighbour in self._others:
            seen = neighbour.seen(self._name, BOARD_BYTES, ordered=self._near.ordered)
            if seen is None:
                return False
            boards.append(Board(seen))
        self.others = [board.words for board in boards]
        boards.insert(self._rank, self.mine)
        self.all = boards
        return True

    def ring(self) -> None:
        """Have the others look."""
        if not self._near.ordered:
            message = {"board": self._name, "words": self.mine.words.tolist()}
            for neighbour in self._others:
                neighbour.tell(message)
        self._near.ring(self._others)

    def leave(self) -> None:
        """This rank has seen all that it waits for; the others may still have to see its last words."""
        self._near.leave(self._name, [neighbour.rank for neighbour in self._others], self._memory)

    def look(self) -> None:
        """Read what came over the sockets, and send what could not be sent."""
        for neighbour in self._others:
            neighbour.flush()
            neighbour.listen()
