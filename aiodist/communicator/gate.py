"""The gate of a communicator: an operation passes once the ranks are known to have issued the same one.

Every collective enters in the order of its number, with a *word*: its fingerprint, mixed with that number. Ranks that
share memory compare it in a lane; then the first of them, the *leader* of its host, compares with the leaders of the
others in messages (`Between`) and tells the verdict in a lane of its own.

    entered - the host compares - [the hosts compare] - all agree: it begins, if it has not, and counts
                                                      - some differ: it is refused, on every rank

What an operation has to wait for before it may begin, `When` says. Each step is made in the order of numbers, by the
thread that holds the transport lock: on the loop's thread or on the progress thread, so also while user code computes.
What a lane does from the call on (`direct`) does not enter: its word travels with its data, and is compared there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from functools import partial

import torch

from aiodist._core import LaneOperation
from aiodist.backends.base import Done, Primitive, again, tag_of
from aiodist.backends.shm import Lane
from aiodist.collectives.between import Between
from aiodist.collectives.traffic import Differ, Traffic
from aiodist.errors import MismatchError
from aiodist.handles import Progress


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
    compared: LaneOperation | None = field(default=None, init=False)
    """Its comparison within the host."""
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


class Gate:
    """See the module; everything runs with the transport lock held."""

    def __init__(
        self,
        progress: Progress,
        lane: Lane | None,
        verdicts: Lane | None,
        between: Between | None,
        several: bool,
        on_differ: Callable[[Entry], None],
    ) -> None:
        """`lane` is that of this host, where other ranks share its memory, and `verdicts` is for what its leader finds.

        `between` is for leaders. `several`: there are ranks elsewhere. `on_differ` is told of each entry that is
        refused, once.
        """
        self.several = several
        self._progress = progress
        self._lane = lane
        self._verdicts = verdicts
        self._between = between
        self._on_differ = on_differ
        self._line: deque[Entry] = deque()
        """Those that wait for their host, in order."""
        self._met: deque[tuple[Entry, bool]] = deque()
        """Those on which the host agrees, or not, and which the progress thread is to begin; and those behind them."""
        self._undecided: deque[Entry] = deque()
        """Those that wait for the other hosts, in order."""
        self._closed: BaseException | None = None

    def enter(self, entry: Entry) -> None:
        """Take the next operation."""
        if self._closed is not None:
            entry.abort(again(self._closed))
            return
        if entry.when is When.NOW:
            entry.begin()
        if self._lane is None:
            self._of_host(entry, differs=False)
            return
        self._line.append(entry)
        entry.compared = self._lane.compare(entry.word, self._host_compared)

    def _host_compared(self, error: BaseException | None) -> None:
        """The ranks of this host have been compared on the operation that came first."""
        entry = self._line.popleft()
        if error is not None and not isinstance(error, MismatchError):
            if not entry.decided:
                entry.abort(error)
            return
        on_loop = self._progress.owns_thread()
        if self._met or (entry.large and on_loop):
            self._met.append((entry, error is not None))
            if on_loop:
                self._progress.start_in_thread(self._go_on)
        else:
            self._of_host(entry, differs=error is not None)

    def _go_on(self) -> None:
        """Go on with those that the progress thread is to begin."""
        while self._met:
            entry, differs = self._met.popleft()
            self._of_host(entry, differs=differs)

    def _of_host(self, entry: Entry, *, differs: bool) -> None:
        """The ranks of this host have been compared."""
        if not self.several:
            self._settle(entry, differs)
            return
        if entry.when is When.HOST and not differs:
            entry.begin()
        self._undecided.append(entry)
        if self._between is not None:
            word = entry.word if entry.compared is None else entry.compared.met
            told = partial(self._between_hosts, entry)
            self._between.compare(tag_of(entry.seq), word, differs=differs, told=told)
        elif self._verdicts is not None:
            self._tell_verdict(torch.zeros(1, dtype=torch.bool, device="cpu"), self._verdict_told)

    def _between_hosts(self, entry: Entry, differs: bool) -> None:
        """As a leader: the hosts have been compared, on operations that may overtake one another."""
        if entry.verdict is not None:
            return
        entry.verdict = differs
        while self._undecided and (verdict := self._undecided[0].verdict) is not None:
            first = self._undecided.popleft()
            if self._verdicts is not None:
                self._tell_verdict(torch.tensor([verdict], device="cpu"), lambda _, __: None)
            self._settle(first, verdict)

    def _tell_verdict(self, verdict: torch.Tensor, then: Callable[[torch.Tensor, BaseException | None], None]) -> None:
        """Have all ranks of this host know what its leader found about the next operation."""
        assert self._verdicts is not None
        operation = Primitive("broadcast", verdict)
        self._verdicts.submit(operation, 0, 0, partial(then, verdict))

    def _verdict_told(self, verdict: torch.Tensor, error: BaseException | None) -> None:
        """As another rank of the host: do as the leader found."""
        entry = self._undecided.popleft() if self._undecided else None
        if entry is not None and error is not None:
            entry.abort(error)
        elif entry is not None:
            self._settle(entry, bool(verdict))

    def _settle(self, entry: Entry, differs: bool) -> None:
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
            if entry.seq == seq:
                self._settle(entry, differs=True)

    def close(self, error: BaseException) -> None:
        """Compare nothing any more: what has not begun is refused with `error`, and so is what comes."""
        if self._closed is not None:
            return
        self._closed = error
        met, self._met = self._met, deque()
        undecided, self._undecided = self._undecided, deque()
        for entry in (*undecided, *(entry for entry, _ in met), *self._line):
            if not entry.decided:
                entry.abort(again(error))
