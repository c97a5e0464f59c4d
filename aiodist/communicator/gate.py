"""The gate of a communicator: an operation goes through when the ranks are known to have issued the same one.

Every collective enters in the order of its number, with a *word*: its fingerprint, mixed with that number. Ranks that
share memory are compared in the rings of `Marks`; then the first of them, the *leader* of its host, compares with the
leaders of the others in messages (`Between`) and leaves the verdict in its ring.

    entered - posted - the host compares - [the hosts compare] - all agree: it begins, if it has not, and counts
                                                              - some differ: it is refused, on every rank

What an operation has to wait for before it may begin, `When` says. Each step is made in the order of numbers, by the
thread that holds the transport lock: on the loop's thread or on the progress thread, so also while user code computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import partial
from time import perf_counter

from aiodist.backends.base import Done, again
from aiodist.backends.shm import Marks
from aiodist.collectives.between import Between
from aiodist.collectives.traffic import Differ, Traffic
from aiodist.handles import Progress

__all__ = ["Entry", "Gate", "Gates", "When"]


class When(Enum):
    """When an operation may begin."""

    NOW = "now"
    """At once: its library queues it, and is compared beside it (NCCL)."""
    HOST = "host"
    """When its host agrees: what leaves the host goes by our own messages, which can be taken off the wire again."""
    ALL = "all"
    """When all ranks agree: a library's collective cannot be taken back."""


Calls = tuple[Callable[[], None], Done]


def _nothing(error: BaseException | None = None) -> None:
    """It has begun, or was refused."""


@dataclass(eq=False, slots=True)
class Entry:
    """One operation at the gate."""

    seq: int
    word: int
    when: When = When.HOST
    traffic: Traffic | None = None
    """What it sends between hosts."""
    _: KW_ONLY
    calls: Calls = (_nothing, _nothing)
    """What begins it, and what refuses it instead, with why: one of them is made."""
    large: bool = False
    """Only the progress thread may begin it."""
    begun: bool = field(default=False, init=False)
    refused: bool = field(default=False, init=False)
    """It will never begin."""
    verdict: bool | None = field(default=None, init=False)
    """Of its leader: whether the hosts differ."""
    decided: bool = field(default=False, init=False)
    """Whether all ranks agree is known."""
    error: BaseException | None = field(default=None, init=False)
    """Why it does not count: a `Differ`, or why nobody compares any more."""
    held: list[Done] = field(default_factory=list, init=False)
    """What waits to know."""

    def __post_init__(self) -> None:
        if self.traffic is not None:
            self.traffic.agreed = self.known

    def known(self, done: Done) -> None:
        """Call `done` with None when all ranks agree, else with the error; at once where that is known."""
        if self.decided:
            done(self.error)
        else:
            self.held.append(done)

    def begin(self) -> None:
        """Begin it, unless that was done."""
        if not self.begun and not self.refused:
            self.begun = True
            self._take_calls()[0]()

    def settle(self, differs: bool) -> None:
        """It is known: begin it or refuse it, and tell who waits for that."""
        if differs:
            self.abort(Differ(self.seq))
        else:
            self.begin()
            self._decide(None)

    def abort(self, error: BaseException) -> None:
        """Refuse it, or have it end as soon as it may if it has begun."""
        if not self.begun:
            if not self.refused:
                self.refused = True
                self._take_calls()[1](error)
        elif self.traffic is not None:
            self.traffic.refuse(error)
        self._decide(error)

    def _decide(self, error: BaseException | None) -> None:
        self.decided, self.error = True, error
        if self.traffic is not None:
            self.traffic.decided(error)
        held, self.held = self.held, []
        for done in held:
            done(error)

    def _take_calls(self) -> Calls:
        """Return what is to be called, which holds on to the operation's memory."""
        calls, self.calls = self.calls, (_nothing, _nothing)
        return calls


class Gates:
    """All gates of one loop at which something waits for memory of others, as `Progress` polls them."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._waiting: list[Gate] = []
        self._polled = False

    rings = True
    """Who posts rings."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, gate: Gate) -> None:
        """Poll `gate` until nothing waits there."""
        if gate not in self._waiting:
            self._waiting.append(gate)
            if not self._polled:  # once: to come and go with each wait would take longer than the wait
                self._polled = True
                self.progress.add_poller(self)

    def remove(self, gate: Gate) -> None:
        """Poll `gate` no more."""
        if gate in self._waiting:
            self._waiting.remove(gate)

    def close(self) -> None:
        """Poll no more."""
        self._waiting.clear()
        self._polled = False
        self.progress.remove_poller(self)

    def poll(self, until: float = 0.0) -> bool:
        """Let through what may go; True when something did."""
        while True:
            moved = False
            for gate in tuple(self._waiting):
                if gate.advance():
                    moved = True
                if not gate.waits:  # also where an operation that came later let the others through
                    self.remove(gate)
            if moved or not self._waiting or perf_counter() >= until:
                return moved


_SPINS, _LEAST_SPINS = 32, 4  # about 5 us: waiting in line costs as much
_LOOK_PASSES = 256  # how often nothing may move before the sockets are looked at


class Gate:
    """See the module; everything runs with the transport lock held."""

    def __init__(
        self,
        gates: Gates,
        marks: Marks | None,
        between: Between | None,
        several: bool,
        on_differ: Callable[[Entry], None],
    ) -> None:
        """`marks` are those of this host, where other ranks share its memory; `between` is for leaders.

        `several`: there are ranks elsewhere. `on_differ` is told of each entry that is refused, once.
        """
        self.several = several
        self._gates = gates
        self._progress = gates.progress
        self._marks = marks
        self._between = between
        self._on_differ = on_differ
        self._line: deque[Entry] = deque()
        """Those that wait for their host, in order."""
        self._posted = 0
        self._undecided: deque[Entry] = deque()
        """Those that wait for the other hosts, in order."""
        self._closed: BaseException | None = None
        self._idle = 0
        self._patience = _SPINS
        """How often an operation is looked at before it waits in line: less where that was in vain."""

    @property
    def waits(self) -> bool:
        """Something here is found out by looking."""
        return bool(self._line) or (self._between is None and bool(self._undecided))

    def quick(self, seq: int, word: int, start: Callable[[], None], refuse: Done, large: bool) -> None:
        """Enter an operation that begins when all agree; a shorter way for what need not wait."""
        marks = self._marks
        if marks is not None and not (self._line or self.several or self._closed) and marks.has_room(seq):
            self._posted = seq + 1
            marks.post(seq, word)
            if marks.agree(seq, word, 1 if self._progress.crowded else self._patience):
                self._patience = _SPINS
                marks.checked(seq)
                start()
                return
            self._patience = max(self._patience >> 1, _LEAST_SPINS)
            if not large:
                self._line.append(Entry(seq, word, When.ALL, calls=(start, refuse)))
                self._gates.add(self)
                return
        self.enter(Entry(seq, word, When.ALL, calls=(start, refuse), large=large))

    def enter(self, entry: Entry) -> None:
        """Take the next operation."""
        if self._closed is not None:
            entry.abort(again(self._closed))
            return
        if entry.when is When.NOW:
            entry.begin()
        if self._marks is None:
            self._of_host(entry, differs=False)
            return
        if entry.large:
            self._progress.add_large(1)
        self._line.append(entry)
        self.advance()
        if self.waits:
            self._gates.add(self)

    def advance(self) -> bool:
        """Let through what may go; True when something did."""
        marks, line = self._marks, self._line
        assert marks is not None
        moved = False
        while line:
            entry = line[0]
            if self._posted <= line[-1].seq:
                self._post(marks)
            agreed = marks.compare(entry.seq, entry.word) if entry.seq < self._posted else None
            if agreed is None:
                break
            if entry.large and self._progress.owns_thread():
                break  # the progress thread does it, which `large` has it look
            line.popleft()
            moved = True
            try:
                self._of_host(entry, differs=not agreed)
            finally:
                if entry.large:
                    self._progress.add_large(-1)
        if self._undecided and self._between is None:
            moved = self._read_verdicts(marks) or moved
        if not moved:
            self._idle += 1
            if self._idle % _LOOK_PASSES == 0 or not marks.ordered:
                marks.look()
        return moved

    def _post(self, marks: Marks) -> None:
        """Post those of the line that have room."""
        for entry in self._line:
            if entry.seq >= self._posted:
                if not marks.has_room(entry.seq):
                    return
                self._posted = entry.seq + 1
                marks.post(entry.seq, entry.word)

    def _of_host(self, entry: Entry, *, differs: bool) -> None:
        """The ranks of this host have been compared."""
        if not self.several:
            self._settle(entry, differs)
            return
        if entry.when is When.HOST and not differs:
            entry.begin()
        self._undecided.append(entry)
        if self._between is not None:
            word = entry.word if self._marks is None else self._marks.together(entry.seq, entry.word)
            self._between.compare(entry.seq, word, differs, partial(self._between_hosts, entry))

    def _between_hosts(self, entry: Entry, differs: bool) -> None:
        """As a leader: the hosts have been compared, on operations that may overtake one another."""
        if entry.verdict is not None:
            return
        entry.verdict = differs
        while self._undecided and (verdict := self._undecided[0].verdict) is not None:
            first = self._undecided.popleft()
            if self._marks is not None:
                self._marks.decide(first.seq, verdict)
            self._settle(first, verdict)

    def _read_verdicts(self, marks: Marks) -> bool:
        """As another rank of the host: do as the leader found."""
        moved = False
        while self._undecided:
            verdict = marks.verdict(self._undecided[0].seq)
            if verdict is None:
                break
            self._settle(self._undecided.popleft(), verdict)
            moved = True
        return moved

    def _settle(self, entry: Entry, differs: bool) -> None:
        if self._marks is not None:
            self._marks.checked(entry.seq)
        if not entry.decided:
            entry.settle(differs)
            if differs:
                self._on_differ(entry)

    def doubt(self, seq: int) -> None:
        """Ranks are known to differ on operation `seq`, though not all have come: it keeps its place in the line.

        What a host begins as soon as it agrees waits for that: its other ranks may have begun, and meet this one there.
        """
        beginning = [entry for entry in self._line if entry.when is When.ALL]
        for entry in (*self._undecided, *beginning):
            if entry.seq == seq and not entry.decided:
                entry.settle(differs=True)
                self._on_differ(entry)

    def close(self, error: BaseException) -> None:
        """Compare nothing any more: what has not begun is refused with `error`, and so is what comes."""
        if self._closed is not None:
            return
        self._closed = error
        self._gates.remove(self)
        if self._marks is not None:
            self._marks.leave()
        waiting, self._line = self._line, deque()
        undecided, self._undecided = self._undecided, deque()
        for entry in waiting:
            if entry.large:
                self._progress.add_large(-1)
        for entry in (*undecided, *waiting):
            entry.abort(again(error))
