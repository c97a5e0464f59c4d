"""What the ranks of a host say they have issued: a ring of words each, in shared memory.

A word stands for an operation: its fingerprint, mixed with its number. Rank after rank is compared before anything of
the operation moves. Each rank writes its own ring alone, and reads the others':

    POSTED    how many operations this rank has posted: entry n is valid once POSTED > n
    CHECKED   how many it has compared to the end: entry n may be overwritten once all others' CHECKED > n
    DECIDED   of the first rank of a host: how many verdicts of the other hosts are in, see `Gate`
    entries   the word of operation n at n % KEPT
    verdicts  1 where the hosts differ on operation n, at n % KEPT

The entry is stored before POSTED. A processor that shows one process's stores to another in the order in which they
were made (x86-64) needs nothing more; elsewhere each store travels as a message over the socket between two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiodist.backends.shm.neighbours import Neighbourhood, memory_of
from aiodist.backends.words import merged
from aiodist.handles.bell import FutexBell

__all__ = ["KEPT", "Marks"]

KEPT = 1024
"""How many operations may be under way between the first and the last rank."""

_POSTED, _CHECKED, _DECIDED = range(3)
_ENTRIES_AT = 8
_VERDICTS_AT = _ENTRIES_AT + KEPT
_WORDS = _VERDICTS_AT + KEPT
_CHECKED_EVERY = 64  # CHECKED is stored now and then: nobody but a rank far ahead looks at it


class Marks:
    """This rank's ring in a group of ranks that share memory, and the others'; with the transport lock held."""

    def __init__(self, near: Neighbourhood, name: str, ranks: Sequence[int], rank: int) -> None:
        """`ranks` are the world ranks of the group in its order, of which this is number `rank`."""
        self.rank = rank
        self._near = near
        self._name = f"{name} marks"
        self._neighbours = [near.neighbours[r] for i, r in enumerate(ranks) if i != rank]
        self._memory = near.place(self._name, 8 * _WORDS, [n.rank for n in self._neighbours])
        self._mine = memory_of(self._memory).cast("Q")
        self._others: list[memoryview] = []
        """The rings of the others, once all have made theirs."""
        self._bells: list[FutexBell] = []
        """What the others sleep at, likewise."""
        self._first: memoryview | None = self._mine if rank == 0 else None
        self._room = 0
        """Up to here this rank may post, as far as it knows: nothing before it knows where the others' rings are.

        Who has seen a post may be through with all, and leave.
        """
        self._told = 0
        self._left = False

    def post(self, seq: int, word: int) -> None:
        """Say that operation `seq` is what `word` stands for."""
        self._mine[_ENTRIES_AT + seq % KEPT] = word
        self._mine[_POSTED] = seq + 1
        if not self._near.ordered:
            self._tell((_ENTRIES_AT + seq % KEPT, word), (_POSTED, seq + 1))
        self._ring()

    def has_room(self, seq: int) -> bool:
        """Return True when entry `seq` may be written: all others are done with what it replaces."""
        if seq < self._room:
            return True
        if self._others or self.meet():
            self._room = min(words[_CHECKED] for words in self._others) + KEPT
        return seq < self._room

    def compare(self, seq: int, word: int) -> bool | None:
        """Return whether all ranks posted `word` as operation `seq`; None while some have posted nothing.

        False as soon as one differs, even while others are still to come.
        """
        if not self._others and not self.meet():
            return None
        at = _ENTRIES_AT + seq % KEPT
        agreed: bool | None = True
        for words in self._others:
            if words[at] == word:
                continue
            if words[_POSTED] <= seq:  # what is there is that of operation seq - KEPT
                agreed = None
                continue
            both = merged(word, words[at])  # looked at again: it may just have come
            if both is None:
                return False
            word = both
        return agreed

    def agree(self, seq: int, word: int, passes: int) -> bool | None:
        """Return what `compare` does after up to `passes` looks for what the others post most often: the same word."""
        at, others = _ENTRIES_AT + seq % KEPT, self._others
        for _ in range(passes):
            for words in others:
                if words[at] != word:
                    break
            else:
                return True
        return self.compare(seq, word)

    @property
    def ordered(self) -> bool:
        """Stores are seen in the order in which they were made; else they come over sockets, see `look`."""
        return self._near.ordered

    def together(self, seq: int, word: int) -> int:
        """Return what the words of all ranks, which agree, say together about operation `seq`."""
        for words in self._others:
            both = merged(word, words[_ENTRIES_AT + seq % KEPT])
            word = word if both is None else both
        return word

    def checked(self, seq: int) -> None:
        """Say that this rank needs the entries up to `seq` no longer."""
        if seq % _CHECKED_EVERY == _CHECKED_EVERY - 1:
            self._mine[_CHECKED] = seq + 1
            if not self._near.ordered:
                self._tell((_CHECKED, seq + 1))
            self._ring()  # who is that far ahead waits for it

    def decide(self, seq: int, differ: bool) -> None:
        """Tell the ranks of this host, as the first of them, what the hosts found about operation `seq`."""
        self._mine[_VERDICTS_AT + seq % KEPT] = differ
        self._mine[_DECIDED] = seq + 1
        if not self._near.ordered:
            self._tell((_VERDICTS_AT + seq % KEPT, int(differ)), (_DECIDED, seq + 1))
        self._ring()

    def verdict(self, seq: int) -> bool | None:
        """Return whether the hosts differ on operation `seq`, as the first rank found; None while it is not known."""
        if self._first is None and not self.meet():
            return None
        assert self._first is not None
        return bool(self._first[_VERDICTS_AT + seq % KEPT]) if self._first[_DECIDED] > seq else None

    def meet(self) -> bool:
        """Return True once the rings of all are known; read what came over the sockets."""
        if self._others and self._near.ordered:
            return True
        found = [neighbour.seen(self._name, 8 * _WORDS, ordered=self._near.ordered) for neighbour in self._neighbours]
        rings = [memory.cast("Q") for memory in found if memory is not None]
        if len(rings) < len(found):
            return False
        self._others = rings
        self._bells = [neighbour.bell for neighbour in self._neighbours]
        if self.rank:
            self._first = rings[0]
        return True

    def look(self) -> None:
        """Read what came over the sockets, and send what could not be sent."""
        for neighbour in self._neighbours:
            neighbour.flush()
            neighbour.listen()

    def leave(self) -> None:
        """This rank compares nothing any more; the others may still have to see its last words."""
        if not self._left:
            self._left = True
            self._near.leave(self._name, [neighbour.rank for neighbour in self._neighbours], self._memory)

    def _ring(self) -> None:
        """Wake those that sleep."""
        if self._bells:
            self._near.bell.ring_those(self._bells)
        else:
            self._near.ring(self._neighbours)

    def _tell(self, *words: tuple[int, int]) -> None:
        message = {"words": self._name, "of": 8 * _WORDS, "at": words}
        for neighbour in self._neighbours:
            neighbour.tell(message)
